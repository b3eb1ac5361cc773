"""Claims about virtual_ranks with a train_step of the user's own: one that returns its loss is divided into slices."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from fitting import everywhere, fingerprint, make_model, make_rows, one_process
from markers import by_night
from refusals import refusal
from torch import Tensor
from torch.nn import functional

import cyxtrain as cx

pytestmark = pytest.mark.usefixtures("rank_server")

ROWS = 50
"""The last step has samples for two of four slices."""
SETTINGS: dict[str, Any] = {"epochs": 2, "batch_size": 3, "verbose": False, "virtual_ranks": 4}


class Penalized(cx.DistributedTrainer):
    """Adds to a loss on noisy rows, logs, and returns numbers and the output."""

    def train_step(self, batch: Any) -> Any:
        inputs, targets = batch
        scores = self.model(inputs + 0.1 * torch.randn_like(inputs))
        penalty = scores.square().mean()
        self.log("drawn", float(torch.rand(())))
        return {"loss": functional.cross_entropy(scores, targets) + penalty, "penalty": penalty, "output": scores}


class Pairs(cx.DistributedTrainer):
    """Returns (sum, weight)."""

    def train_step(self, batch: Any) -> Any:
        inputs, targets = batch
        losses = functional.cross_entropy(self.model(inputs), targets, reduction="none")
        weights = 1.0 + targets
        return (losses * weights).sum(), weights.sum()


class BuiltIn(cx.DistributedTrainer):
    """Changes the loss of the built-in step."""

    def train_step(self, batch: Any) -> Any:
        result = super().train_step(batch)
        return {**result, "loss": 0.5 * result["loss"]}


class Optimizes(cx.DistributedTrainer):
    """Updates in the step, from some step on."""

    first = 0

    def train_step(self, batch: Any) -> Tensor:
        inputs, targets = batch
        loss = functional.cross_entropy(self.model(inputs), targets)
        return self.optimize(loss) if self.step >= self.first else loss


class OptimizesLater(Optimizes):
    first = 1


def trainer_of(kind: type[cx.DistributedTrainer]) -> cx.DistributedTrainer:
    model = make_model()
    return kind(model, "cross_entropy", torch.optim.Adam(model.parameters(), 1e-2))


def bits(kind: type[cx.DistributedTrainer], more: dict[str, Any]) -> str:
    """Returns weights and the history's numbers, without times."""
    torch.manual_seed(5)
    trainer = trainer_of(kind)
    history = trainer.fit(*make_rows(ROWS), **SETTINGS, **more).history
    numbers = {name: values for name, values in history.items() if "time" not in name and "second" not in name}
    return fingerprint(trainer.model) + json.dumps(numbers, sort_keys=True)


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        (Penalized, {}),
        by_night(Pairs, {}),
        by_night(BuiltIn, {}),
        by_night(Penalized, {"accumulation_steps": 2}),
        by_night(Penalized, {"precision": "bf16", "clip_norm": 0.5}),
    ],
)
def test_a_step_that_returns_its_loss_has_the_same_bits_on_1_2_and_3_ranks(kind, more):
    found = {ranks: {*everywhere(ranks, bits, kind, more)} for ranks in (1, 2, 3)}
    assert len(found[1]) == 1
    assert found[2] == found[3] == found[1]


def refused(kind: type[cx.DistributedTrainer]) -> str:
    return refusal(trainer_of(kind).fit, *make_rows(ROWS), **SETTINGS)


def explains(words: str) -> bool:
    why = "train_step calls self.optimize, which updates parameters before it returns" in words
    return why and "Return the loss instead, and fit updates once, after all slices" in words


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_step_that_updates_is_refused(world_size):
    for words in everywhere(world_size, refused, Optimizes):
        assert words.startswith("virtual_ranks=4 gives the same bits")
        assert explains(words)


def test_a_step_that_updates_later_is_refused_there():
    with one_process():
        words = refused(OptimizesLater)
    assert words.startswith("virtual_ranks is set, and in step 2 ")
    assert explains(words)
