"""A tracker gets each number of a fit once, over kills and resumes, and a service in trouble never stops a fit."""

from __future__ import annotations

import importlib.util
import io
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import file_tracker
import pytest
from file_tracker import (
    FIT,
    FailingTracker,
    FileTracker,
    calls,
    curves,
    fit,
    fit_in_a_world,
    fit_in_folder,
    join_late_threads,
)
from fitting import make_model, make_rows, one_process, run_new_world
from markers import by_night, nightly_where
from rank_processes import run_ranks
from refusals import refuses, warning_texts

import cyxtrain as cx
from cyxtrain.callbacks import MLflow, Tracker
from cyxtrain.callbacks.trackers import background_sender, run_info, tracker
from cyxtrain.checkpoint.checkpoint_file import read_checkpoint

pytestmark = pytest.mark.usefixtures("rank_server")
posix = pytest.mark.skipif(os.name == "nt", reason="the signal is POSIX's")
# A hook, a step, and whether all points so far have been sent.
PLACES = [
    ("start", 0, False),
    ("batch", 3, False),
    ("batch", 11, True),
    ("validation", 10, True),
    ("epoch", 5, False),
    ("end", 15, True),
]


def of_kind(file: str, kind: str) -> list[Any]:
    return [values[0] for each, *values in calls(file) if each == kind]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, rank_server):
    folder = str(tmp_path_factory.mktemp("undisturbed"))
    run_new_world(2, fit_in_folder, folder)
    return curves(f"{folder}/calls")


def test_points_are_those_of_the_history_and_only_rank_0_logs(undisturbed, tmp_path):
    with one_process():
        history = fit(FileTracker(f"{tmp_path}/calls")).history.history
    for name in ("loss", "accuracy", "val_loss", "val_accuracy", "learning_rate"):
        assert curves(f"{tmp_path}/calls")[name] == [*zip([5, 10, 15], history[name], strict=True)]
    assert [step for step, _ in curves(f"{tmp_path}/calls")["step/loss"]] == [10]
    assert [step for step, _ in undisturbed["step/loss"]] == [*range(1, 16)]
    assert [step for step, _ in undisturbed["val_loss"]] == [5, 10, 15]
    assert of_kind(f"{tmp_path}/calls", "finish") == ["FINISHED"]


@nightly_where(lambda place: place != ("batch", 11, True))
@posix
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_a_killed_fit_that_resumes_gives_the_curves_of_the_undisturbed_one(place, undisturbed, tmp_path):
    hook, step, is_sent = place
    killed = run_ranks(2, fit_in_a_world, str(tmp_path), hook, step, signal.SIGKILL, is_sent)
    assert killed[0].kind == "Killed"
    file = f"{tmp_path}/calls"
    if is_sent:
        assert [each for each, _ in curves(file)["step/loss"]] == [*range(1, step + 1)]
    run_new_world(2, fit_in_folder, str(tmp_path))
    assert curves(file) == undisturbed
    [*_, last] = of_kind(file, "finish")
    assert last == "FINISHED"
    if is_sent:
        assert set(of_kind(file, "start")) == {"run 1"}
    assert [*tmp_path.glob("trackers/.*")] == []


@nightly_where(lambda place: place[0] == "start")
@posix
@pytest.mark.parametrize("place", [("batch", 7), ("start", 0)], ids=str)
def test_a_fit_that_is_terminated_ends_as_killed_and_goes_on_in_the_same_run(place, undisturbed, tmp_path):
    stopped = run_ranks(2, fit_in_a_world, str(tmp_path), *place, signal.SIGTERM)
    assert [each.kind for each in stopped] == ["SystemExit"] * 2
    run_new_world(2, fit_in_folder, str(tmp_path))
    assert curves(f"{tmp_path}/calls") == undisturbed
    assert of_kind(f"{tmp_path}/calls", "start") == ["run 1", "run 1"]
    assert of_kind(f"{tmp_path}/calls", "finish") == ["KILLED", "FINISHED"]
    assert of_kind(f"{tmp_path}/calls", "artifact")[-1].endswith(".ckpt")


