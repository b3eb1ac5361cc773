"""The marker of a live run in a store: told to other runs, renewed, replaced if its run was killed."""

from __future__ import annotations

import json
import time
from dataclasses import astuple, replace
from typing import Any

import pytest
from shelf import Shelf, dying, kept, nothing

from cyxtrain.checkpoint import live_marker
from cyxtrain.checkpoint.live_marker import STALE_SECONDS, LiveMarker
from cyxtrain.checkpoint.remote_files import read_text_of, write_remote
from cyxtrain.environment.processes import this_process

FIRST = {"id": "0123456789abcdef", "started": 1.0}
SECOND = {"id": "fedcba9876543210", "started": 2.0}
# No process has it: Linux's largest is 2**22.
NO_PID = 2**30


@pytest.fixture
def url(tmp_path):
    yield f"shelf://{tmp_path}/store"
    Shelf.before = staticmethod(nothing)


def put(url: str, machine: str = "another", age_seconds: float = 0.0) -> None:
    """Leave the marker of the first run, whose process is gone if this is its machine."""
    process = replace(this_process(live_marker.platform.node()), pid=NO_PID)
    if machine:
        process = replace(process, machine=machine)
    elif not process.machine:
        pytest.skip("this container does not show which processes are gone")
    found = {"run": FIRST["id"], "name": "run 01234567", "process": astuple(process), "token": "1"}
    write_remote(f"{url}/{live_marker._NAME}", json.dumps(found | {"time": time.time() - age_seconds}).encode())


def marker(url: str, run: dict[str, Any], told: list[str] | None = None) -> LiveMarker:
    told = [] if told is None else told
    return LiveMarker(url, run, told.append)


def test_a_second_run_is_told_of_the_first_until_that_ends(url, tmp_path):
    first = marker(url, FIRST)
    second = marker(url, SECOND)
    assert second.others() == []
    assert first.claim() == []
    [name] = second.claim()
    assert name.startswith("run 01234567 (begun ")
    assert " in process " in name
    assert second.others() == [name]
    second.close()
    assert kept(tmp_path / "store") == {live_marker._NAME}
    first.close()
    assert kept(tmp_path / "store") == set()
    again = marker(url, SECOND)
    assert again.claim() == []
    again.close()


@pytest.mark.parametrize(
    ("machine", "age_seconds", "is_live"),
    [("another", 0.0, True), ("another", STALE_SECONDS + 1, False), ("", 0.0, False)],
    ids=["live", "stale", "gone from this machine"],
)
def test_the_marker_of_a_killed_run_is_replaced(machine, age_seconds, is_live, url):
    put(url, machine, age_seconds)
    second = marker(url, SECOND)
    assert second.claim() == ["run 01234567"] * is_live
    owner = json.loads(read_text_of(f"{url}/{live_marker._NAME}"))["run"]
    assert owner == (FIRST if is_live else SECOND)["id"]
    second.close()


def test_a_run_that_is_resumed_takes_its_marker_and_a_process_that_still_has_it_is_told(url, monkeypatch):
    monkeypatch.setattr(live_marker, "RENEW_SECONDS", 0.02)
    told: list[str] = []
    first = marker(url, FIRST, told)
    assert first.claim() == []
    again = marker(url, FIRST)
    assert again.claim() == []
    first._thread.join(10.0)
    [line] = told
    assert line.startswith("run 01234567 (begun ")
    assert f" is writing to {url}, too. End one of the two" in line
    first.close()
    assert json.loads(read_text_of(f"{url}/{live_marker._NAME}"))["token"] == again._facts["token"]
    again.close()


def test_the_time_is_renewed(url, monkeypatch):
    monkeypatch.setattr(live_marker, "RENEW_SECONDS", 0.02)
    first = marker(url, FIRST)
    first.claim()
    began = json.loads(read_text_of(f"{url}/{live_marker._NAME}"))["time"]
    until = time.monotonic() + 10.0
    while json.loads(read_text_of(f"{url}/{live_marker._NAME}"))["time"] == began and time.monotonic() < until:
        time.sleep(0.01)
    assert json.loads(read_text_of(f"{url}/{live_marker._NAME}"))["time"] > began
    first.close()


@pytest.mark.parametrize("content", [b"", b"[1]", b"{}", b'{"process": 3, "time": "now"}', b"\xff"])
def test_another_file_in_its_place_is_replaced(content, url):
    write_remote(f"{url}/{live_marker._NAME}", content)
    first = marker(url, FIRST)
    assert first.claim() == []
    assert json.loads(read_text_of(f"{url}/{live_marker._NAME}"))["run"] == FIRST["id"]
    first.close()


def test_a_store_in_trouble_is_no_error(url):
    Shelf.before = staticmethod(dying(-1))
    first = marker(url, FIRST)
    assert first.claim() == []
    assert first.others() == []
    first.close()
