"""Claims about training on N ranks: it is training on one rank with the joined batch, and it has one set of bits."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from fitting import Floats, adam, flat, make_model, make_rows, one_process, outcome, run_world
from kept_worlds import close_worlds
from markers import by_night
from torch import nn

import cyxtrain as cx

# A machine that does something else as well takes several times as long.
pytestmark = [pytest.mark.usefixtures("rank_server"), pytest.mark.timeout(300)]

SAMPLES = (1, 2, 7, 64, 100, 1797)
BATCH_SIZES = (1, 3, 64)
TOLERANCE = {"float32": 1e-5, "float64": 1e-12}

# (samples, batch size per rank, with validation, dtype)
Case = tuple[int, int, bool, str]
ALL_CASES: list[Case] = list(itertools.product(SAMPLES, BATCH_SIZES, (False, True), TOLERANCE))
DAY_SAMPLES = (1, 7, 100)
# The other sizes, hundreds of steps, or a validation in a type whose training the day has without one.
NIGHT_CASES: list[Case] = [
    case for case in ALL_CASES if case[0] not in DAY_SAMPLES or case[0] >= 64 * case[1] or case[2:] == (True, "float64")
]
DAY_CASES: list[Case] = [case for case in ALL_CASES if case not in NIGHT_CASES]
AGAIN = [case for case in DAY_CASES if case[:2] == (100, 3)]
WORLDS = (2, by_night(3), by_night(4))


def fit_adam(case: Case, world_size: int) -> dict[str, Any]:
    """Trains 2 epochs on the batches of a world of `world_size`, on however many ranks there are."""
    samples, batch_size, validates, dtype = case
    model = make_model(dtype)
    trainer = cx.DistributedTrainer(model, nn.CrossEntropyLoss(), adam(model))
    validation = make_rows(11, seed=1) if validates else None
    history = trainer.fit(
        *make_rows(samples),
        epochs=2,
        effective_batch_size=batch_size * world_size,
        validation_data=validation,
        verbose=False,
    )
    assert history.effective_batch_size == batch_size * world_size
    return outcome(trainer, history)


class RecordingSGD(torch.optim.SGD):
    """Keeps the gradients of its first step."""

    gradients: Any = None

    def step(self, closure: Any = None) -> Any:
        if self.gradients is None:
            self.gradients = flat(parameter.grad for parameter in self.param_groups[0]["params"])
        return super().step(closure)


def first_gradients(case: Case, world_size: int) -> Floats:
    """Returns the gradients of the first step: SGD's momentum would multiply rounding from step to step."""
    samples, batch_size, _, dtype = case
    model = make_model(dtype)
    optimizer = RecordingSGD(model.parameters(), lr=0.1, momentum=0.9)
    trainer = cx.DistributedTrainer(model, nn.CrossEntropyLoss(), optimizer)
    trainer.fit(*make_rows(samples), max_steps=1, effective_batch_size=batch_size * world_size, verbose=False)
    gradients: Floats = optimizer.gradients
    return gradients


def train_all(cases: list[Case], world_size: int) -> dict[Case, dict[str, Any]]:
    return {case: fit_adam(case, world_size) for case in cases}


def all_gradients(world_size: int) -> dict[Case, Floats]:
    return {case: first_gradients(case, world_size) for case in DAY_CASES if not case[2]}


@functools.cache
def trained(world_size: int) -> list[dict[Case, dict[str, Any]]]:
    """Returns what each rank has after each case of the day."""
    return run_world(world_size, train_all, DAY_CASES, world_size, seconds=200)


@functools.cache
def trained_alone(world_size: int) -> dict[Case, dict[str, Any]]:
    with one_process():
        return train_all(DAY_CASES, world_size)


def differences(ranks: dict[Case, dict[str, Any]], alone: dict[Case, dict[str, Any]]) -> dict[Case, float]:
    """Returns the largest difference between parameters, of the cases where it is too large."""
    found = {case: float(abs(ranks[case]["parameters"] - alone[case]["parameters"]).max()) for case in alone}
    return {case: difference for case, difference in found.items() if not difference <= TOLERANCE[case[3]]}


@pytest.mark.parametrize("world_size", WORLDS)
def test_n_ranks_end_with_the_parameters_of_one_rank_with_the_joined_batch(world_size):
    assert differences(trained(world_size)[0], trained_alone(world_size)) == {}


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("world_size", WORLDS)
def test_thousands_of_steps_on_n_ranks_end_with_the_parameters_of_one_rank(world_size):
    with one_process():
        alone = train_all(NIGHT_CASES, world_size)
    assert differences(run_world(world_size, train_all, NIGHT_CASES, world_size, seconds=500)[0], alone) == {}


@pytest.mark.parametrize("world_size", WORLDS)
def test_n_ranks_record_the_losses_and_accuracies_of_one_rank(world_size):
    ranks, alone = trained(world_size)[0], trained_alone(world_size)
    for case in alone:
        for ours, expected in zip(ranks[case]["history"], alone[case]["history"], strict=True):
            assert len(ours) == len(expected), case
            assert ours == pytest.approx(expected, rel=0, abs=TOLERANCE[case[3]]), case


@pytest.mark.parametrize("world_size", WORLDS)
def test_a_step_of_sgd_with_momentum_has_the_gradients_of_one_rank(world_size):
    ranks = run_world(world_size, all_gradients, world_size)
    with one_process():
        alone = all_gradients(world_size)
    for case, expected in alone.items():
        np.testing.assert_allclose(ranks[0][case], expected, rtol=0, atol=TOLERANCE[case[3]] / 10, err_msg=str(case))


@pytest.mark.parametrize("world_size", WORLDS)
def test_every_rank_ends_with_the_same_bits_and_the_same_history(world_size):
    first, *others = trained(world_size)
    for other in others:
        assert {case: found["fingerprint"] for case, found in other.items()} == {
            case: found["fingerprint"] for case, found in first.items()
        }
        assert [found["history"] for found in other.values()] == [found["history"] for found in first.values()]


@pytest.mark.parametrize("world_size", WORLDS)
def test_every_run_ends_with_the_same_bits(world_size):
    close_worlds()  # every run begins anew
    again = run_world(world_size, train_all, AGAIN, world_size)[0]
    assert len({case[3] for case in AGAIN}) == len(TOLERANCE)
    for case in AGAIN:
        assert again[case]["fingerprint"] == trained(world_size)[0][case]["fingerprint"], case
        assert again[case]["history"] == trained(world_size)[0][case]["history"], case


@pytest.mark.parametrize("world_size", WORLDS)
def test_validation_changes_no_bit_of_the_training(world_size):
    ranks = trained(world_size)[0]
    pairs = [case for case in DAY_CASES if case[2] and (*case[:2], False, case[3]) in ranks]
    assert len(pairs) >= 8
    for case in pairs:
        without: Case = (*case[:2], False, case[3])
        assert ranks[case]["fingerprint"] == ranks[without]["fingerprint"], case