def test_an_error_ends_the_run_as_failed(alone, tmp_path):
    def fail(epoch: int, logs: Any) -> None:
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        fit(FileTracker(f"{tmp_path}/calls"), cx.callbacks.LambdaCallback(on_epoch_end=fail))
    assert of_kind(f"{tmp_path}/calls", "finish") == ["FAILED"]


def test_fitting_again_continues_the_run_and_new_settings_begin_one(alone, tmp_path):
    tracker = FileTracker(f"{tmp_path}/calls", parameters={"layers": 2})
    trainer = fit(tracker)
    trainer.fit(*make_rows(40), epochs=1, effective_batch_size=8, verbose=False, callbacks=[tracker])
    assert of_kind(tracker.file, "start") == ["run 1", "run 1"]
    with pytest.warns(UserWarning, match="does not continue the run run 1, but another one: clip_norm changed"):
        trainer.fit(*make_rows(40), epochs=1, effective_batch_size=8, clip_norm=1.0, verbose=False, callbacks=tracker)
    first, second, third = (values[1] for kind, *values in calls(tracker.file) if kind == "start")
    assert first["layers"] == "2"
    assert first["model"] == "Sequential"
    assert "shuffle" not in first  # its default
    assert second == {}
    assert third["clip_norm"] == "1.0"


def test_another_trainer_begins_a_new_run(alone, tmp_path):
    tracker = FileTracker(f"{tmp_path}/calls")
    fit(tracker)
    other = fit(epochs=1)
    with pytest.warns(UserWarning, match="it starts at step 5, and the run is at step 15"):
        other.fit(*make_rows(40), epochs=1, effective_batch_size=8, verbose=False, callbacks=tracker)
    assert of_kind(tracker.file, "start") == ["run 1", "run 2"]
    assert [step for step, _ in curves(tracker.file)["loss"]] == [5, 10, 15, 10]


def test_an_earlier_checkpoint_begins_a_new_run(alone, tmp_path):
    kept = {"checkpoint_dir": f"{tmp_path}/kept", "checkpoint_every_n_epochs": 1}
    fit(FileTracker(f"{tmp_path}/calls"), **kept)
    with pytest.warns(UserWarning, match="it starts at step 5, and the run is at step 15"):
        fit(FileTracker(f"{tmp_path}/calls"), resume=f"{tmp_path}/kept/epoch-0001.ckpt")
    assert of_kind(f"{tmp_path}/calls", "start") == ["run 1", "run 2"]
    assert [step for step, _ in curves(f"{tmp_path}/calls")["loss"]] == [5, 10, 15, 10, 15]


def test_a_run_without_its_local_file_continues_from_the_checkpoint(alone, tmp_path):
    kept = {"checkpoint_dir": f"{tmp_path}/kept", "checkpoint_every_n_epochs": 1}
    fit(FileTracker(f"{tmp_path}/calls"), **kept)
    for file in (tmp_path / "trackers").iterdir():
        file.unlink()
    fit(FileTracker(f"{tmp_path}/calls"), resume="auto", epochs=4, **kept)
    # What was sent after the checkpoint's state was taken comes again, with the same values.
    losses = curves(f"{tmp_path}/calls")["loss"]
    assert [step for step, _ in sorted(set(losses))] == [5, 10, 15, 20]
    assert of_kind(f"{tmp_path}/calls", "start") == ["run 1", "run 1"]


RESTARTED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
import cyxtrain as cx
from file_tracker import FileTracker, Killer, fit

tracker = FileTracker(os.path.abspath("calls"), log_every_n_steps=1)
step = 11 if os.environ["CYXTRAIN_ATTEMPT"] == "0" else 0
with cx.init():
    fit(tracker, Killer("batch", step, signal.SIGKILL, tracker), checkpoint_every_n_steps=2)
