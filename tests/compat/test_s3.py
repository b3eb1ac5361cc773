"""Checkpoints in S3, against a server of its API: a fit killed in mid-upload resumes elsewhere to equal weights."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator

import numpy as np
import pytest
import s3_fits
from rank_processes import run_ranks, values
from worlds import free_port

pytest.importorskip("s3fs")
pytest.importorskip("moto")
pytestmark = [
    pytest.mark.usefixtures("rank_server"),
    pytest.mark.nightly,
    pytest.mark.skipif(os.name == "nt", reason="ranks are killed by POSIX signals here"),
]
MOMENTS = [(count, after) for count in range(1, 11) for after in (False, True)]


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory, rank_server) -> Iterator[str]:
    port = free_port()
    log = tmp_path_factory.mktemp("moto") / "log"
    with log.open("w") as output:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        server = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 60
        while not is_up(address):
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        values(run_ranks(1, s3_fits.make_bucket, address, "bucket", seconds=60))
        yield address
    finally:
        server.kill()
        server.wait()


def is_up(address: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/moto-api/", timeout=5):
        return True
    return False


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, rank_server):
    folder = str(tmp_path_factory.mktemp("undisturbed"))
    return values(run_ranks(2, s3_fits.fit_in_a_world, folder, "", folder, {}, seconds=60))[0][0]


@pytest.mark.parametrize(("count", "after"), MOMENTS)
def test_a_fit_killed_in_mid_upload_resumes_on_an_empty_disk(count, after, endpoint, undisturbed, tmp_path):
    url = f"s3://bucket/killed-{count}-{after}"
    world_size = 1 + 2 * (count % 2)
    arguments = (url, endpoint, str(tmp_path / "first"))
    killed = run_ranks(2, s3_fits.fit_in_a_world, *arguments, {}, count, after, seconds=60)
    assert killed[0].kind == "Killed"
    [there] = values(run_ranks(1, s3_fits.epochs_in, *arguments, seconds=60))  # each is intact
    elsewhere = (url, endpoint, str(tmp_path / "second"))
    resumed = values(run_ranks(world_size, s3_fits.fit_in_a_world, *elsewhere, {"resume": "auto"}, seconds=60))
    for parameters, epochs, steps in resumed:
        assert epochs == 3
        assert steps == 4 * (3 - max(there, default=0))
        assert np.allclose(parameters, undisturbed, atol=1e-6)
    [left] = values(run_ranks(1, s3_fits.epochs_in, *elsewhere, seconds=60))
    if max(there, default=0) < 3:  # otherwise nothing was left to train, and so nothing to delete
        assert left == [3]
    assert left[-1] == 3


def test_two_ranks_resume_to_equal_bits(endpoint, undisturbed, tmp_path):
    arguments = ("s3://bucket/equal", endpoint, str(tmp_path / "first"))
    killed = run_ranks(2, s3_fits.fit_in_a_world, *arguments, {"keep_best": "loss"}, 8, True, seconds=60)
    assert killed[0].kind == "Killed"
    settings = {"resume": "auto", "keep_best": "loss"}
    elsewhere = ("s3://bucket/equal", endpoint, str(tmp_path / "second"))
    resumed = values(run_ranks(2, s3_fits.fit_in_a_world, *elsewhere, settings, seconds=60))
    assert all(np.array_equal(parameters, undisturbed) for parameters, *_ in resumed)
    [there] = values(run_ranks(1, s3_fits.epochs_in, *elsewhere, seconds=60))
    assert len(there) == 2  # the best, which may be an earlier one, and the last
    assert there[1] == 3


def test_an_upload_takes_little_memory(endpoint, tmp_path):
    [(taken, is_same)] = values(
        run_ranks(1, s3_fits.upload_large, "s3://bucket/large", endpoint, str(tmp_path), seconds=110)
    )
    assert is_same
    assert taken <= 64 << 20


@pytest.mark.parametrize("port_is_open", [True, False], ids=["no bucket", "no server"])
def test_a_store_that_is_not_there_is_an_error_on_all_ranks(port_is_open, endpoint, tmp_path):
    address = endpoint if port_is_open else f"http://127.0.0.1:{free_port()}"
    ended = values(run_ranks(2, s3_fits.fit_into, "s3://no-such-bucket/run", address, str(tmp_path), seconds=60))
    for kind, message, shown, seconds in ended:
        assert kind == "CheckpointError"
        assert "s3://no-such-bucket/run" in message
        assert "\n" not in message
        assert not re.search("s3fs/|botocore/|aiohttp/", shown)
        assert seconds < 15  # the import of the library, then 5 s


def test_a_marker_is_put_on_the_condition_that_there_is_none(endpoint, tmp_path):
    arguments = ("s3://bucket/marker", endpoint, str(tmp_path))
    [(told, conditions, left)] = values(run_ranks(1, s3_fits.mark_twice, *arguments, seconds=60))
    assert told[0] == told[2] == []
    assert told[1][0].startswith("run 00000000 (begun ")
    assert conditions == ["*"] * 2  # the second run sees the marker, and puts none
    assert left == []


@pytest.mark.parametrize("world_size", [1, 2])
def test_logs_histories_settings_and_predictions_go_there_and_come_back(world_size, endpoint, tmp_path):
    pytest.importorskip("matplotlib")
    arguments = (f"s3://bucket/files-{world_size}", endpoint, str(tmp_path))
    for found in values(run_ranks(world_size, s3_fits.write_and_read, *arguments, seconds=60)):
        assert all(found.values()), found
