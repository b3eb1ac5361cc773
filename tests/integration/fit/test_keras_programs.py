"""Claims that Keras's own tests make of `fit` and its callbacks, where no other test here makes them."""

from __future__ import annotations

import csv
import itertools
import math
from typing import Any

import pytest
import torch
from fitting import everywhere, make_model, make_rows
from markers import by_night
from torch import Tensor, nn

import cyxtrain as cx

pytestmark = pytest.mark.usefixtures("rank_server", "alone")

QUIET: dict[str, Any] = {"verbose": False}
INPUTS, TARGETS = make_rows(20)[0], torch.zeros(20, 3)


def trainer_of(model: nn.Module, **arguments: Any) -> cx.DistributedTrainer:
    return cx.DistributedTrainer(model, "mse", torch.optim.SGD(model.parameters(), lr=0.1), **arguments)


def test_the_loss_does_not_depend_on_the_batch_size():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    trainer = cx.DistributedTrainer(model, "mse", optimizer)
    fitted = [trainer.fit(INPUTS, TARGETS, epochs=1, batch_size=size, **QUIET).train_losses[0] for size in (16, 20)]
    measured = [trainer.evaluate(INPUTS, TARGETS, batch_size=size).loss for size in (16, 20)]
    assert [*fitted, *measured] == [pytest.approx(fitted[0], rel=1e-6)] * 4


class DropsAlways(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 8)

    def forward(self, rows: Tensor) -> Tensor:
        return nn.functional.dropout(self.body(rows), 0.5, training=True)


def test_what_a_model_draws_in_predict_is_new_in_each_batch():
    trainer = trainer_of(DropsAlways())
    first, second = trainer.predict(torch.ones(8, 4), batch_size=4).split(4)
    assert not torch.equal(first == 0, second == 0)
    one, other = (trainer.predict(torch.ones(8, 4)) for _ in range(2))
    assert not torch.equal(one, other)


def test_another_trainer_of_the_model_has_other_metrics():
    model, names = make_model(), []
    for metric in ("mse", "mae"):
        trainer = trainer_of(model, metrics=[metric])
        history = trainer.fit(INPUTS, TARGETS, epochs=1, **QUIET).history
        names.append((metric in history, list(trainer.evaluate(INPUTS, TARGETS).keys())))
    assert names == [(True, ["loss", "mse"]), (True, ["loss", "mae"])]


def zero(output: Tensor, target: Tensor) -> float:
    return 0.0


def one(output: Tensor, target: Tensor) -> float:
    return 1.0


@pytest.mark.parametrize("metrics", [[zero, one], [one, zero]])
def test_metrics_are_in_the_order_in_which_they_were_given(metrics):
    _, *measured = trainer_of(make_model(), metrics=metrics).evaluate(INPUTS, TARGETS)
    assert measured == [metric(INPUTS, TARGETS) for metric in metrics]


