"""A step in several micro-batches is the step of their whole, on any number of ranks."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fitting import Floats, flat, make_model, make_rows, one_process, run_world
from markers import by_night
from torch import nn

import cyxtrain as cx

pytestmark = pytest.mark.usefixtures("rank_server")
PER_RANK, ROWS = 12, 100  # the last step of an epoch is a partial one, on 2 and 3 ranks with unequal shares
WEIGHTS = torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64)


def sum_and_weight(output, target):
    """A loss of the user's own: each class counts as much as its number."""
    each = nn.functional.cross_entropy(output, target, reduction="none")
    return (each * target).sum(), target.sum()


LOSSES = {
    "mean": nn.CrossEntropyLoss(),
    "class weights": nn.CrossEntropyLoss(weight=WEIGHTS),
    "sum": nn.CrossEntropyLoss(reduction="sum"),
    "none": nn.CrossEntropyLoss(reduction="none"),
    "sum and weight": sum_and_weight,
}
DAILY = ("mean", "sum and weight")
Case = tuple[str, int]


def cases_of(losses: tuple[str, ...]) -> list[Case]:
    return list(itertools.product(losses, (1, 3, 5)))


class Watching(nn.Module):
    """Notes how many rows it is given at once while it is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_model("float64")
        self.seen: list[int] = []

    def forward(self, x):
        if self.training:
            self.seen.append(len(x))
        return self.net(x)


def fit(loss: str, accumulation_steps: int, effective_batch_size: int) -> dict[str, Any]:
    model = Watching()
    trainer = cx.DistributedTrainer(model, LOSSES[loss], torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9))
    group: Any = dist.group.WORLD
    before = group.group.engine.sequence
    history = trainer.fit(
        *make_rows(ROWS),
        epochs=2,
        accumulation_steps=accumulation_steps,
        effective_batch_size=effective_batch_size,
        verbose=False,
    )
    return {
        "parameters": flat(model.parameters()),
        "history": [*history.train_losses, *history.train_accuracies],
        "effective": history.effective_batch_size,
        "calls": group.group.engine.sequence - before,
        "seen": model.seen,
    }


def fit_all(losses: tuple[str, ...], effective_batch_size: int) -> dict[Case, dict[str, Any]]:
    return {case: fit(*case, effective_batch_size) for case in cases_of(losses)}


@functools.cache
def fitted(world_size: int, losses: tuple[str, ...]) -> list[dict[Case, dict[str, Any]]]:
    """What each rank has after each case."""
    return run_world(world_size, fit_all, losses, PER_RANK * world_size)


def furthest(found: Floats, expected: Floats) -> float:
    return float(abs(found - expected).max())


@pytest.mark.parametrize(
    ("world_size", "losses"), [(2, DAILY), *(by_night(world_size, tuple(LOSSES)) for world_size in (1, 2, 3))]
)
def test_micro_batches_make_the_step_of_the_whole(world_size, losses):
    effective = PER_RANK * world_size
    with one_process():
        expected = {loss: fit(loss, 1, effective) for loss in losses}
    for found in fitted(world_size, losses):
        for loss, steps in cases_of(losses):
            ours, whole = found[loss, steps], expected[loss]
            assert furthest(ours["parameters"], whole["parameters"]) < 1e-12, (loss, steps)
            assert ours["history"] == pytest.approx(whole["history"], rel=1e-12), (loss, steps)


def test_each_micro_batch_has_its_part_of_the_rows_and_the_last_of_a_step_the_rest():
    for found in fitted(2, DAILY):
        assert found["mean", 1]["seen"] == [12, 12, 12, 12, 2] * 2  # the last step has 4 rows, 2 on each rank
        assert found["mean", 3]["seen"] == [4] * 12 + [2] + [4] * 12 + [2]
        assert found["mean", 5]["seen"] == ([3, 3, 3, 3] * 4 + [2]) * 2


def test_ranks_talk_once_a_step_however_many_micro_batches_it_has():
    for found in fitted(2, DAILY):
        for loss in DAILY:
            assert {found[loss, steps]["calls"] for steps in (3, 5)} == {found[loss, 1]["calls"]}


def batches_of(keywords: dict[str, Any]) -> dict[str, Any]:
    model = Watching()
    trainer = cx.DistributedTrainer(model, nn.CrossEntropyLoss(), "sgd")
    history = trainer.fit(*make_rows(ROWS), epochs=1, verbose=False, **keywords)
    return {"seen": model.seen, "effective": history.effective_batch_size, "steps": trainer._state.position.step}


def test_the_batch_size_is_that_of_a_micro_batch():
    for found in run_world(2, batches_of, {"batch_size": 5, "accumulation_steps": 4}):
        assert found == {"seen": [5] * 10, "effective": 40, "steps": 3}


def test_the_header_says_in_how_many_rows_at_once(capsys):
    with one_process():
        trainer = cx.DistributedTrainer(make_model(), nn.CrossEntropyLoss(), "sgd")
        trainer.fit(*make_rows(ROWS), epochs=1, batch_size=8, accumulation_steps=3)
    assert "24 per rank in micro-batches of 8, 24 effective" in capsys.readouterr().out
