"""Claims about `train_on_batch`, `test_on_batch` and `predict_on_batch`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from fitting import CLASSES, FEATURES, everywhere, flat, make_model, make_rows, one_process, seeded
from markers import by_night
from refusals import refusal
from torch import Tensor, nn

import cyxtrain as cx

pytestmark = pytest.mark.usefixtures("rank_server")

ROWS, EFFECTIVE = 21, 8  # batches of 8, 8 and 5: two ranks get different numbers of rows
WORLDS = [by_night(1), 2, by_night(4)]


def data() -> tuple[Tensor, Tensor]:
    inputs, targets = make_rows(ROWS)
    return inputs.double(), targets


def trainer_of(model: nn.Module, **options: Any) -> cx.DistributedTrainer:
    return cx.DistributedTrainer(model, "cross_entropy", torch.optim.Adam(model.parameters(), 1e-2), **options)


def by_fit() -> Any:
    trainer = trainer_of(make_model("float64"))
    trainer.fit(*data(), epochs=2, effective_batch_size=EFFECTIVE, shuffle=False, verbose=False)
    return flat(trainer.model.parameters())


def by_batches() -> dict[str, Any]:
    trainer, (inputs, targets) = trainer_of(make_model("float64")), data()
    found = []
    for _ in range(2):
        for first in range(0, ROWS, EFFECTIVE):
            rows = slice(first, first + EFFECTIVE)
            found.append(trainer.train_on_batch(inputs[rows], targets[rows]))
    assert (trainer.step, trainer.epoch) == (6, 0)
    tested = trainer.test_on_batch(inputs, targets, return_dict=True)
    assert list(tested.values()) == trainer.test_on_batch(inputs, targets)
    evaluated = dict(trainer.evaluate(inputs, targets))
    assert tested == {name: pytest.approx(value, rel=1e-12) for name, value in evaluated.items()}
    predicted = trainer.predict_on_batch(inputs)
    difference = (predicted - trainer.predict(inputs)).abs().max()
    return {"parameters": flat(trainer.model.parameters()), "found": found, "difference": float(difference)}


@pytest.mark.parametrize("world_size", WORLDS)
def test_batches_train_as_fit_does_on_any_number_of_ranks(world_size):
    with one_process():
        fitted, alone = by_fit(), by_batches()
    for found in everywhere(world_size, by_batches):
        np.testing.assert_allclose(found["parameters"], fitted, rtol=1e-10)
        np.testing.assert_allclose(found["found"], alone["found"], rtol=1e-10)
        assert found["difference"] < 1e-12


def test_what_is_returned_is_keras_s():
    inputs, targets = data()
    model = nn.Linear(FEATURES, 1).double()
    with one_process():
        regression = cx.DistributedTrainer(model, "mse", "sgd")
        assert isinstance(regression.train_on_batch(inputs, inputs[:, :1]), float)
        assert isinstance(regression.test_on_batch(inputs, inputs[:, :1]), float)
        trainer = trainer_of(make_model("float64"))
        named = trainer.train_on_batch(inputs, targets, return_dict=True)
        assert list(named) == ["loss", "accuracy"]
        assert len(trainer.train_on_batch(inputs, targets)) == 2
        given = trainer.predict_on_batch(inputs.numpy())
        assert isinstance(given, np.ndarray)


def weighted(**weights: Any) -> Any:
    trainer = trainer_of(make_model("float64"))
    trainer.train_on_batch(*data(), **weights)
    return flat(trainer.model.parameters())


def test_weights_count():
    _, targets = data()
    with one_process():
        by_class = weighted(class_weight={0: 1.0, 1: 2.0, 2: 3.0})
        by_row = weighted(sample_weight=targets + 1.0)
        np.testing.assert_allclose(by_class, by_row, rtol=1e-12)
        assert not np.allclose(by_class, weighted())


def test_classes_that_do_not_count_are_found_in_later_batches():
    inputs, targets = data()
    holes = torch.where(torch.arange(ROWS) % 2 == 0, -100, targets)
    with one_process():
        trainer = trainer_of(make_model("float64"))
        loss = nn.CrossEntropyLoss()(trainer.model(inputs).detach(), holes)
        trainer.train_on_batch(inputs, targets)
        trainer.model.load_state_dict(make_model("float64").state_dict())
        assert trainer.train_on_batch(inputs, holes)[0] == pytest.approx(float(loss), rel=1e-12)


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with seeded():
            self.body = nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Dropout(), nn.Linear(FEATURES, CLASSES)).double()

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.body(inputs)
        return output


def saved(folder: str) -> tuple[Any, Any]:
    """Return the state after two steps, and after one, a checkpoint, and another one; a fit between changes nothing."""
    inputs, targets = data()
    first, second = trainer_of(Noisy()), trainer_of(Noisy())
    first.train_on_batch(inputs, targets)
    first.save_checkpoint(f"{folder}/one.ckpt")
    first.model.eval()
    first.train_on_batch(inputs, targets)
    assert not first.model.training
    second.fit(inputs, targets, epochs=1, verbose=False)
    second.load_checkpoint(f"{folder}/one.ckpt")
    second.train_on_batch(inputs, targets)
    states = (flat(each.model.state_dict().values()).tolist() for each in (first, second))
    return next(states), next(states)


@pytest.mark.parametrize("world_size", [1, by_night(2)])
def test_a_checkpoint_continues_bit_for_bit(world_size, tmp_path):
    outcomes = everywhere(world_size, saved, str(tmp_path))
    assert all(one == other == outcomes[0][0] for one, other in outcomes)


def as_after_the_fit(path: str) -> tuple[list[Any], list[Any]]:
    """Return what calls after a fit compute, by its trainer and by a new one that loads its checkpoint."""
    fitted, new = trainer_of(Noisy()), trainer_of(Noisy())
    settings = {"batch_size": 4, "virtual_ranks": 3, "clip_norm": 0.01, "seed": 7}
    fitted.fit(*data(), epochs=1, verbose=False, **settings)
    fitted.save_checkpoint(path)
    new.load_checkpoint(path)
    found: list[list[Any]] = []
    for trainer in (fitted, new):
        assert {name: getattr(trainer.config, name) for name in settings} == settings
        numbers = [*trainer.train_on_batch(*data()), *trainer.test_on_batch(*data()), *trainer.evaluate(*data())]
        found.append([*numbers, *flat(trainer.model.state_dict().values()).tolist()])
    return found[0], found[1]


def test_a_loaded_checkpoint_of_a_fit_with_virtual_ranks_has_the_same_bits_on_any_number_of_ranks(tmp_path):
    [(alone, loaded)] = everywhere(1, as_after_the_fit, str(tmp_path / "one.ckpt"))
    assert loaded == alone
    for ranks in (2, 3):
        found = everywhere(ranks, as_after_the_fit, str(tmp_path / f"{ranks}.ckpt"))
        assert found == [(alone, alone)] * ranks


def test_a_loaded_checkpoint_of_a_fit_in_fp16_continues_with_its_loss_scale(tmp_path):
    inputs, targets = make_rows(ROWS)
    fitted, new = trainer_of(make_model()), trainer_of(make_model())
    with one_process():
        fitted.fit(inputs, targets, epochs=1, precision="fp16", amp=cx.AMPConfig(initial_scale=8.0), verbose=False)
        fitted.save_checkpoint(tmp_path / "half.ckpt")
        new.load_checkpoint(tmp_path / "half.ckpt")
        after = [trainer.train_on_batch(inputs, targets) for trainer in (fitted, new)]
        assert after[0] == after[1]
    for ours, theirs in zip(new.model.parameters(), fitted.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


class Doubling(cx.DistributedTrainer):
    def train_step(self, batch: Any) -> Any:
        result = super().train_step(batch)
        return {"loss": 2 * result["loss"]}


def test_it_runs_a_step_of_the_user_s_own_and_calls_no_callback():
    inputs, targets = data()
    seen: list[str] = []

    class Watching(cx.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append("batch")

        def on_before_optimizer_step(self, batch: int, logs: Any = None) -> None:
            seen.append("step")

    with one_process():
        loss = trainer_of(make_model("float64")).train_on_batch(inputs, targets)[0]
        trainer = Doubling(make_model("float64"), "cross_entropy", callbacks=[Watching()])
        trainer.fit(inputs, targets, epochs=1, batch_size=ROWS, verbose=False)
        assert seen == ["step", "batch"]
        trainer.model.load_state_dict(make_model("float64").state_dict())
        assert trainer.train_on_batch(inputs, targets) == pytest.approx(2 * loss, rel=1e-12)
        assert seen == ["step", "batch"]


def backward_between_calls() -> Any:
    """Return the gradients of this rank's own backward between two calls, which no other rank takes part in."""
    trainer, (inputs, targets) = trainer_of(make_model("float64")), data()
    trainer.train_on_batch(inputs, targets)
    if trainer.is_master():
        trainer.model(inputs).sum().backward()
        trainer.model.zero_grad()
    trainer.train_on_batch(inputs, targets)
    return flat(trainer.model.parameters())