"""


@posix
@pytest.mark.nightly
def test_a_fit_that_the_launcher_restarts_goes_on_in_the_same_run(undisturbed, tmp_path):
    (tmp_path / "train.py").write_text(RESTARTED, encoding="utf-8")
    support = str(Path(file_tracker.__file__).parent)
    command = [sys.executable, "-m", "cyxtrain.launch", "--restarts", "1", "2", "train.py", support]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert curves(f"{tmp_path}/calls") == undisturbed
    assert of_kind(f"{tmp_path}/calls", "start") == ["run 1", "run 1"]
    assert of_kind(f"{tmp_path}/calls", "finish") == ["FINISHED"]


@posix
def test_a_killed_run_that_nobody_resumes_is_finished_by_the_next_fit_in_its_folder(alone, tmp_path):
    run_ranks(1, fit_in_a_world, str(tmp_path), "batch", 3, signal.SIGKILL, True)
    assert len([*tmp_path.glob("trackers/.*")]) == 1
    # Of a process that was killed before it wrote what it knows of its run.
    (tmp_path / "trackers" / ".FileTracker-0123.json.4567.cyxtrain-tmp").touch()
    fit(FileTracker(f"{tmp_path}/calls"))
    assert of_kind(f"{tmp_path}/calls", "start") == ["run 1", "run 1", "run 3"]
    assert of_kind(f"{tmp_path}/calls", "finish") == ["KILLED", "FINISHED"]
    assert [*tmp_path.glob("trackers/.*")] == []


def test_runs_of_one_folder_leave_each_other_alone(alone, tmp_path):
    files = [f"{tmp_path}/first", f"{tmp_path}/second"]
    fit(*map(FileTracker, files))
    for file in files:
        assert of_kind(file, "start") == ["run 1"]
        assert of_kind(file, "finish") == ["FINISHED"]
        assert [step for step, _ in curves(file)["loss"]] == [5, 10, 15]


# --- what a run shows -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fonts() -> None:
    """matplotlib keeps its fonts' files open from its first picture on."""
    pytest.importorskip("matplotlib")
    metric = cx.metrics.ConfusionMatrix(None)
    metric([0, 1], [0, 1])
    metric.figure.savefig(io.BytesIO())


def test_a_run_shows_its_data_the_load_of_the_system_and_plots(fonts, alone, tmp_path, monkeypatch):
    monkeypatch.setattr(tracker, "_LOAD_SECONDS", 0.0)
    file = f"{tmp_path}/calls"
    trainer = cx.DistributedTrainer(make_model(), "cross_entropy", metrics=[cx.metrics.ConfusionMatrix(path=None)])
    more: Any = {**FIT, "callbacks": FileTracker(file, log_plots=True)}
    trainer.fit(*make_rows(40), validation_data=make_rows(9, seed=1), **more)
    [settings] = [values[1] for kind, *values in calls(file) if kind == "start"]
    assert len(settings["data_hash"]) == 16
    points = [point for kind, *values in calls(file) if kind == "log" for point in values[0]]
    for name in ("system/cpu_percent", "system/memory_percent"):
        assert [step for each, step, *_ in points if each == name] == [5, 10, 15]
        assert all(0 <= value <= 100 for each, _, value, _ in points if each == name)
    assert [each.rpartition("-")[2] for each in of_kind(file, "artifact")] == ["history.png", "confusion_matrix.png"]


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_of_the_working_directory_is_shown(tmp_path, monkeypatch):
    def git(*words: str) -> str:
        own = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org", *words]
        return subprocess.run(own, cwd=tmp_path, check=True, capture_output=True, text=True).stdout.strip()

    monkeypatch.chdir(tmp_path)
    assert run_info.git_state() == {}
    git("init")
    (tmp_path / "program.py").touch()
    git("add", "program.py")
    git("commit", "-m", "First")
    git("tag", "v1")
    (tmp_path / "untracked").touch()
    assert run_info.git_state() == {"git/commit": git("rev-parse", "HEAD"), "git/dirty": "False"}
    (tmp_path / "program.py").write_text("changed")
    assert run_info.git_state() == {"git/commit": git("rev-parse", "HEAD"), "git/dirty": "True"}


