"""Claims about checkpoints in a store: the promises of a local folder, and a store in trouble never stops a fit."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import shelf
from fitting import everywhere, one_process, run_new_world, run_world
from markers import by_night, nightly_where
from rank_processes import run_ranks
from shelf import fit, fit_in_a_world, kept, move, nothing

import cyxtrain as cx
from cyxtrain.checkpoint import remote_files
from cyxtrain.checkpoint.checkpoint_file import read_checkpoint
from cyxtrain.checkpoint.folder import CheckpointFolder, look_into

pytestmark = [pytest.mark.usefixtures("rank_server")]
OK = (nothing,)
AUTO = {"resume": "auto"}


@pytest.fixture
def folders(tmp_path, monkeypatch) -> tuple[Path, str, str]:
    """The folder behind the store, its URL, and where files wait for it."""
    staging = f"{tmp_path}/staging"
    monkeypatch.setenv("CYXTRAIN_STAGING_DIR", staging)
    return tmp_path / "store" / "run", f"shelf://{tmp_path}/store/run", staging


def waiting(staging: str) -> set[str]:
    return {path.name for path in Path(staging).rglob("*") if path.is_file()}


def fit_alone(*arguments: Any) -> dict[str, Any]:
    with one_process():
        return fit(*arguments)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, rank_server) -> dict[str, Any]:
    folder = str(tmp_path_factory.mktemp("undisturbed"))
    return run_new_world(2, fit, folder, folder)[0]


@pytest.mark.parametrize("world_size", [by_night(1), 2])
def test_a_store_has_the_files_that_a_folder_would_have(world_size, folders, undisturbed, tmp_path):
    store, url, staging = folders
    settings = {"keep_last": 2, "keep_best": "loss", "load_best": True}
    found = everywhere(world_size, fit, url, staging, OK, settings)
    local = everywhere(world_size, fit, str(tmp_path / "local"), staging, OK, settings)
    assert [each["bits"] for each in found] == [each["bits"] for each in local]
    assert kept(store) == kept(tmp_path / "local") == {"epoch-0002.ckpt", "epoch-0003.ckpt", "best.ckpt"}
    for name in kept(store):
        assert read_checkpoint(store / name).position == read_checkpoint(tmp_path / "local" / name).position
    assert waiting(staging) == set()
    assert [each["told"] for each in found] == [[]] * world_size


def test_each_rank_has_its_own_files_if_all_write(folders):
    store, url, staging = folders
    found = run_world(2, fit, url, staging, OK, {"save_on_master_only": False, "epochs": 1})
    assert kept(store) == {"epoch-0001-rank0.ckpt", "epoch-0001-rank1.ckpt"}
    again = run_new_world(2, fit, url, staging, OK, {"save_on_master_only": False, "epochs": 1, **AUTO})
    assert [each["steps"] for each in again] == [0, 0]
    assert [each["bits"] for each in again] == [each["bits"] for each in found]


@pytest.mark.skipif(os.name == "nt", reason="ranks are killed by POSIX signals here")
@nightly_where(lambda parts: parts != 12)
@pytest.mark.parametrize("parts", [0, 1, 5, 8, 12, 15])
def test_a_fit_killed_in_mid_upload_resumes_on_another_number_of_ranks(parts, folders, undisturbed, tmp_path):
    store, url, staging = folders
    killed = run_ranks(2, fit_in_a_world, url, staging, (shelf.killing, parts), {"keep_last": 1})
    assert killed[0].kind == "Killed"
    there = [name for name in kept(store) if not name.startswith(".")] if store.exists() else []
    positions = [read_checkpoint(store / name).position["epoch"] for name in there]  # none is half a file
    [resumed] = everywhere(1, fit, url, str(tmp_path / "empty"), OK, {"keep_last": 1, **AUTO})
    assert resumed["steps"] == 4 * (3 - max(positions, default=0))
    assert np.allclose(resumed["parameters"], undisturbed["parameters"], atol=1e-6)
    assert {name for name in kept(store) if not name.startswith(".")} == {"epoch-0003.ckpt"}


@pytest.mark.skipif(os.name == "nt", reason="ranks are killed by POSIX signals here")
def test_on_the_same_machine_what_was_not_uploaded_is_found(folders, undisturbed):
    store, url, staging = folders
    run_ranks(2, fit_in_a_world, url, staging, (shelf.killing, 0))
    newest = max(each.position.get("epoch", 0) for each in CheckpointFolder(url).newest_first())
    assert newest >= 1
    resumed = run_new_world(2, fit, url, staging, OK, AUTO)
    assert resumed[0]["steps"] == 4 * (3 - newest)
    assert resumed[0]["bits"] == undisturbed["bits"]
    assert "epoch-0003.ckpt" in kept(store)
    assert waiting(staging) == set()


def test_a_corrupt_checkpoint_is_passed_over(folders, undisturbed):
    store, url, staging = folders
    run_world(2, fit, url, staging)
    content = bytearray((store / "epoch-0003.ckpt").read_bytes())
    content[len(content) // 3] ^= 1
    (store / "epoch-0003.ckpt").write_bytes(content)
    (store / "epoch-0002.ckpt").write_bytes((store / "epoch-0002.ckpt").read_bytes()[:-100])
    resumed = run_new_world(2, fit, url, staging, OK, AUTO)
    assert resumed[0]["steps"] == 8
    assert resumed[0]["bits"] == undisturbed["bits"]
    assert [line for line in resumed[0]["told"] if f"{url}/epoch-0003.ckpt is corrupt" in line]
    assert [line for line in resumed[0]["told"] if f"{url}/epoch-0002.ckpt is corrupt" in line]
    assert resumed[1]["told"] == []


def test_a_checkpoint_is_named_by_its_url(folders):
    _, url, staging = folders
    found = everywhere(2, fit, url, staging)
    named = everywhere(2, fit, url, staging, OK, {"resume": f"{url}/epoch-0002.ckpt"})
    assert [each["steps"] for each in named] == [4, 4]
    assert named[0]["bits"] == found[0]["bits"]


def test_a_slow_store_holds_up_no_step_and_gets_the_newest(folders):
    store, url, staging = folders
    gate = threading.Event()

    class Open(cx.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 5:
                names = [name for name in waiting(staging) if not name.startswith(".")]
                assert len(names) <= 4  # one is uploaded, two wait, and another is complete
                gate.set()

    before = (lambda call: gate.wait(20) if call == "part" else None,)
    found = fit_alone(url, staging, before, {"epochs": 6, "more": [Open()], "keep_best": "loss", "keep_last": 2})
    assert {"epoch-0006.ckpt", "best.ckpt"} <= kept(store)
    assert look_into(store / "best.ckpt").position["epoch"] == found["losses"].index(min(found["losses"])) + 1
    [line] = found["told"]
    assert f"did not get to {url}: newer ones were complete before their upload began" in line
    assert int(line.split()[0]) >= 2
    assert waiting(staging) == set()


def test_a_store_that_dies_does_not_stop_the_fit_and_gets_the_rest_later(folders):
    store, url, staging = folders
    found = fit_alone(url, staging, (shelf.dying, 5))
    assert found["epochs"] == 3
    first, last = found["told"][0], found["told"][-1]
    assert "the store is gone" in first
    assert "Training continues" in first
    assert f"epoch-0003.ckpt did not get to {url} (" in last
    assert "epoch-0003.ckpt" in waiting(staging)
    again = fit_alone(url, staging, OK, {"epochs": 4, **AUTO})
    assert again["steps"] == 4
    assert "epoch-0004.ckpt" in kept(store)
    assert waiting(staging) == set()


@pytest.mark.skipif(os.name == "nt", reason="the signal is POSIX's")
def test_a_stop_does_not_wait_longer_for_a_store_than_it_may(folders, undisturbed):
    _, url, staging = folders
    settings = {"terminate_at": 5}
    ended = run_ranks(2, fit_in_a_world, url, staging, (shelf.stuck,), settings, CYXTRAIN_GRACE_SECONDS="5")
    assert [each.kind for each in ended] == ["SystemExit"] * 2
    assert max(each.seconds for each in ended) < 10
    [step] = [int(name[5:13]) for name in waiting(staging) if name.startswith("step-")]
    resumed = run_new_world(2, fit, url, staging, OK, AUTO)
    assert resumed[0]["steps"] == 12 - step
    assert resumed[0]["bits"] == undisturbed["bits"]


def test_a_dead_store_can_be_an_error(folders):
    _, url, staging = folders
    ended = run_ranks(2, fit_in_a_world, url, staging, (shelf.dying, 5), {"on_save_error": "raise"})
    assert {each.kind for each in ended} == {"CheckpointError"}
    assert f"The last checkpoint did not get to {url}" in ended[0].message


@nightly_where(lambda before, settings: (before is shelf.forbidding) == ("resume" in settings))
@pytest.mark.parametrize(
    ("before", "words"),
    [(shelf.forbidding, "Cannot list {}: PermissionError: Forbidden. Check"), (shelf.silent, "does not answer within")],
)
@pytest.mark.parametrize("settings", [{}, {"checkpoint_every_n_epochs": 0, **AUTO}], ids=["save", "resume"])
def test_a_store_that_cannot_be_used_is_an_error_on_all_ranks_before_the_first_step(before, words, settings, folders):
    _, url, staging = folders
    ended = run_ranks(2, fit_with_little_time, url, staging, (before,), settings)
    assert [each.kind for each in ended] == ["CheckpointError"] * 2
    for each in ended:
        assert words.format(url) in each.message
        assert "\n" not in each.message


def fit_with_little_time(*arguments: Any) -> dict[str, Any]:
    remote_files.START_SECONDS = 0.5
    return fit_in_a_world(*arguments)


def test_files_of_other_runs_stay(folders):
    store, url, staging = folders
    fit_alone(url, staging, OK, {"epochs": 3})
    other = fit_alone(url, staging, OK, {"epochs": 1, "keep_last": 1, "rate": 0.2})
    assert kept(store) == {"epoch-0001.ckpt", "epoch-0002.ckpt", "epoch-0003.ckpt"}
    [line] = other["told"]
    assert "3 checkpoints of another training" in line
    # It began last.
    assert look_into(store / "epoch-0001.ckpt").run["started"] > look_into(store / "epoch-0002.ckpt").run["started"]


def test_a_run_that_began_later_elsewhere_keeps_its_names(folders, tmp_path):
    store, url, staging = folders
    fit_alone(str(tmp_path / "other"), staging, OK, {"rate": 0.2})

    class Later(cx.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 1:
                shutil.copy(tmp_path / "other" / "epoch-0003.ckpt", store)

    found = fit_alone(url, staging, OK, {"more": [Later()]})
    other = look_into(tmp_path / "other" / "epoch-0003.ckpt")
    assert look_into(store / "epoch-0003.ckpt").run["id"] == other.run["id"]
    [stepped_aside] = [name for name in kept(store) if name.startswith("epoch-0003-")]
    assert look_into(store / stepped_aside).run["id"] != other.run["id"]
    assert [line for line in found["told"] if "is writing to" in line]


@pytest.mark.parametrize("world_size", [1, 2])
def test_checkpoints_and_weights_go_to_urls_and_come_back(world_size, folders, tmp_path):
    for first, *others in everywhere(world_size, move, str(tmp_path), folders[1]):
        assert others == [first] * 3 + [2]
    assert waiting(folders[2]) == set()
    assert kept(folders[0] / "own") == {"mine.ckpt", "model.safetensors"}


def test_a_file_is_named_if_it_is_not_there(alone, folders):
    trainer = cx.DistributedTrainer(shelf.make_model(), "cross_entropy", "sgd")
    with pytest.raises(cx.CheckpointError, match=r"There is no checkpoint shelf://.*/x.ckpt. Check the URL."):
        trainer.load_checkpoint(f"{folders[1]}/x.ckpt")


def put_marker(store: Path, run: str) -> None:
    """Leave the marker of a run that is alive on another machine."""
    found = {"run": run, "name": "run 01234567 in process 1 on another", "process": ["another", 1, 1], "token": "1"}
    store.mkdir(parents=True, exist_ok=True)
    (store / ".cyxtrain-live.json").write_text(json.dumps(found | {"time": time.time()}))


def test_a_run_beside_one_on_another_machine_keeps_to_its_own_names(folders):
    store, url, staging = folders
    put_marker(store, "0123456789abcdef")
    [line] = fit_alone(url, staging, OK, {"epochs": 2})["told"]
    assert line.startswith(f"run 01234567 in process 1 on another is writing to {url}, too: the checkpoints of run ")
    assert {re.sub("-[0-9a-f]{8}", "-*", name) for name in kept(store)} == {
        ".cyxtrain-live.json",
        "epoch-0001-*.ckpt",
        "epoch-0002-*.ckpt",
    }


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_marker_of_a_killed_run_does_not_block_its_resume(world_size, folders):
    store, url, staging = folders
    everywhere(world_size, fit, url, staging, OK, {"epochs": 1})
    assert kept(store) == {"epoch-0001.ckpt"}
    put_marker(store, look_into(store / "epoch-0001.ckpt").run["id"])
    found = everywhere(world_size, fit, url, staging, OK, {"epochs": 2, **AUTO})
    assert [(each["steps"], each["told"]) for each in found] == [(4, [])] * world_size
    assert kept(store) == {"epoch-0001.ckpt", "epoch-0002.ckpt"}


def epochs_of(log: Path) -> list[str]:
    return [line.split(",")[0] for line in log.read_text().splitlines()]


def test_a_log_in_a_store_is_continued_and_does_not_stop_a_fit(folders):
    store, url, staging = folders
    log = f"{url}/log.csv"
    is_dead = threading.Event()

    def before(_: str) -> None:
        if is_dead.is_set():
            raise ConnectionError("the store is gone")

    class Dies(cx.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 3:
                is_dead.set()

    fit_alone(url, staging, OK, {"epochs": 2, "more": [cx.callbacks.CSVLogger(log)]})
    fit_alone(url, staging, OK, {"epochs": 3, "more": [cx.callbacks.CSVLogger(log)], **AUTO})
    assert epochs_of(store / "log.csv") == ["epoch", "0", "1", "2"]
    settings = {"epochs": 5, "more": [cx.callbacks.CSVLogger(log), Dies()], "checkpoint_every_n_epochs": 0, **AUTO}
    died = fit_alone(url, staging, (before,), settings)
    assert died["epochs"] == 5
    [line] = died["told"]
    assert line.startswith(f"CSVLogger cannot write {log}: Cannot write {log}: ConnectionError: the store is gone. ")
    assert epochs_of(store / "log.csv") == ["epoch", "0", "1", "2"]


def test_a_log_in_a_store_that_does_not_answer_is_an_error_before_the_first_step(folders):
    _, url, staging = folders
    settings = {"checkpoint_every_n_epochs": 0, "more": [cx.callbacks.CSVLogger(f"{url}/log.csv")]}
    with pytest.raises(
        cx.ConfigError, match=r"^CSVLogger: Cannot list shelf://.*/log\.csv: PermissionError: Forbidden"
    ):
        fit_alone(url, staging, (shelf.forbidding,), settings)
