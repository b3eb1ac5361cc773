"""Claims about several runs in one folder: each keeps its files, and none continues another one in silence."""

from __future__ import annotations

import errno
import os
import pickle
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from fitting import make_model, make_rows, one_process
from rank_processes import run_ranks
from refusals import warning_texts
from worlds import wait_until

import cyxtrain as cx
from cyxtrain.checkpoint.folder import CheckpointFolder, look_into

fcntl = pytest.importorskip("fcntl")

ROWS = make_rows(12)


def fit(rate: float = 0.1, **settings: Any) -> tuple[cx.DistributedTrainer, list[str]]:
    """Fits a new trainer; returns it, and what was warned of."""
    model = make_model()
    trainer = cx.DistributedTrainer(model, "cross_entropy", torch.optim.SGD(model.parameters(), rate))
    given = {"epochs": 2, "batch_size": 4, "verbose": False, "checkpoint_every_n_epochs": 1, **settings}
    with warning_texts() as caught:
        trainer.fit(*ROWS, **given)
    return trainer, caught


def name(trainer: cx.DistributedTrainer) -> str:
    return str(trainer._state.run["id"])[:8]


def runs_of(folder: Path) -> dict[str, str]:
    return {path.name: str(look_into(path).run["id"])[:8] for path in folder.glob("*.ckpt")}


class Beside(cx.callbacks.Callback):
    """Starts another fit after the first epoch, as another process would."""

    def __init__(self, **settings: Any) -> None:
        self._settings = settings
        self.trainer_beside: Any = None
        self.told: list[str] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1:
            pickle.dumps(self.trainer)  # as a program may
            self.trainer_beside, self.told = fit(**self._settings)


@pytest.mark.parametrize("shared", [True, False])
def test_a_run_beside_a_live_one_is_told_and_keeps_to_its_own_files(tmp_path, shared):
    settings = {"checkpoint_dir": str(tmp_path), "keep_last": 1, "keep_best": "loss", "save_on_master_only": shared}
    beside = Beside(rate=0.2, resume="auto", load_best=True, **settings)
    with one_process():
        first, told = fit(callbacks=beside, **settings)
    second, end = beside.trainer_beside, "" if shared else "-rank0"
    assert told == []
    [line] = beside.told
    assert f"run {name(first)} (begun" in line
    assert f"the checkpoints of run {name(second)} (begun" in line
    assert f"in process {os.getpid()} on " in line
    assert second.epoch == 2  # it did not continue the run that is alive
    assert runs_of(tmp_path) == {
        f"epoch-0002{end}.ckpt": name(first),
        f"best{end}.ckpt": name(first),
        f"epoch-0002-{name(second)}{end}.ckpt": name(second),
        f"best-{name(second)}{end}.ckpt": name(second),
    }
    assert not [path for path in os.listdir(tmp_path) if path.startswith(".")]
    with one_process():
        for rate, own in ((0.2, second), (0.1, first)):  # each continues its own, in silence
            again, told = fit(rate, epochs=3, resume="auto", checkpoint_dir=str(tmp_path), save_on_master_only=shared)
            assert (name(again), again.step, told) == (name(own), 9, [])
            os.unlink(tmp_path / f"epoch-0003{end}.ckpt")


def test_files_of_a_run_that_has_ended_are_replaced_with_a_line_that_names_both(tmp_path):
    with one_process():
        first, told = fit(checkpoint_dir=tmp_path)
        assert told == []
        second, [line] = fit(checkpoint_dir=tmp_path)
        assert f"holds 2 checkpoints of another training, run {name(first)} (begun" in line
        assert f": run {name(second)} (begun" in line
        second.fit(*ROWS, epochs=1, batch_size=4, verbose=False, checkpoint_every_n_epochs=1, checkpoint_dir=tmp_path)


def test_a_checkpoint_of_another_training_does_not_become_the_best(tmp_path):
    with one_process():
        best = {"keep_best": "loss", "epochs": 3}
        own, _ = fit(checkpoint_dir=tmp_path / "own", **best)
        other, _ = fit(0.05, checkpoint_dir=tmp_path / "other", epochs=3)
        resumed = {"resume": tmp_path / "own" / "epoch-0003.ckpt", "checkpoint_dir": tmp_path / "other"}
        again, told = fit(**best, **resumed)
    assert again.history.history["loss"] == own.history.history["loss"]
    found = look_into(tmp_path / "other" / "best.ckpt")
    assert found.run.get("id") in (None, own._state.run["id"], again._state.run["id"])
    # It was replaced by the checkpoint that the fit resumed from.
    assert any(f"1 checkpoint of another training, run {name(other)}" in line for line in told)