@posix
def test_a_slow_git_is_not_waited_for(tmp_path, monkeypatch):
    Path(tmp_path / "git").write_text("#!/bin/sh\nexec sleep 30\n")
    Path(tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(run_info, "GIT_SECONDS", 0.1)
    assert run_info.git_state() == {}


# --- services in trouble --------------------------------------------------------------------------------------------


@pytest.fixture
def short_waits(monkeypatch):
    monkeypatch.setattr(background_sender, "START_SECONDS", 0.3)
    monkeypatch.setattr(background_sender, "END_SECONDS", 0.3)


def fit_beside(*callbacks: cx.callbacks.Callback, **more: Any) -> list[str]:
    """Fit, and return the warnings; it must not wait for the tracker."""
    began = time.monotonic()
    with warning_texts() as texts:
        fit(*callbacks, **more)
    assert time.monotonic() - began < 5
    return [text for text in texts if "Tracker" in text]


def opens(gate: threading.Event) -> Callable[[int, Any], None]:
    return lambda epoch, logs: gate.set()


def test_training_begins_before_the_service_answers(alone, tmp_path):
    gate = threading.Event()
    fit_beside(FileTracker(f"{tmp_path}/calls", ("start", gate)), cx.callbacks.LambdaCallback(on_epoch_end=opens(gate)))
    assert of_kind(f"{tmp_path}/calls", "finish") == ["FINISHED"]
    assert [step for step, _ in curves(f"{tmp_path}/calls")["loss"]] == [5, 10, 15]


def test_a_checkpoint_waits_for_the_runs_id(alone, tmp_path):
    gate = threading.Event()
    threading.Timer(0.3, gate.set).start()
    tracker = FileTracker(f"{tmp_path}/calls", ("start", gate))
    fit(tracker, checkpoint_dir=f"{tmp_path}/kept", checkpoint_every_n_steps=1)
    kept = [read_checkpoint(path).others["callbacks"]["FileTracker"] for path in tmp_path.glob("kept/*.ckpt")]
    assert len(kept) >= 15
    assert {state["run_id"] for state in kept} == {"run 1"}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_process_is_forked_when_the_first_call_has_returned(alone, tmp_path):
    gate = threading.Event()
    threading.Timer(0.3, gate.set).start()
    found = []

    def fork(epoch: int, logs: Any) -> None:
        process = multiprocessing.get_context("fork").Process(target=int)
        process.start()
        found.append(gate.is_set())
        process.join()

    fit(FileTracker(f"{tmp_path}/calls", ("start", gate)), cx.callbacks.LambdaCallback(on_epoch_begin=fork))
    assert found == [True] * 3


@pytest.mark.parametrize("kind", [by_night("start"), "log", by_night("finish")])
def test_a_service_that_does_not_answer_is_left_alone(kind, alone, tmp_path, short_waits):
    gate = threading.Event()
    tracker = FileTracker(f"{tmp_path}/calls", (kind, gate), log_every_n_steps=0)
    texts = fit_beside(tracker)
    gate.set()
    lost = 6 * 3 if kind != "finish" else 0
    assert [text.partition(" were")[0] for text in texts] == [f"FileTracker: {lost} points"] * bool(lost)


def test_what_waits_is_in_the_checkpoint_and_sent_when_the_fit_resumes(alone, tmp_path, short_waits):
    kept = {"checkpoint_dir": f"{tmp_path}/kept", "checkpoint_every_n_epochs": 1}
    fit_beside(FailingTracker(f"{tmp_path}/calls", "start", 1000), **kept)
    assert calls(f"{tmp_path}/calls") == []
    fit_beside(FailingTracker(f"{tmp_path}/calls", "", 0), resume="auto", epochs=4, **kept)
    assert [step for step, _ in curves(f"{tmp_path}/calls")["loss"]] == [5, 10, 15, 20]
    [settings] = [values[1] for kind, *values in calls(f"{tmp_path}/calls") if kind == "start"]
    assert settings["model"] == "Sequential"


@pytest.mark.parametrize("kind", [by_night("start"), "log"])
def test_what_waits_at_the_end_is_sent_by_the_next_fit_in_the_folder(kind, alone, tmp_path, short_waits):
    file = f"{tmp_path}/calls"
    first = FailingTracker(file, kind, 1000)
    [_, text] = fit_beside(first)
    [kept] = tmp_path.glob("trackers/*.json")
    assert text.startswith("FailingTracker: 21 points were not sent")
    assert f"21 of them are in {kept}: the next fit with FailingTracker in this folder sends them" in text
    # The service fails for the earlier run alone, and goes on failing it: the fit's own run is in order.
    fit_beside(FailingTracker(file, kind, 2))
    own = curves(file)["loss"]
    assert [step for step, _ in own] == [5, 10, 15]
    fit_beside(FailingTracker(file, "", 0), epochs=1)
    assert curves(file)["loss"] == [*own, *own, own[0]]
    assert of_kind(file, "finish")[-2:] == ["FINISHED", "FINISHED"]
    assert calls(file)[-1] == ["finish", "FINISHED"]


def test_a_thread_that_is_late_sends_the_rest_while_the_process_lives(alone, tmp_path, short_waits):
    gate = threading.Event()
    file = f"{tmp_path}/calls"
    fit_beside(FileTracker(file, ("start", gate)))
    [text] = fit_beside(FileTracker(file))
    assert text == "FileTracker: a call of an earlier fit has not returned; nothing of this fit is sent."
    assert calls(file) == []
    gate.set()
    join_late_threads()
    assert of_kind(file, "start") == ["run 1"]
    assert of_kind(file, "finish") == ["FINISHED"]
    assert [step for step, _ in curves(file)["loss"]] == [5, 10, 15]


@pytest.mark.parametrize("kind", ["start", by_night("log")])
def test_a_wrong_key_is_one_warning_and_failed_calls_are_repeated(kind, alone, tmp_path, short_waits):
    texts = fit_beside(FailingTracker(f"{tmp_path}/calls", kind, 1))
    assert texts == ["FailingTracker: PermissionError: wrong key. Training continues; failed calls are repeated."]
    assert [step for step, _ in curves(f"{tmp_path}/calls")["loss"]] == [5, 10, 15]


def test_a_full_queue_drops_and_counts(alone, tmp_path, short_waits, monkeypatch):
    monkeypatch.setattr(background_sender, "QUEUE_POINTS", 10)
    gate = threading.Event()
    tracker = FileTracker(f"{tmp_path}/calls", ("start", gate), log_every_n_steps=0)
    assert fit_beside(tracker)[0].startswith("FileTracker: 18 points were not sent")
    assert len(tracker.state_dict()["waiting"]) == 10
    gate.set()


def test_a_local_file_that_cannot_be_written_is_a_warning(alone, tmp_path):
    (tmp_path / "trackers").touch()
    [text] = fit_beside(FileTracker(f"{tmp_path}/calls"))
    assert "Cannot write file of a tracker's run" in text
    assert "choose another folder. Training continues" in text
    assert of_kind(f"{tmp_path}/calls", "finish") == ["FINISHED"]


def test_a_library_that_another_thread_is_importing_has_no_active_run(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", types.ModuleType("mlflow"))
    monkeypatch.delenv("MLFLOW_RUN_ID", raising=False)
    assert MLflow()._active_run() == ""


def _missing() -> Tracker:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        patch.delitem(sys.modules, "mlflow", raising=False)
        return MLflow()


test_wrong_arguments_are_refused = refuses(
    (lambda: FileTracker("x", log_every_n_steps=-1), "log_every_n_steps must be a whole number"),
    (lambda: FileTracker("x", log_checkpoints=1), "log_checkpoints must be True or False"),
    (lambda: FileTracker("x", parameters=3), "parameters must be a dictionary"),
    (lambda: FileTracker("s3://bucket/x"), "folder is s3://bucket/trackers, a URL"),
    (_missing, r"MLflow needs the library mlflow: pip install 'cyxtrain\[mlflow\]'"),
)
