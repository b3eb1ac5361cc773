"""Claims about what a user hangs into a fit: called at the same points on every rank, heeded by all, and resumed."""

from __future__ import annotations

import contextlib
import io
import math
import re
import signal
import threading
import time
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from fitting import FEATURES, adam, everywhere, fingerprint, make_model, make_rows, one_process, run_world, seeded
from markers import by_night, nightly_where
from rank_processes import run_ranks, values
from refusals import ending, refuses
from torch import nn

import cyxtrain as cx
from cyxtrain.callbacks import Callback, EarlyStopping
from cyxtrain.callbacks.callback import BatchLogs
from cyxtrain.checkpoint import files
from cyxtrain.checkpoint.folder import look_into

pytestmark = pytest.mark.usefixtures("rank_server")

INPUTS, TARGETS = make_rows(24)
VALIDATION = make_rows(10, seed=1)
QUIET = {"effective_batch_size": 12, "verbose": False}


def trainer_with(*callbacks: Callback, **more: Any) -> cx.DistributedTrainer:
    model = make_model()
    return cx.DistributedTrainer(model, "cross_entropy", adam(model), callbacks=callbacks, **more)


class Recorder(Callback):
    """Writes down what it is called with."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.logs: dict[str, dict[str, float]] = {}

    def note(self, hook: str, logs: Any, number: int | None = None) -> None:
        self.calls.append(hook if number is None else f"{hook} {number}")
        self.logs[self.calls[-1]] = dict(logs)

    def on_train_begin(self, logs: Any = None) -> None:
        self.note("train begin", logs)

    def on_train_end(self, logs: Any = None) -> None:
        self.note("train end", logs)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.note("epoch begin", logs, epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.note("epoch end", logs, epoch)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.note("batch begin", logs, batch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.note("batch end", logs, batch)

    def on_test_begin(self, logs: Any = None) -> None:
        self.note("test begin", logs)

    def on_test_end(self, logs: Any = None) -> None:
        self.note("test end", logs)


def fit_recorded(learning_rate: float = 1e-3) -> list[Any]:
    recorder = Recorder()
    model = make_model()
    trainer = cx.DistributedTrainer(model, "cross_entropy", torch.optim.SGD(model.parameters(), learning_rate))
    history = trainer.fit(INPUTS, TARGETS, *VALIDATION, epochs=2, callbacks=[recorder], **QUIET)
    trainer.fit(INPUTS, TARGETS, epochs=1, callbacks=recorder, **QUIET)
    assert recorder.trainer is trainer
    assert recorder.model is model
    assert len(recorder.params.pop("data_hash")) == 16
    assert recorder.params == {
        "epochs": 3,
        "steps": 2,
        "samples_per_step": 12,
        "warmup_steps": 0,
        "verbose": False,
        "validation": False,
        "sets": [],
        "metrics": ["loss", "accuracy"],
        "larger_is_better": {"loss": False, "accuracy": True},
        "may_log": True,
    }
    return [recorder.calls, recorder.logs, history.history]


STEPS = ["batch begin 0", "batch end 0", "batch begin 1", "batch end 1"]
VALIDATED = [*STEPS, "test begin", "test end"]
CALLS = [
    *["train begin", "epoch begin 0", *VALIDATED, "epoch end 0"],
    *["epoch begin 1", *VALIDATED, "epoch end 1", "train end"],
    *["train begin", "epoch begin 2", *STEPS, "epoch end 2", "train end"],
]  # fmt: skip


@pytest.mark.parametrize("world_size", [1, by_night(2)])
def test_hooks_come_in_keras_order_on_every_rank_with_the_numbers_of_all(world_size):
    ranks = everywhere(world_size, fit_recorded)
    for calls, logs, history in ranks:
        assert calls == CALLS
        for epoch in (0, 1):
            assert logs[f"epoch end {epoch}"] == {name: values[epoch] for name, values in history.items()}
        assert logs["test end"] == {"loss": history["val_loss"][1], "accuracy": history["val_accuracy"][1]}
        assert logs["train end"] == logs["epoch end 2"]
        assert logs["batch begin 0"] == logs["train begin"] == logs["epoch begin 1"] == {}
    epoch_ends = [{name: values for name, values in logs.items() if "epoch end" in name} for _, logs, _ in ranks]
    assert all(each == epoch_ends[0] for each in epoch_ends)


class Hearing(Callback):
    """Writes down in which order it is restored, started, and told of checkpoints."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def state_dict(self) -> dict[str, Any]:
        return {"run": "a"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.heard.append(f"run {state['run']}")

    def on_train_begin(self, logs: Any = None) -> None:
        self.heard.append("train begin")

    def on_fit_start(self, resumed: bool) -> None:
        self.heard.append("fit resumed" if resumed else "fit start")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.heard.append(f"epoch {epoch}")

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.heard.append(f"step {self.trainer.step}")

    def on_checkpoint(self, path: Path) -> None:
        assert look_into(path).position  # it is complete
        self.heard.append(path.stem)

    def on_train_end(self, logs: Any = None) -> None:
        self.heard.append("train end")


def fit_heard(folder: str, settings: dict[str, Any]) -> list[str]:
    hearing = Hearing()
    trainer_with(hearing).fit(INPUTS, TARGETS, epochs=2, checkpoint_dir=folder, **QUIET, **settings)
    return hearing.heard


@pytest.mark.parametrize("world_size", [1, by_night(2)])
def test_a_fit_starts_after_callbacks_are_restored_also_in_the_middle_of_an_epoch(world_size, tmp_path):
    folder = str(tmp_path)
    for heard in everywhere(world_size, fit_heard, folder, {"max_steps": 3, "checkpoint_every_n_steps": 3}):
        assert heard[:4] == ["train begin", "fit start", "epoch 0", "step 0"]
    for heard in everywhere(world_size, fit_heard, folder, {"resume": "auto"}):
        assert heard == ["train begin", "run a", "fit resumed", "step 3", "train end"]


def test_rank_0_hears_of_each_checkpoint_when_it_is_complete(tmp_path):
    often = {"checkpoint_every_n_steps": 1, "checkpoint_every_n_epochs": 1}
    first, second = run_world(2, fit_heard, str(tmp_path), often)
    epochs = ["epoch 0", "step 0", "step 1", "epoch 1", "step 2", "step 3"]
    assert second == ["train begin", "fit start", *epochs, "train end"]
    written = ["step-00000001", "step-00000002", "epoch-0001", "step-00000003", "step-00000004", "epoch-0002"]
    assert [name for name in first if "-" in name] == written
    assert {path.stem for path in tmp_path.glob("*-0*.ckpt")} == set(written)
    assert [name for name in first if "-" not in name] == second
    assert first.index("epoch-0002") < first.index("train end")


def test_the_checkpoint_of_a_fit_that_is_stopped_is_heard_of(tmp_path):
    hearing = Hearing()
    stop = cx.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: signal.raise_signal(signal.SIGTERM))
    fit = trainer_with(hearing, stop).fit
    with one_process(), pytest.raises(SystemExit):
        fit(INPUTS, TARGETS, epochs=2, checkpoint_every_n_epochs=1, checkpoint_dir=str(tmp_path), **QUIET)
    [file] = tmp_path.glob("step-*.ckpt")
    assert hearing.heard[-1] == file.stem