class Counting(cx.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.trained = self.tested = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.trained += 1

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.tested += 1


def test_validation_data_without_an_end_are_read_as_far_as_asked_for():
    counting = Counting()
    batches = itertools.repeat((torch.ones(2, 4), torch.zeros(2, 3)))
    settings = {"steps_per_epoch": 3, "validation_steps": 4, "epochs": 1, "callbacks": [counting], **QUIET}
    trainer_of(make_model()).fit(iter(batches), validation_data=iter(batches), **settings)
    assert (counting.trained, counting.tested) == (3, 4)


class WithNumbers(cx.DistributedTrainer):
    """Returns its own numbers from its steps."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        return {**super().train_step(batch), "mine": torch.tensor(10.0)}

    def test_step(self, batch: Any) -> dict[str, Any]:
        return {**super().test_step(batch), "mine": torch.tensor(5.0)}


def test_numbers_that_steps_return_are_in_the_history_and_in_evaluations():
    model = make_model()
    trainer = WithNumbers(model, "mse", torch.optim.SGD(model.parameters(), lr=0.1), metrics=["mae"])
    history = trainer.fit(INPUTS, TARGETS, validation_split=0.2, epochs=2, **QUIET).history
    assert (history["mine"], history["val_mine"]) == ([10.0] * 2, [5.0] * 2)
    measured = trainer.evaluate(INPUTS, TARGETS)
    assert measured["mine"] == 5.0
    assert set(measured.keys()) == {"loss", "mae", "mine"}


class NotNegative(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.clamp(min=0)


class Clamp(cx.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        with torch.no_grad():
            self.model.weight.clamp_(min=0)


def fit_constrained(world_size: int) -> list[tuple[float, float]]:
    found = []
    for by_callback in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        if not by_callback:
            nn.utils.parametrize.register_parametrization(model, "weight", NotNegative())
        callbacks = [Clamp()] if by_callback else []
        trainer_of(model).fit(INPUTS, TARGETS, epochs=2, effective_batch_size=4, callbacks=callbacks, **QUIET)
        found.append((model.weight.min().item(), model.weight.sum().item()))
    return found


@pytest.mark.parametrize("world_size", [1, by_night(2)])
def test_a_constraint_is_a_parametrization_or_a_callback(world_size):
    alone = fit_constrained(1)
    assert [least for least, _ in alone] == [0, 0]
    if world_size > 1:
        for found in everywhere(world_size, fit_constrained, world_size):
            assert found == [pytest.approx(each, rel=1e-5) for each in alone]


class WithCounters(nn.Module):
    """Counts its calls in training, and what a callback adds."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))

    def forward(self, rows: Tensor) -> Tensor:
        self.calls += self.training
        return self.body(rows)


class CountInModel(cx.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append(int(self.model.calls))

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.model.batches += 1


def test_a_callback_may_change_buffers_of_the_model_between_batches():
    model, counting = WithCounters(), CountInModel()
    validation = (INPUTS[:4], TARGETS[:4])
    trainer_of(model).fit(
        INPUTS, TARGETS, validation_data=validation, epochs=3, batch_size=4, callbacks=[counting], **QUIET
    )
    assert counting.seen == list(range(1, 16))  # the model's state is that after the step
    assert int(model.batches) == 3


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = make_model()

    def forward(self, rows: Tensor) -> dict[str, Tensor]:
        scores = self.body(rows)
        return {"first": scores, "second": 2 * scores}


def test_an_output_without_a_loss_is_left_out():
    model = TwoOutputs()
    trainer = cx.DistributedTrainer(model, {"first": "mse"}, torch.optim.SGD(model.parameters(), lr=0.1))
    losses = trainer.fit(INPUTS, {"first": TARGETS}, epochs=2, **QUIET).train_losses
    assert losses[1] < losses[0]
    expected = nn.functional.mse_loss(model(INPUTS)["first"], TARGETS).item()
    assert trainer.evaluate(INPUTS, {"first": TARGETS}).loss == pytest.approx(expected)


def test_early_stopping_and_plateau_begin_anew_in_each_fit():
    stopper = cx.callbacks.EarlyStopping("loss", patience=2, min_delta=1e9)
    plateau = cx.callbacks.ReduceLROnPlateau("loss", patience=2, min_delta=1e9, factor=0.5)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = cx.DistributedTrainer(model, "mse", optimizer)
    for rate in (0.05, 0.025):
        history = trainer.fit(INPUTS, TARGETS, epochs=9, callbacks=[stopper, plateau], **QUIET)
        assert len(history.train_losses) == 3  # the best one, and two that are not better
        assert optimizer.param_groups[0]["lr"] == pytest.approx(rate)


def test_functions_are_called_as_hooks():
    seen: list[Any] = []
    hooks = cx.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: seen.append(("epoch", epoch)),
        on_train_batch_end=lambda batch, logs: seen.append(("batch", batch)),
        on_train_end=lambda logs: seen.append("end"),
    )
    callbacks = [hooks, cx.callbacks.LambdaCallback()]
    trainer_of(make_model()).fit(INPUTS, TARGETS, epochs=2, batch_size=10, callbacks=callbacks, **QUIET)
    batches = [("batch", 0), ("batch", 1)]
    assert seen == [("epoch", 0), *batches, ("epoch", 1), *batches, "end"]


def not_finite() -> tuple[Tensor, Tensor]:
    targets = TARGETS.clone()
    targets[12] = math.inf  # in the second step of batches of 10, without shuffling
    return INPUTS, targets


@pytest.mark.filterwarnings("ignore:.*inf")
def test_a_fit_that_nan_ends_has_a_line_of_it(tmp_path):
    file = tmp_path / "log.csv"
    callbacks = [cx.callbacks.TerminateOnNaN(), cx.callbacks.CSVLogger(file)]
    history = trainer_of(make_model()).fit(*not_finite(), epochs=9, batch_size=10, callbacks=callbacks, **QUIET)
    assert len(history.train_losses) == 1
    rows = list(csv.DictReader(file.open(encoding="utf-8")))
    assert [float(row["loss"]) for row in rows] == pytest.approx(history.train_losses, nan_ok=True)


@pytest.mark.filterwarnings("ignore:.*inf")
def test_an_error_on_nan_calls_no_end_of_training_and_leaves_checkpoints(tmp_path):
    ended: list[str] = []
    callback = cx.callbacks.LambdaCallback(on_train_end=lambda logs: ended.append("end"))
    settings = {"epochs": 9, "batch_size": 10, "shuffle": False, "checkpoint_dir": str(tmp_path), **QUIET}
    with pytest.raises(cx.NonFiniteError, match="step 2"):
        trainer_of(make_model()).fit(*not_finite(), checkpoint_every_n_steps=1, callbacks=[callback], **settings)
    assert ended == []
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["step-00000001.ckpt"]


def test_terminate_on_nan_leaves_a_healthy_fit_alone():
    callbacks = [cx.callbacks.TerminateOnNaN()]
    history = trainer_of(make_model()).fit(INPUTS, TARGETS, epochs=2, callbacks=callbacks, **QUIET)
    assert len(history.train_losses) == 2
