"""A tracker that writes to a local file, as a user would write one, and fits that it follows; no pytest here."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fitting import make_model, make_rows

import cyxtrain as cx
from cyxtrain.callbacks import Tracker
from cyxtrain.callbacks.trackers import background_sender
from cyxtrain.callbacks.trackers.background_sender import Point, read_run

FIT: dict[str, Any] = {"epochs": 3, "effective_batch_size": 8, "verbose": False}


class FileTracker(Tracker):
    """Writes a line per call to `file`; `gate` holds up the calls of one kind until it is set."""

    def __init__(self, file: str, gate: tuple[str, threading.Event] | None = None, **options: Any) -> None:
        super().__init__(folder=os.path.join(os.path.dirname(file), "trackers"), **options)
        self.file = file
        self.gate = gate

    def _write(self, kind: str, *values: Any) -> None:
        if self.gate is not None and self.gate[0] == kind:
            self.gate[1].wait()
        with open(self.file, "a", encoding="utf-8") as file:
            file.write(json.dumps([kind, *values]) + "\n")

    def start(self, run_id: str, settings: Mapping[str, str]) -> str:
        own = run_id or f"run {sum(kind == 'start' for kind, *_ in calls(self.file)) + 1}"
        self._write("start", own, dict(settings))
        return own

    def log(self, points: list[Point]) -> None:
        self._write("log", points)

    def artifact(self, path: Path) -> None:
        self._write("artifact", path.name)

    def finish(self, status: str) -> None:
        self._write("finish", status)


class FailingTracker(FileTracker):
    """Raises in the first calls of one kind."""

    def __init__(self, file: str, kind: str, failures: int) -> None:
        super().__init__(file)
        self.kind = kind
        self.failures = failures

    def _write(self, kind: str, *values: Any) -> None:
        if kind == self.kind and self.failures:
            self.failures -= 1
            raise PermissionError("wrong key")
        super()._write(kind, *values)


def calls(file: str) -> list[list[Any]]:
    """Return the calls in a file."""
    if not os.path.exists(file):
        return []
    return [json.loads(line) for line in Path(file).read_text("utf-8").splitlines()]


def curves(file: str) -> dict[str, list[tuple[int, float]]]:
    """Return (step, value) of each curve in the order in which they came; without the speed and the load."""
    found: dict[str, list[tuple[int, float]]] = {}
    for kind, *values in calls(file):
        for name, step, value, _ in values[0] if kind == "log" else ():
            if name != "samples_per_second" and not name.startswith("system/"):
                found.setdefault(name, []).append((step, value))
    return found


class Killer(cx.callbacks.Callback):
    """Ends the process, or asks the fit to stop, in the hook `where` of step `step`; first `tracker` sends all."""

    runs_last = True

    def __init__(self, where: str, step: int, number: int, tracker: Tracker | None) -> None:
        super().__init__()
        self.where = where
        self.step = step
        self.number = number
        self.tracker = tracker

    def _at(self, where: str) -> None:
        if where == self.where and self.trainer.step == self.step and self.trainer.is_master():
            if self.tracker is not None:
                wait_until_sent(self.tracker)
            os.kill(os.getpid(), self.number)

    def on_fit_start(self, resumed: bool) -> None:
        self._at("start")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._at("batch")

    def on_validation_end(self, epoch: int, logs: Any = None) -> None:
        self._at("validation")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._at("epoch")

    def on_train_end(self, logs: Any = None) -> None:
        self._at("end")


def wait_until_sent(tracker: Tracker) -> None:
    """Wait until a tracker has confirmed all points, and its local file says so."""
    sender = tracker._sender
    assert sender is not None
    while sender.state()["waiting"] or read_run(sender._path)["sent"] != sender.state()["sent"]:
        time.sleep(0.01)


def join_late_threads() -> None:
    """Wait for the calls that had not returned when a fit ended."""
    for thread in threading.enumerate():
        if thread.name.endswith(", late"):
            thread.join()


def fit(*callbacks: cx.callbacks.Callback, **more: Any) -> cx.DistributedTrainer:
    """Fit a small model for 15 steps."""
    trainer = cx.DistributedTrainer(make_model(), "cross_entropy", "sgd")
    trainer.fit(*make_rows(40), validation_data=make_rows(9, seed=1), callbacks=[*callbacks], **{**FIT, **more})
    return trainer


def fit_in_folder(
    folder: str, where: str = "", step: int = 0, number: int = signal.SIGKILL, is_sent: bool = False
) -> None:
    """Fit with checkpoints, from the newest on; a signal comes at a place, when all points so far are sent, or not."""
    tracker = FileTracker(f"{folder}/calls", log_every_n_steps=1, log_checkpoints=True)
    kept = {"checkpoint_dir": f"{folder}/checkpoints", "checkpoint_every_n_steps": 2, "checkpoint_every_n_epochs": 1}
    killer = Killer(where, step, number, tracker if is_sent else None)
    fit(tracker, killer, resume="auto", **kept)


def fit_in_a_world(
    folder: str, where: str = "", step: int = 0, number: int = signal.SIGKILL, is_sent: bool = False
) -> None:
    """The same, in a world of its own, in a process that ends."""
    if is_sent:
        background_sender.BATCH_SECONDS = 0.05
    with cx.init():
        fit_in_folder(folder, where, step, number, is_sent)