def test_logs_of_a_batch_are_the_means_of_the_epoch_so_far():
    with one_process():
        _, logs, _ = fit_recorded(0.0)
    assert logs["batch end 1"] == logs["epoch end 2"]
    assert logs["batch end 0"] != logs["batch end 1"]


def test_logs_of_a_batch_cost_nothing_unless_they_are_read():
    asked = []

    def number(name: str) -> Any:
        return lambda: asked.append(name) or 0.5

    logs = BatchLogs(lambda: asked.append("all") or {"loss": number("loss"), "auc": number("auc")})
    assert logs
    assert asked == []
    assert (logs["loss"], logs["loss"], len(logs), list(logs)) == (0.5, 0.5, 2, ["loss", "auc"])
    assert asked == ["all", "loss"]
    assert logs.get("accuracy") is None


class Stopper(Callback):
    """Asks for the end on one rank, after a step or an epoch."""

    def __init__(self, rank: int, *, epoch: int | None = None, step: int | None = None) -> None:
        self.rank, self.epoch, self.step, self.steps = rank, epoch, step, 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps += 1
        if cx.get_rank() == self.rank and self.steps == self.step:
            self.trainer.stop_training = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if cx.get_rank() == self.rank and epoch == self.epoch:
            self.trainer.stop_training = True


