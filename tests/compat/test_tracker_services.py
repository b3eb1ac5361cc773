"""The trackers against the services' own libraries, with a store on local disk: one run, one curve, over a resume."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from file_tracker import Killer, fit, join_late_threads
from rank_processes import run_ranks, values

import cyxtrain as cx
from cyxtrain.callbacks import MLflow, Tracker, Trackio, WandB
from cyxtrain.callbacks.trackers import background_sender, services
from cyxtrain.callbacks.trackers.background_sender import Point
from cyxtrain.errors import CheckpointError

pytestmark = [pytest.mark.usefixtures("rank_server"), pytest.mark.nightly]
STEPS = [5, 10, 15]


def fit_in_two_parts(folder: str, name: str, variables: dict[str, str]) -> list[Any]:
    """Fit two epochs, resume for the third; fit into a run of the user's. Returns the losses of both parts' history."""
    os.environ.update(variables)
    os.chdir(folder)

    def tracker() -> Tracker:
        made = {
            "MLflow": lambda **more: MLflow("own", **more),
            "WandB": WandB,
            "Trackio": lambda **more: Trackio("own", **more),
        }
        return made[name](parameters={"layers": 2}, log_checkpoints=True, log_every_n_steps=5)

    if name == "MLflow":
        import mlflow

        # Its first call makes the tables of the store, which takes longer than these fits.
        mlflow.search_experiments()
    with cx.init():
        for epochs in (2, 3):
            trainer = fit(tracker(), epochs=epochs, resume="auto", checkpoint_every_n_epochs=1)
        return [trainer.history.history["loss"], fit_in_a_run_of_the_user(name, tracker())]


def fit_in_a_run_of_the_user(name: str, tracker: Tracker) -> bool:
    """Return whether the run that was active is still open after the fit."""
    if name == "MLflow":
        import mlflow

        with mlflow.start_run() as run:
            fit(tracker, epochs=1)
            # MLflow refuses a setting that changes: the run keeps the first fit's, and gets the new ones.
            fit(MLflow(parameters={"layers": 3}), epochs=2, clip_norm=1.0)
            found = mlflow.get_run(run.info.run_id)
            assert (found.data.params["layers"], found.data.params["clip_norm"]) == ("2", "1.0")
            points = mlflow.MlflowClient().get_metric_history(run.info.run_id, "loss")
            return found.info.status == "RUNNING" and [each.step for each in points] == [5, 5, 10]
    if name == "WandB":
        import wandb

        with wandb.init() as run:
            fit(tracker, epochs=1)
            return wandb.run is run and "loss" in dict(run.summary)
    import trackio

    run = trackio.init("theirs", name="mine", embed=False)
    fit(tracker, epochs=1)
    still = trackio.context_vars.current_run.get() is run
    trackio.finish()
    return still


def run_parts(folder: Path, name: str, **variables: str) -> list[float]:
    [(losses, is_open)] = values(run_ranks(1, fit_in_two_parts, str(folder), name, variables, seconds=200))
    assert is_open
    assert len(losses) == 3
    return losses


@pytest.mark.timeout(300)
def test_mlflow_has_one_run_with_one_curve(tmp_path):
    pytest.importorskip("mlflow")
    store = tmp_path / "mlflow.db"
    losses = run_parts(tmp_path, "MLflow", MLFLOW_TRACKING_URI=f"sqlite:///{store}")
    with contextlib.closing(sqlite3.connect(store)) as base:
        runs = base.execute("select run_uuid, status from runs order by start_time").fetchall()
        curve = "select step, value from metrics where key='loss' and run_uuid=? order by step"
        assert [status for _, status in runs] == ["FINISHED", "FINISHED"]
        assert base.execute(curve, runs[0][:1]).fetchall() == [*zip(STEPS, losses, strict=True)]
        steps = base.execute(curve.replace("'loss'", "'step/loss'"), runs[0][:1]).fetchall()
        assert [step for step, _ in steps] == STEPS
        params = dict(base.execute("select key, value from params where run_uuid=?", runs[0][:1]).fetchall())
        assert (params["layers"], params["optimizer"]) == ("2", "SGD")
    assert [*tmp_path.rglob("checkpoints/*.ckpt")]


def fit_before_the_store_is_made(folder: str, store: str) -> None:
    """Fit with a store whose tables MLflow must make first, longer than a fit waits; the process lives on."""
    os.environ["MLFLOW_TRACKING_URI"] = store
    os.chdir(folder)
    background_sender.START_SECONDS = 0.1
    background_sender.END_SECONDS = 0.1
    with cx.init():
        with pytest.warns(UserWarning, match="points were not sent"):
            fit(MLflow("own"))
        join_late_threads()


def fit_until_the_store_is_half_made(folder: str, store: str) -> None:
    """Fit, and be killed while MLflow makes the tables."""
    os.environ["MLFLOW_TRACKING_URI"] = store
    os.chdir(folder)
    tempfile.tempdir = folder

    def kill() -> None:
        while not any(map(is_half_made, Path(folder).rglob("*.db"))):
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    with cx.init():
        fit(MLflow("own"))
        join_late_threads()


def is_half_made(store: Path) -> bool:
    """Return whether MLflow is in the middle of a step that makes tables."""
    with (
        contextlib.suppress(sqlite3.Error),
        contextlib.closing(sqlite3.connect(f"file:{store}?mode=ro", uri=True)) as base,
    ):
        return bool(base.execute("select name from sqlite_master where name='datasets'").fetchall())
    return False


def fit_and_be_killed(folder: str, store: str, step: int) -> None:
    """Fit until a step, after which all is sent; a `step` of 0 is never reached."""
    os.environ["MLFLOW_TRACKING_URI"] = store
    os.chdir(folder)
    tracker = MLflow("own", log_every_n_steps=1)
    with cx.init():
        fit(tracker, Killer("batch", step, signal.SIGKILL, tracker))


@pytest.mark.skipif(os.name == "nt", reason="the signal is POSIX's")
@pytest.mark.timeout(300)
def test_mlflow_gets_all_of_a_fit_that_is_shorter_than_a_new_store_takes_and_closes_a_killed_run(tmp_path):
    pytest.importorskip("mlflow")
    store = tmp_path / "mlflow.db"
    for function, *arguments in [(fit_before_the_store_is_made,), (fit_and_be_killed, 8), (fit_and_be_killed, 0)]:
        ended = run_ranks(1, function, str(tmp_path), f"sqlite:///{store}", *arguments, seconds=100)
        if arguments != [8]:
            values(ended)
    with contextlib.closing(sqlite3.connect(store)) as base:
        found = base.execute("select run_uuid, status from runs order by start_time").fetchall()
        assert [status for _, status in found] == ["FINISHED", "KILLED", "FINISHED"]
        curve = "select step from metrics where key=? and run_uuid=? order by step"
        losses = [[step for (step,) in base.execute(curve, ("loss", run))] for run, _ in found]
        assert losses == [STEPS, [5], STEPS]
        assert [step for (step,) in base.execute(curve, ("step/loss", found[1][0]))] == [*range(1, 9)]
        names = {name for (name,) in base.execute("select key from params where run_uuid=?", found[0][:1])}
        assert {"optimizer", "data_hash", "version/torch"} <= names


@pytest.mark.skipif(os.name == "nt", reason="the signal is POSIX's")
@pytest.mark.timeout(300)
def test_a_fit_that_is_killed_while_mlflow_makes_its_store_leaves_none_or_a_whole_one(tmp_path):
    pytest.importorskip("mlflow")
    store = tmp_path / "mlflow.db"
    [killed] = run_ranks(1, fit_until_the_store_is_half_made, str(tmp_path), f"sqlite:///{store}", seconds=100)
    assert killed.kind == "Killed"
    assert not store.exists()
    values(run_ranks(1, fit_before_the_store_is_made, str(tmp_path), f"sqlite:///{store}", seconds=200))
    with contextlib.closing(sqlite3.connect(store)) as base:
        runs = base.execute("select run_uuid, status from runs order by start_time").fetchall()
        assert {status for _, status in runs} <= {"KILLED", "FINISHED"}
        curve = "select step from metrics where key='loss' and run_uuid=? order by step"
        assert [step for (step,) in base.execute(curve, runs[-1][:1])] == STEPS


def test_a_store_in_a_folder_that_cannot_be_written_is_refused_before_it_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr(pytest.importorskip("mlflow"), "MlflowClient", None)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="Cannot write MLflow's store"):
        services._make_sqlite_store(f"sqlite:///{tmp_path}/file/mlflow.db")


@pytest.mark.parametrize("name", ["MLflow", "WandB", "Trackio"])
def test_a_service_takes_odd_names_and_values(name, tmp_path):
    """What a service refuses would be sent again and again, and keep all later points back."""
    pytest.importorskip(name.lower())
    values(run_ranks(1, send_odd_points, str(tmp_path), name, seconds=100))


def send_odd_points(folder: str, name: str) -> None:
    """Send names and values that a fit may have, without an error."""
    os.chdir(folder)
    os.environ.update(MLFLOW_TRACKING_URI=f"sqlite:///{folder}/mlflow.db", WANDB_MODE="offline", WANDB_DIR=folder)
    os.environ.update(TRACKIO_DIR=f"{folder}/trackio", HF_HUB_OFFLINE="1")
    tracker: Any = getattr(cx.callbacks, name)("own")
    settings = {"a(b)": "", "long": "x" * 1000, "größe": "ß\n", **{f"layer {number}": "1" for number in range(150)}}
    run_id = tracker.start("", settings)
    names = ["x[y]=z", "step", "time", "größe", "a/b c"]
    values = [1e-300, float("nan"), float("inf"), -float("inf"), 0.5]
    tracker.log([Point(each, step, value, time.time()) for step, value in enumerate(values) for each in names])
    tracker.finish("FINISHED")
    assert tracker.start(run_id, settings | {"later": "1"}) == run_id
    tracker.log([Point(each, len(values), 0.5, time.time()) for each in names])
    tracker.finish("FINISHED")


@pytest.mark.timeout(300)
def test_wandb_offline_has_one_run_with_one_curve(tmp_path):
    pytest.importorskip("wandb")
    losses = run_parts(tmp_path, "WandB", WANDB_MODE="offline", WANDB_DIR=str(tmp_path), WANDB_SILENT="true")
    assert losses
    files = [*(tmp_path / "wandb").glob("offline-run-*/run-*.wandb")]
    ids = [file.stem.removeprefix("run-") for file in sorted(files)]
    # Each part of an offline run is a folder; `wandb sync` joins those of one id.
    assert len(ids) == 3
    assert len(set(ids)) == 2
    assert max(map(ids.count, ids)) == 2
    [own] = {each for each in ids if ids.count(each) == 2}
    found = [row for file in sorted(files) if own in file.name for row in history_of(file)]
    assert sorted((int(row["step"]), row["loss"]) for row in found if "loss" in row) == [
        *zip(STEPS, losses, strict=True)
    ]


def history_of(file: Path) -> list[dict[str, float]]:
    """Return the rows of an offline run."""
    import json

    from wandb.proto import wandb_internal_pb2

    rows = []
    for data in records_of(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            rows.append({(i.key or ".".join(i.nested_key)): json.loads(i.value_json) for i in record.history.item})
    return rows


def records_of(data: bytes) -> Iterator[bytes]:
    """Yield the records of a file in the format of LevelDB's logs, after W&B's header of seven bytes.

    A block of 32 KiB holds chunks, each with four bytes of checksum, two of length, and its type: 1 is a whole record,
    and 4 the last of several chunks.
    """
    place = 7
    record = b""
    while place + 7 <= len(data):
        left = 2**15 - place % 2**15
        length = int.from_bytes(data[place + 4 : place + 6], "little")
        kind = data[place + 6]
        if left < 7 or kind == 0:
            place += left
            continue
        record += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


@pytest.mark.timeout(300)
def test_trackio_has_one_run_with_one_curve(tmp_path):
    pytest.importorskip("trackio")
    losses = run_parts(tmp_path, "Trackio", TRACKIO_DIR=str(tmp_path / "trackio"), HF_HUB_OFFLINE="1")
    import json

    [store] = (tmp_path / "trackio").glob("own*.db")
    with contextlib.closing(sqlite3.connect(store)) as base:
        rows = base.execute("select run_name, step, metrics from metrics order by step").fetchall()
    assert len({name for name, _, _ in rows}) == 1
    curve = [(step, json.loads(metrics)["loss"]) for _, step, metrics in rows if "loss" in json.loads(metrics)]
    assert curve == [*zip(STEPS, losses, strict=True)]