def fit_where_a_warning_is_an_error(folder: str) -> None:
    cx.init()
    with warnings.catch_warnings():
        if cx.is_master():
            warnings.simplefilter("error")
        model = make_model()
        trainer = cx.DistributedTrainer(model, "cross_entropy", torch.optim.SGD(model.parameters(), 0.1))
        given = {"epochs": 1, "batch_size": 2, "verbose": False, "checkpoint_every_n_epochs": 1}
        try:
            trainer.fit(*ROWS, checkpoint_dir=folder, **given)
        except UserWarning:
            # This rank lives on, as in a notebook: the other one must not wait for its end.
            wait_until(Path(folder, "told").exists)
            raise
        except cx.DistributedTrainingError:
            Path(folder, "told").touch()
            raise


@pytest.mark.usefixtures("rank_server")
def test_a_line_that_is_an_error_on_rank_0_ends_the_fit_of_all(tmp_path):
    with one_process():
        fit(checkpoint_dir=tmp_path)
    first, second = run_ranks(2, fit_where_a_warning_is_an_error, str(tmp_path), seconds=30.0)
    assert first.kind == "UserWarning"
    assert second.kind == "DistributedTrainingError"
    assert "of another training" in second.message


def test_auto_takes_the_run_of_another_program_with_a_line_that_names_both(tmp_path):
    with one_process():
        first, _ = fit(checkpoint_dir=tmp_path)
        assert fit(checkpoint_dir=tmp_path, resume="auto", epochs=3)[1] == []  # one's own: silent
        second, [line] = fit(0.3, checkpoint_dir=tmp_path, resume="auto", epochs=4)
        assert f"is of run {name(first)} (begun" in line
        assert f"; run {name(second)} (begun" in line
        assert (second.step, name(second) != name(first)) == (12, True)
        third, _ = fit(checkpoint_dir=tmp_path, resume="auto", epochs=5)
        assert third.step == 15  # the first program finds what was made of its run


def test_the_newest_run_is_not_that_of_a_clock_that_was_ahead(tmp_path, monkeypatch):
    real = time.time
    with one_process():
        with monkeypatch.context() as patched:
            patched.setattr(time, "time", lambda: real() + 1e6)
            fit(checkpoint_dir=tmp_path)
        for path in tmp_path.glob("*.ckpt"):
            path.rename(path.with_name(path.name.replace("epoch-0", "epoch-1")))
        second, _ = fit(checkpoint_dir=tmp_path, epochs=1)
        third, _ = fit(checkpoint_dir=tmp_path, resume="auto")
    assert name(third) == name(second)
    assert CheckpointFolder(tmp_path).newest_first()[0].path.name == "epoch-0002.ckpt"


def test_without_file_locks_the_run_in_the_file_is_compared(tmp_path, monkeypatch):
    def refuse(*arguments: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    beside = Beside(rate=0.2, checkpoint_dir=str(tmp_path))
    with one_process():
        first, told = fit(callbacks=beside, checkpoint_dir=str(tmp_path))
    second = beside.trainer_beside
    # The second sees a file of a run that it takes for one that has ended; the first then finds its next one taken.
    assert f"run {name(first)}" in beside.told[0]
    assert f"run {name(second)}" in told[0]
    assert f"run {name(first)}" in told[0]
    assert runs_of(tmp_path)["epoch-0002.ckpt"] == name(second)
    assert runs_of(tmp_path)[f"epoch-0002-{name(first)}.ckpt"] == name(first)


def test_a_program_that_runs_again_is_not_told_of_its_own_later_fits(tmp_path):
    def program() -> list[str]:
        trainer, told = fit(checkpoint_dir=tmp_path, resume="auto")
        with warning_texts() as caught:
            given = {"epochs": 1, "batch_size": 4, "verbose": False, "checkpoint_every_n_epochs": 1}
            trainer.fit(*ROWS, **given, checkpoint_dir=tmp_path, resume="auto")
        assert trainer.epoch == 3
        return told + caught

    with one_process():
        assert program() == program() == []
