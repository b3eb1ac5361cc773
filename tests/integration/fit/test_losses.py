"""Claims about losses: whatever the loss, N ranks do what one rank does, and one rank does what PyTorch does."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from fitting import adam, flat, make_model, make_rows, one_process, outcome, run_world
from markers import by_night, nightly_where
from torch import Tensor, nn
from torch.nn import functional

import cyxtrain as cx

pytestmark = pytest.mark.usefixtures("rank_server")

ROWS, EFFECTIVE = 9, 4  # batches of 4, 4 and 1: uneven on three ranks, and the last one leaves ranks without a row
IGNORED = -100
WEIGHTS = torch.tensor([0.2, 1.0, 5.0], dtype=torch.float64)

Problem = tuple[nn.Module, Any, Tensor, Tensor]


class OwnLoss(nn.Module):
    """A model that computes its loss itself, from inputs and targets."""

    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.body, self.wrap = make_model("float64"), wrap

    def forward(self, inputs: Tensor, targets: Tensor) -> Any:
        return self.wrap(functional.cross_entropy(self.body(inputs), targets))


def own_mean(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output, target, reduction="none").square().mean()


def own_per_row(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output, target, reduction="none") * 3


def own_pair(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    weights = output.detach()[:, 0].abs()  # it depends on the parameters: nobody can know it beforehand
    return (functional.cross_entropy(output, target, reduction="none") * weights).sum(), weights.sum()


def classes(loss_fn: Any, *ignored: int, label: int = IGNORED) -> Callable[[], Problem]:
    """Class numbers; the given rows do not count."""

    def make() -> Problem:
        inputs, targets = make_rows(ROWS)
        targets[list(ignored)] = label
        return make_model("float64"), loss_fn, inputs, targets

    return make


def regression(loss_fn: Any, kind: torch.dtype = torch.float64) -> Callable[[], Problem]:
    """One number per row, between 0 and 1, and 0 or 1 where the type is whole."""

    def make() -> Problem:
        inputs, targets = make_rows(ROWS)
        numbers = (targets > 0) if kind is torch.uint8 else targets / 2
        return make_model("float64", outputs=1), loss_fn, inputs, numbers.to(kind).reshape(-1, 1)

    return make


def probabilities(loss_fn: Any, last: nn.Module) -> Callable[[], Problem]:
    def make() -> Problem:
        inputs, _ = make_rows(ROWS)
        targets = make_rows(ROWS, seed=1)[0][:, :3].softmax(1)
        return nn.Sequential(make_model("float64"), last), loss_fn, inputs, targets.double()

    return make


def pixels(loss_fn: Any) -> Callable[[], Problem]:
    """A class for each of two places per row, as in segmentation, some of which do not count."""

    def make() -> Problem:
        inputs, targets = make_rows(ROWS)
        places = torch.stack([targets, targets.roll(1)], dim=1)
        places[2:5, 0] = IGNORED
        return nn.Sequential(make_model("float64", outputs=6), nn.Unflatten(1, (3, 2))), loss_fn, inputs, places

    return make


def models_own(wrap: Callable[[Tensor], Any]) -> Callable[[], Problem]:
    return lambda: (OwnLoss(wrap), None, *make_rows(ROWS))


smoothed = functools.partial(nn.CrossEntropyLoss, label_smoothing=0.1)
PROBLEMS: dict[str, Callable[[], Problem]] = {
    "cross entropy": classes(nn.CrossEntropyLoss()),
    "label smoothing": classes(smoothed()),
    "class weights": classes(nn.CrossEntropyLoss(weight=WEIGHTS)),
    "ignored rows": classes(nn.CrossEntropyLoss(), 0, 5, 6, 8),
    "a batch of ignored rows": classes(nn.CrossEntropyLoss(), 0, 1, 2, 3, 6),
    "only ignored rows": classes(nn.CrossEntropyLoss(), *range(ROWS)),
    "weights, ignored class 0, smoothing": classes(smoothed(weight=WEIGHTS, ignore_index=0), 1, 4, label=0),
    "sum": classes(nn.CrossEntropyLoss(reduction="sum")),
    "sum with weights and ignored rows": classes(nn.CrossEntropyLoss(weight=WEIGHTS, reduction="sum"), 3, 4),
    "none": classes(nn.CrossEntropyLoss(reduction="none")),
    "none with ignored rows": classes(nn.CrossEntropyLoss(reduction="none"), 3, 4),
    "functional cross entropy": classes(functional.cross_entropy),
    "functional with ignored rows": classes(functional.cross_entropy, 0, 5),
    "by name": classes("cross_entropy", 0, 5),
    "probabilities": probabilities(nn.CrossEntropyLoss(weight=WEIGHTS), nn.Identity()),
    "divergence, batchmean": probabilities(nn.KLDivLoss(reduction="batchmean"), nn.LogSoftmax(1)),
    "pixels with ignored ones": pixels(smoothed(weight=WEIGHTS)),
    "own mean": classes(own_mean),
    "own, a number per row": classes(own_per_row),
    "own (sum, weight)": classes(own_pair),
    "the model's own": models_own(lambda loss: loss),
    "the model's own, in a dictionary": models_own(lambda loss: {"loss": loss, "other": 1}),
    "squared error": regression(nn.MSELoss()),
    "squared error by name": regression("mse"),
    "functional absolute error": regression(functional.l1_loss),
    "squared error, sum": regression(nn.MSELoss(reduction="sum")),
    "binary with logits": regression(nn.BCEWithLogitsLoss(pos_weight=WEIGHTS[2:]), torch.uint8),
}


NIGHTLY = (
    *("label smoothing", "class weights", "sum", "none", "functional cross entropy", "squared error by name"),
    *("the model's own, in a dictionary", "functional absolute error", "squared error, sum"),
)
DAILY = tuple(name for name in PROBLEMS if name not in NIGHTLY)


def fit_all(names: tuple[str, ...]) -> dict[str, Any]:
    """Trains and evaluates some problems, on however many ranks there are."""
    found = {}
    for name in names:
        model, loss_fn, inputs, targets = PROBLEMS[name]()
        trainer = cx.DistributedTrainer(model, loss_fn, adam(model))
        history = trainer.fit(inputs, targets, epochs=1, effective_batch_size=EFFECTIVE, shuffle=False, verbose=False)
        evaluation = [*dict(trainer.evaluate(inputs, targets, batch_size=2)).values()]
        found[name] = outcome(trainer, history) | {"evaluation": evaluation}
    return found


@functools.cache
def alone(names: tuple[str, ...]) -> dict[str, Any]:
    with one_process():
        return fit_all(names)


@functools.cache
def on_ranks(world_size: int, names: tuple[str, ...]) -> list[dict[str, Any]]:
    return run_world(world_size, fit_all, names)


def those_beside(name: str) -> tuple[str, ...]:
    """Returns the problems that are trained with one, by day or by night."""
    return NIGHTLY if name in NIGHTLY else DAILY


def plain_loss(model: nn.Module, loss_fn: Any, inputs: Tensor, targets: Tensor) -> Tensor:
    """Returns what a loop by hand would call backward on."""
    if loss_fn is None:
        loss = model(inputs.double(), targets)
        return loss["loss"] if isinstance(loss, dict) else loss
    named = {"cross_entropy": nn.CrossEntropyLoss(), "mse": nn.MSELoss()}
    function = named[loss_fn] if isinstance(loss_fn, str) else loss_fn
    output = model(inputs.double())
    result = function(output, targets.double() if targets.dtype is torch.uint8 else targets)
    return result[0] / result[1] if isinstance(result, tuple) else result.mean()


def train_by_hand(model: nn.Module, loss_fn: Any, inputs: Tensor, targets: Tensor) -> None:
    optimizer = adam(model)
    for first in range(0, ROWS, EFFECTIVE):
        optimizer.zero_grad()
        batch = slice(first, first + EFFECTIVE)
        plain_loss(model, loss_fn, inputs[batch], targets[batch]).backward()
        optimizer.step()


@nightly_where(lambda name: name in NIGHTLY)
@pytest.mark.parametrize("name", PROBLEMS)
def test_one_rank_does_what_a_loop_by_hand_does(name):
    model, loss_fn, inputs, targets = PROBLEMS[name]()
    train_by_hand(model, loss_fn, inputs, targets)
    found = alone(those_beside(name))[name]
    np.testing.assert_allclose(found["parameters"], flat(model.parameters()), rtol=0, atol=1e-12)
    model.eval()
    with torch.no_grad():
        expected = plain_loss(model, loss_fn, inputs, targets).item()
    assert found["evaluation"][0] == pytest.approx(expected, rel=1e-12, nan_ok=True)


@nightly_where(lambda name: name in NIGHTLY)
@pytest.mark.parametrize("world_size", [2, by_night(3)])
@pytest.mark.parametrize("name", PROBLEMS)
def test_n_ranks_do_what_one_rank_does(name, world_size):
    expected = alone(those_beside(name))[name]
    first, *others = (found[name] for found in on_ranks(world_size, those_beside(name)))
    np.testing.assert_allclose(first["parameters"], expected["parameters"], rtol=0, atol=1e-12)
    for ours, theirs in zip(first["history"], expected["history"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-12, nan_ok=True)
    assert first["evaluation"] == pytest.approx(expected["evaluation"], rel=1e-12, nan_ok=True)
    for other in others:
        assert other["fingerprint"] == first["fingerprint"]
        assert repr(other["history"]) == repr(first["history"])


def test_ignored_rows_do_not_count_for_accuracy_whatever_the_reduction():
    counted = {name: found["evaluation"][1] for name, found in alone(DAILY).items() if "ignored rows" in name}
    for name, accuracy in counted.items():
        model, loss_fn, inputs, targets = PROBLEMS[name]()
        train_by_hand(model, loss_fn, inputs, targets)
        valid = targets != IGNORED
        right = (model(inputs.double()).argmax(1) == targets)[valid].double()
        assert accuracy == pytest.approx(right.mean().item() if len(right) else float("nan"), nan_ok=True), name
    assert len(counted) == 6


def test_accuracy_is_there_for_classes_and_binary_targets_alone():
    without = {name for name, found in alone(DAILY).items() if not found["history"][1]}
    regressions = {name for name in DAILY if "error" in name or "model's own" in name}
    assert without == regressions | {"probabilities", "divergence, batchmean", "only ignored rows"}
    assert np.isnan(alone(DAILY)["only ignored rows"]["evaluation"][1])
    assert len(alone(DAILY)["squared error"]["evaluation"]) == 1
    model, loss_fn, inputs, targets = PROBLEMS["binary with logits"]()
    train_by_hand(model, loss_fn, inputs, targets)
    right = ((model(inputs.double()) > 0) == targets).double().mean().item()
    assert alone(DAILY)["binary with logits"]["evaluation"][1] == right


def test_a_batch_in_which_nothing_counts_changes_nothing():
    model, _, inputs, targets = classes(None)()
    before = flat(model.parameters())
    weighted = nn.CrossEntropyLoss(weight=WEIGHTS * 0)  # PyTorch's own mean is 0 / 0, and so are its gradients
    with one_process():
        trainer = cx.DistributedTrainer(model, weighted, torch.optim.SGD(model.parameters(), lr=1.0))
        history = trainer.fit(inputs, targets, epochs=1, verbose=False)
    np.testing.assert_array_equal(flat(model.parameters()), before)
    assert np.isnan(history.train_losses[0])