def late_number(trainer: cx.DistributedTrainer, batch: Any) -> dict[str, Any]:
    loss = nn.functional.cross_entropy(trainer.model(batch[0]), batch[1])
    return {"loss": loss, **({"late": 3.0} if trainer.step > 1 else {})}


def measured_late() -> list[Any]:
    trainer, (inputs, targets) = trainer_of(make_model("float64"), train_step=late_number), data()
    trainer.fit(inputs[:8], targets[:8], epochs=1, effective_batch_size=8, clip_norm=1.0, verbose=False)
    return [[*trainer.train_on_batch(inputs[:8], targets[:8], return_dict=True)] for _ in range(2)]


@pytest.mark.parametrize("world_size", WORLDS)
def test_a_number_that_comes_with_a_later_batch_is_returned(world_size):
    for found in everywhere(world_size, measured_late):
        assert found == [["loss"], ["loss", "late"]]


def test_a_backward_between_two_calls_is_the_rank_s_own():
    with one_process():
        expected = backward_between_calls()
    for found in everywhere(2, backward_between_calls):
        np.testing.assert_allclose(found, expected, rtol=1e-10)


def given_different_batches() -> str:
    trainer, (inputs, targets) = trainer_of(make_model("float64")), data()
    rows = slice(trainer.get_rank(), ROWS, 2)
    return refusal(trainer.train_on_batch, inputs[rows], targets[rows])