def fit_stopped(rank: int, where: dict[str, int]) -> list[Any]:
    trainer = trainer_with(Stopper(rank, **where))
    first = trainer.fit(INPUTS, TARGETS, *VALIDATION, epochs=9, effective_batch_size=6, verbose=False)
    steps = trainer._state.position.step
    again = trainer.fit(INPUTS, TARGETS, epochs=1, **QUIET)  # goes on as ever
    return [steps, first.epochs, len(first.val_losses), again.epochs, fingerprint(trainer.model)]


@pytest.mark.parametrize("world_size", [1, by_night(2), by_night(3)])
@pytest.mark.parametrize(("where", "steps"), [({"epoch": 1}, 8), ({"step": 5}, 6), ({"step": 8}, 8)])
def test_what_one_rank_decides_all_do(world_size, where, steps):
    found = everywhere(world_size, fit_stopped, world_size - 1, where)
    epochs = -(-steps // 4)
    assert found == found[:1] * world_size
    assert found[0][:4] == [steps, [*range(1, epochs + 1)], epochs, [epochs + 1]]


KINDS: dict[str, type[Exception]] = {
    "beginning": cx.ConfigError,
    "end of an epoch": cx.NonFiniteError,
    "end of a batch": cx.CheckpointError,
    "state": ValueError,
}


class Failing(Callback):
    """Fails on one rank, also with errors that elsewhere are those of all ranks."""

    def __init__(self, hook: str) -> None:
        self.hook = hook

    def fail(self) -> None:
        if cx.get_rank() == 1:
            raise KINDS[self.hook](f"no {self.hook}")

    def on_train_begin(self, logs: Any = None) -> None:
        if self.hook == "beginning":
            self.fail()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self.hook == "end of an epoch":
            self.fail()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.hook == "end of a batch":
            self.fail()

    def state_dict(self) -> dict[str, Any]:
        if self.hook == "state" and self.trainer.epoch == 1:
            self.fail()
        return {}


def fit_failing(hook: str, folder: str) -> str:
    saving = {"checkpoint_every_n_epochs": 1, "save_on_master_only": False, "checkpoint_dir": folder}
    return ending(trainer_with(Failing(hook)).fit, INPUTS, TARGETS, epochs=2, **saving, **QUIET)


@nightly_where(lambda hook: hook != "beginning")
@pytest.mark.parametrize("hook", KINDS)
def test_an_error_in_a_callback_of_one_rank_ends_all(hook, tmp_path):
    first, second = run_world(2, fit_failing, hook, str(tmp_path), seconds=20.0)
    assert second == f"{KINDS[hook].__name__}: no {hook}"
    assert first.startswith("DistributedTrainingError: ")
    assert f"{KINDS[hook].__name__}: no {hook}" in first


def fail_while_writing(folder: str) -> list[float]:
    """Rank 0 fails while its disk takes six seconds for a checkpoint; returns when each rank had its error."""
    times: list[float] = []
    callback = Callback()

    def fail(batch: int, logs: Any = None) -> None:
        if callback.trainer._state.position.step == 2 and cx.is_master():
            times.append(time.monotonic())
            raise ValueError("no more")

    callback.on_train_batch_end = fail
    fsync = files.os.fsync
    files.os.fsync = lambda file: (threading.Event().wait(6.0), fsync(file))[1]  # the disk is slow
    try:
        cx.init()
        saving = {"checkpoint_every_n_steps": 1, "checkpoint_dir": folder}
        with pytest.raises((ValueError, cx.DistributedTrainingError)):
            trainer_with(callback).fit(INPUTS, TARGETS, epochs=2, **saving, **QUIET)
        return [*times, time.monotonic()]
    finally:
        files.os.fsync = fsync


@pytest.mark.nightly
def test_others_hear_of_an_error_before_a_slow_disk_is_done(tmp_path):
    (failed, ended), [received] = values(run_ranks(2, fail_while_writing, str(tmp_path)))
    assert received - failed < 2.0
    assert ended - failed > 3.0  # it did wait for what it had begun to write


# --- EarlyStopping -------------------------------------------------------------------------------------------------


def follow(values: list[float], **arguments: Any) -> tuple[int | None, int]:
    """Returns (the epoch after which it stops, or None; the best one), both from 0."""
    callback = EarlyStopping("loss", **arguments)
    model = nn.Linear(1, 1)
    trainer: Any = types.SimpleNamespace(stop_training=False, model=model, trained=model)
    callback.set_trainer(trainer)
    callback.on_train_begin()
    for epoch, value in enumerate(values):
        callback.on_epoch_end(epoch, {"loss": value})
        if trainer.stop_training:
            return epoch, callback.best_epoch
    return None, callback.best_epoch


@pytest.mark.parametrize(
    ("values", "arguments", "stopped", "best"),
    [
        ([3, 2, 1], {}, None, 2),
        ([3, 2, 2], {}, 2, 1),  # as good is not better
        ([3, 2, 2.5, 1], {}, 2, 1),
        ([3, 2, 2.5, 1, 2, 2], {"patience": 2}, 5, 3),
        ([3, 2.95, 2.85, 2.8], {"min_delta": 0.1}, 1, 0),
        ([3, 2.95, 2.85, 2.8], {"min_delta": -0.1, "patience": 2}, None, 2),
        ([1, 2, 3, 3], {"mode": "max"}, 3, 2),
        ([3, 2, 1.5, 1.4, 1.3], {"baseline": 1.0, "patience": 2}, None, 4),  # getting better is waited for
        ([3, 2, 2, 1], {"baseline": 1.0, "patience": 2}, 2, 1),
        ([1, 5, 4, 4], {"start_from_epoch": 1}, 3, 2),
        ([math.nan, math.nan, 1], {"patience": 2}, 1, 0),
        ([1, math.nan], {"patience": 1}, 1, 0),
        ([math.nan], {"restore_best_weights": True}, None, 0),
    ],
)
def test_early_stopping_counts_as_keras_does(values, arguments, stopped, best):
    assert follow(values, **arguments) == (stopped, best)


class Keeping(Callback):
    """Remembers the fingerprint after each epoch."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.found.append(fingerprint(self.model))


def fit_until_worse(folder: str) -> list[Any]:
    keeping = Keeping()
    early = EarlyStopping("val_accuracy", patience=2, restore_best_weights=True)
    trainer = trainer_with(early, keeping)
    history = trainer.fit(INPUTS, TARGETS, *VALIDATION, epochs=50, **QUIET)
    best = max(range(len(history.epochs)), key=lambda epoch: history.val_accuracies[epoch])
    return [len(history.epochs), best, fingerprint(trainer.model) == keeping.found[best], keeping.found[best]]


@pytest.mark.parametrize("world_size", [1, by_night(2)])
def test_the_best_weights_come_back_on_every_rank(world_size, tmp_path):
    found = everywhere(world_size, fit_until_worse, str(tmp_path))
    assert found == found[:1] * world_size
    epochs, best, are_best, _ = found[0]
    assert epochs == best + 3 < 50
    assert are_best


# --- kept, and resumed ---------------------------------------------------------------------------------------------


class Counting(Callback):
    """Counts steps, and asks for the end after so many, on the last rank alone; has a tensor, too."""

    def __init__(self, limit: int) -> None:
        self.limit, self.steps, self.sums = limit, 0, torch.zeros(2)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps += 1
        self.sums += torch.tensor([1.0, float(batch)])
        if self.steps == self.limit and cx.get_rank() == cx.get_world_size() - 1:
            self.trainer.stop_training = True

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "sums": self.sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self.sums = state["steps"], state["sums"]


class Warming(Callback):
    """Changes the rate when something begins: a fit that goes on must not do so twice."""

    def on_train_begin(self, logs: Any = None) -> None:
        for group in self.trainer.optimizer.param_groups:
            group["lr"] *= 0.5

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        for group in self.trainer.optimizer.param_groups:
            group["lr"] *= 0.9


class Evaluating(Callback):
    """Evaluates after each step: all ranks have the same model then, running means too."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.losses.append(self.trainer.evaluate(*VALIDATION).loss)


class Saving(Callback):
    """Saves by hand after each step and each epoch."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.trainer.save_checkpoint(self.folder / f"by-hand-{self.trainer._state.position.step:03d}.ckpt")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.trainer.save_checkpoint(self.folder / f"by-hand-after-{epoch + 1}.ckpt")


def make_noisy() -> nn.Module:
    with seeded():
        return nn.Sequential(nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 3))


def fit_noisy(limit: int, folder: str, resume: str | None = None, *more: Callback) -> list[Any]:
    model = make_noisy()
    counting, early = Counting(limit), EarlyStopping("val_loss", patience=1, restore_best_weights=True)
    trainer = cx.DistributedTrainer(
        model,
        "cross_entropy",
        torch.optim.Adam(model.parameters(), 0.1),
        callbacks=[Warming(), counting, early],
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5),
    )
    history = trainer.fit(
        INPUTS,
        TARGETS,
        *VALIDATION,
        cx.DistributedTrainingConfig(epochs=6, effective_batch_size=8, verbose=False, checkpoint_dir=folder),
        checkpoint_every_n_steps=0 if resume else 1,
        checkpoint_every_n_epochs=0 if resume else 1,
        resume=resume,
        callbacks=more,
    )
    [group] = trainer.optimizer.param_groups
    return [
        fingerprint(model),
        history.history,
        history.epochs,
        counting.steps,
        counting.sums.tolist(),
        early.best_epoch,
        group["lr"],
    ]


def fit_and_resume(limit: int, folder: str) -> list[Any]:
    found = [fit_noisy(limit, folder, None, Saving(folder))]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found += [fit_noisy(limit, folder, str(path)) for path in sorted(Path(folder).glob("*.ckpt"))]
    return found


@pytest.mark.parametrize("world_size", [1, by_night(3)])
@pytest.mark.parametrize("limit", [4, by_night(1000)])
def test_resumed_after_any_step_it_ends_with_the_same_callbacks_and_weights(limit, world_size, tmp_path):
    for found in everywhere(world_size, fit_and_resume, limit, str(tmp_path)):
        first = found[0]
        steps = 5 if limit == 4 else 3 * len(first[2])
        assert first[3] == steps
        assert len(found) == 1 + 2 * steps + 2 * len(first[2])  # after each step two, and two after each epoch
        for number, each in enumerate(found):
            assert each == first, number


def resume_two(folder: str) -> list[Any]:
    """Resumes from a checkpoint that was made by hand, with other ranks' generators in it; and when all is over."""
    first = fit_noisy(7, folder, None, Saving(folder))
    paths = [f"{folder}/by-hand-004.ckpt", f"{folder}/by-hand-after-1.ckpt", "auto"]
    return [first == fit_noisy(7, folder, path) for path in paths]


@pytest.mark.nightly
def test_the_same_on_two_ranks(tmp_path):
    """By day test_features.py resumes with dropout on two ranks, and the test above with these callbacks on one."""
    assert run_world(2, resume_two, str(tmp_path)) == [[True, True, True]] * 2


def fit_evaluating() -> list[Any]:
    model, evaluating = make_noisy(), Evaluating()
    trainer = cx.DistributedTrainer(model, "cross_entropy", adam(model))
    trainer.fit(INPUTS, TARGETS, epochs=2, callbacks=evaluating, **QUIET)
    return evaluating.losses


def test_a_callback_may_evaluate_in_the_middle_of_an_epoch():
    first, second = run_world(2, fit_evaluating)
    assert first == second
    assert len(set(first)) == 4


def interrupted(folder: str) -> list[Any]:
    """Returns what a fit of no time and the one that goes on come to, and one that is not interrupted."""
    found = []
    for limits in ({"max_time_seconds": 1e-9}, {"resume": "auto"}, {}):
        model = make_noisy()
        early = EarlyStopping("loss", patience=9, restore_best_weights=True)
        trainer = cx.DistributedTrainer(model, "cross_entropy", torch.optim.SGD(model.parameters(), 3.0))
        trainer.fit(INPUTS, TARGETS, epochs=4, callbacks=early, checkpoint_dir=folder, **limits, **QUIET)
        if not found:
            trainer.save_checkpoint(f"{folder}/epoch-0001.ckpt")
        found.append(fingerprint(model))
    return found


def test_a_fit_that_is_interrupted_keeps_its_weights(tmp_path):
    with one_process():
        first, resumed, whole = interrupted(str(tmp_path))
    assert first != resumed == whole


def fit_compiled(folder: str, resume: str | None, *, compiled: bool) -> list[Any]:
    model: Any = make_model()
    optimizer = adam(model)
    if compiled:
        model = torch.compile(model, backend="eager")
    early = EarlyStopping("loss", patience=5, restore_best_weights=True)
    trainer = cx.DistributedTrainer(model, "cross_entropy", optimizer, callbacks=[early])
    settings = {"epochs": 3, "checkpoint_every_n_epochs": 0 if resume else 1, "checkpoint_dir": folder}
    history = trainer.fit(INPUTS, TARGETS, resume=resume, **settings, **QUIET)
    return [history.history, fingerprint(model)]


@pytest.mark.parametrize("compiled", [False, by_night(True)])
def test_a_checkpoint_of_a_compiled_model_is_one_of_the_model(compiled, tmp_path):
    with one_process():
        whole = fit_compiled(str(tmp_path), None, compiled=True)
        assert fit_compiled(str(tmp_path), str(tmp_path / "epoch-0002.ckpt"), compiled=compiled) == whole


def test_a_state_that_is_nobodys_is_said(tmp_path):
    with one_process():
        trainer = trainer_with(Counting(100), Counting(100))
        trainer.fit(INPUTS, TARGETS, epochs=1, checkpoint_dir=str(tmp_path), checkpoint_every_n_epochs=1, **QUIET)
        [path] = tmp_path.glob("*.ckpt")
        with pytest.warns(UserWarning, match="has the state of Counting 2, but fit has no such callback"):
            trainer_with(Counting(100)).fit(INPUTS, TARGETS, epochs=2, resume=str(path), **QUIET)


# --- refused -------------------------------------------------------------------------------------------------------
def refuse_on_one_rank() -> list[Any]:
    callbacks = [EarlyStopping("val_loss")] if cx.get_rank() == 1 else []
    trainer = trainer_with()
    with pytest.raises(cx.ConfigError) as caught:
        trainer.fit(INPUTS, TARGETS, epochs=1, callbacks=callbacks, **QUIET)
    trainer.fit(INPUTS, TARGETS, epochs=1, **QUIET)
    return [str(caught.value)]


def test_early_stopping_without_validation_is_refused_on_every_rank_before_anything_starts():
    [[first], [second]] = run_world(2, refuse_on_one_rank)
    assert first.startswith("rank 1 refuses to start: EarlyStopping monitors 'val_loss', but there is no validation")
    assert second.startswith("EarlyStopping monitors 'val_loss', but there is no validation data")


class Habits(Callback):
    """Asks for the end as Keras's callbacks do."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.stop_training = epoch == 1


def test_the_end_may_be_asked_of_the_model():
    with one_process():
        trainer = trainer_with(Habits())
        assert trainer.fit(INPUTS, TARGETS, epochs=5, **QUIET).epochs == [1, 2]
        assert trainer.fit(INPUTS, TARGETS, epochs=2, **QUIET).epochs == [3, 4]


def test_hooks_may_be_given_to_an_instance():
    called, callback = [], Callback()
    callback.on_train_batch_end = lambda batch, logs=None: called.append(batch)
    with one_process():
        trainer_with(callback).fit(INPUTS, TARGETS, epochs=1, **QUIET)
    assert called == [0, 1]


class Old(Callback):
    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        raise AssertionError


class Nested(Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.trainer.fit(INPUTS, TARGETS, epochs=1, verbose=False)


class Loading(Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.trainer.load_checkpoint("any")


def fit_regression(callback: Callback) -> None:
    trainer = cx.DistributedTrainer(nn.Linear(FEATURES, 1), "mse")
    trainer.fit(INPUTS, INPUTS[:, :1], epochs=1, callbacks=callback, **QUIET)


test_what_cannot_work_is_refused = refuses(
    (lambda: EarlyStopping(monitor=""), "monitor must be a name"),
    (lambda: EarlyStopping(mode="up"), "mode must be one of"),
    (lambda: EarlyStopping(patience=-1), "patience must be a whole number"),
    (lambda: EarlyStopping(min_delta="1"), "min_delta must be a number"),
    (lambda: EarlyStopping(baseline="1"), "baseline must be a number"),
    (lambda: EarlyStopping(restore_best_weights=1), "restore_best_weights must be True or False"),
    (lambda: EarlyStopping(start_from_epoch=0.5), "start_from_epoch must be a whole number"),
    (lambda: trainer_with(Old()), r"Old has no hook named 'on_batch_end'\. Did you mean"),
    (lambda: fit_regression(Nested()), "fit was called within fit"),
    (lambda: fit_regression(Loading()), "load_checkpoint was called within fit"),
    (lambda: fit_regression(EarlyStopping("accuracy")), r"this fit has no metric named 'accuracy'\. Known: loss"),
    (
        lambda: trainer_with().fit(INPUTS, TARGETS, epochs=1, keep_last=3, **QUIET),
        "keep_last is set and no checkpoint is asked for",
    ),
)


class Unkeepable(Callback):
    def state_dict(self) -> dict[str, Any]:
        return {"anything": object()} if cx.is_master() else {}


def fit_unkeepable(folder: str) -> list[Any]:
    trainer = trainer_with(Unkeepable())
    with pytest.raises(cx.ConfigError) as caught:
        trainer.fit(INPUTS, TARGETS, epochs=1, checkpoint_dir=folder, checkpoint_every_n_epochs=1, **QUIET)
    trainer.fit(INPUTS, TARGETS, epochs=1, **QUIET)  # nothing is to be kept
    return [str(caught.value), trainer._state.position.step]


def test_a_state_that_cannot_be_kept_is_refused_before_the_first_step(tmp_path):
    first, second = run_world(2, fit_unkeepable, str(tmp_path))
    assert first[0].startswith("the state of a callback cannot be kept: 'callbacks.Unkeepable.anything' is a object")
    assert second[0] == f"rank 0: {first[0]}"
    assert first[1] == second[1] == 2


def test_logs_of_a_batch_are_not_those_of_a_later_time():
    kept = []
    callback = Callback()
    callback.on_train_batch_end = lambda batch, logs=None: kept.append((logs, repr(logs) if batch else ""))
    with one_process():
        trainer_with(callback).fit(INPUTS, TARGETS, epochs=1, **QUIET)
    (early, _), (late, text) = kept
    with pytest.raises(cx.ConfigError, match="can be read only while its hook runs"):
        early["loss"]
    assert text == str(dict(late))


class SavingAlone(Callback):
    """Saves on rank 0 alone, which cannot work within fit."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self.trainer.is_master():
            self.trainer.save_checkpoint("any.ckpt")


def fit_saving_alone() -> str:
    return ending(trainer_with(SavingAlone()).fit, INPUTS, TARGETS, epochs=1, **QUIET)


def test_what_rank_0_cannot_do_alone_in_a_callback_is_said():
    first, second = run_world(2, fit_saving_alone)
    assert second.startswith("CollectiveMismatchError: ")
    assert first.startswith(
        "CollectiveMismatchError: save_checkpoint was called by a callback on some ranks only, while the others"
    )


def said(capsys: Any, what: str) -> list[str]:
    return [line.removeprefix(what).strip() for line in capsys.readouterr().out.splitlines() if line.startswith(what)]


def test_a_second_fit_of_a_trainer_says_that_no_checkpoint_is_of_it(tmp_path, capsys):
    settings = {"epochs": 1, "checkpoint_every_n_epochs": 1, "checkpoint_dir": str(tmp_path), "resume": "auto"}
    with one_process():
        trainer = cx.DistributedTrainer(make_model(), "cross_entropy")
        trainer.fit(INPUTS, TARGETS, **settings)
        capsys.readouterr()
        trainer.fit(INPUTS, TARGETS, **settings)
    what = f"1 checkpoint in {tmp_path}, none that call 2 of fit can continue, starting from scratch"
    assert said(capsys, "resume") == [what]
    assert trainer.epoch == 2


def test_a_fit_says_what_it_goes_on_from_and_why_it_stops(tmp_path, capsys):
    def fit(rate: float, **more: Any) -> None:
        model = make_model()
        trainer = cx.DistributedTrainer(model, "cross_entropy", torch.optim.SGD(model.parameters(), rate))
        settings = {"epochs": 2, "effective_batch_size": 12, "checkpoint_dir": str(tmp_path)}
        trainer.fit(INPUTS, TARGETS, **{**settings, **more})

    with one_process():
        fit(0.1, resume="auto")
        what = f"no checkpoint in {tmp_path}, starting from scratch; checkpoints are off"
        assert said(capsys, "resume") == [what]
        fit(0.1, checkpoint_every_n_epochs=1, max_time_seconds=1e-9)
        why = f"after step 1, in epoch 1: max_time_seconds has passed; a checkpoint is in {tmp_path}"
        assert said(capsys, "stopped") == [why]
        fit(0.2, resume="auto", checkpoint_every_n_epochs=1, keep_best="loss")
        shown = capsys.readouterr().out
        assert f"from {tmp_path}/step-00000001.ckpt: step 1, epochs complete: 0\n" in shown
        assert "restored   lr 0.1 as in the checkpoint (the program has 0.2)\n" in shown
        fit(0.1, resume="auto")
        over = "nothing is left to train: to continue, raise epochs"
        end = f"from {tmp_path}/epoch-0002.ckpt: step 4, epochs complete: 2; {over}"
        assert said(capsys, "resume") == [end]
        with pytest.warns(UserWarning, match="holds 4 checkpoints of another training"):
            fit(0.1, checkpoint_every_n_epochs=1)


def test_a_fit_that_a_callback_ends_says_why_and_so_does_its_resume(tmp_path, capsys):
    def fit(**more: Any) -> None:
        early = EarlyStopping("loss", min_delta=1e9, patience=2)
        saving = {"checkpoint_every_n_epochs": 1, "checkpoint_dir": str(tmp_path)}
        trainer_with(early).fit(INPUTS, TARGETS, epochs=9, effective_batch_size=12, **saving, **more)

    reason = r"loss has not improved for 2 epochs; best \d\.\d+ at epoch 1"
    with one_process():
        fit()
        (line,) = said(capsys, "stopped")
        assert re.fullmatch(f"after epoch 3 of 9: {reason}", line)
        fit(resume="auto")
        shown = capsys.readouterr().out
    assert re.search(rf"epochs complete: 3; the fit was stopped there \({reason}\): to continue, call load_ch", shown)
    assert "\nstopped" not in shown


def fit_shown() -> list[Any]:
    """Returns what this rank prints about the end of two fits that rank 1 ends, and why they ended."""
    found: list[Any] = []
    for reason in ("", "good enough"):
        with contextlib.redirect_stdout(io.StringIO()) as shown:
            stopper = Stopper(1, step=1)
            stopper.stop_reason = reason
            trainer = trainer_with(stopper)
            trainer.fit(INPUTS, TARGETS, epochs=2, effective_batch_size=6)
        lines = [line for line in shown.getvalue().splitlines() if line.startswith("stopped")]
        found.append([lines, trainer._state.stop_reason])
    return found


def test_rank_0_says_why_a_callback_of_another_rank_ends_a_fit():
    reasons = ["Stopper set stop_training", "good enough"]
    first, second = run_world(2, fit_shown)
    assert first == [[[f"stopped    after step 2, in epoch 1 of 2: {reason}"], reason] for reason in reasons]
    assert second == [[[], reason] for reason in reasons]