def test_different_batches_on_the_ranks_are_refused():
    for said in everywhere(2, given_different_batches):
        assert "rank 1 differs from rank 0 in the batch's X: shape" in said
        assert said.endswith("If each rank has its own samples, gather them first: cyxtrain.all_gather_with_grad(x).")


def own_rows_of_each_rank() -> list[float]:
    trainer, (inputs, targets) = trainer_of(make_model("float64")), data()
    parts = [each.tensor_split(trainer.get_world_size())[trainer.get_rank()] for each in (inputs, targets)]
    trainer.train_on_batch(*map(cx.all_gather_with_grad, parts))
    return [float(each.detach().sum()) for each in trainer.model.parameters()]


def test_own_rows_of_each_rank_are_gathered_first():
    expected = everywhere(1, own_rows_of_each_rank)[0]
    for found in everywhere(2, own_rows_of_each_rank):
        np.testing.assert_allclose(found, expected, rtol=1e-10)


class Calling(cx.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.trainer.train_on_batch(*data())


def test_what_cannot_work_is_refused_by_name():
    inputs, targets = data()
    with one_process():
        trainer = trainer_of(make_model("float64"))
        with pytest.raises(cx.ConfigError, match="train_on_batch takes one batch, as arrays, and X is a list_iterator"):
            trainer.train_on_batch(iter([1]))
        with pytest.raises(cx.ConfigError, match="train_on_batch has no argument 'X'"):
            trainer.train_on_batch(X=inputs)
        with pytest.raises(cx.ConfigError, match="train_on_batch was called within fit, by a callback"):
            trainer.fit(inputs, targets, epochs=1, verbose=False, callbacks=[Calling()])
        with pytest.raises(cx.ConfigError, match="the schedule of this trainer ends with a fit"):
            trainer_of(make_model("float64"), scheduler="cosine").train_on_batch(inputs, targets)
        with pytest.raises(cx.NonFiniteError), pytest.warns(UserWarning, match="sample 0 of X holds"):
            trainer.train_on_batch(inputs * torch.inf, targets)
        assert all(parameter.grad is None for parameter in trainer.model.parameters())
        trainer.train_on_batch(inputs, targets)


def weighted_with_an_ignored_class(by_fit: bool) -> Any:
    inputs, targets = data()
    targets[3] = -100
    trainer = trainer_of(make_model("float64"))
    weights = {number: 1.0 + number for number in range(CLASSES)}
    if by_fit:
        trainer.fit(inputs, targets, epochs=1, effective_batch_size=ROWS, class_weight=weights, verbose=False)
    else:
        trainer.train_on_batch(inputs, targets, class_weight=weights)
    return flat(trainer.model.parameters())


@pytest.mark.parametrize("world_size", [by_night(1), 2])
def test_a_class_that_the_loss_ignores_needs_no_class_weight(world_size):
    with one_process():
        fitted = weighted_with_an_ignored_class(True)
    for found in everywhere(world_size, weighted_with_an_ignored_class, False):
        np.testing.assert_allclose(found, fitted, rtol=1e-10)
