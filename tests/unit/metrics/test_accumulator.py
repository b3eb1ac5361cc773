"""The table of sums under losses, metrics and logged numbers: the same on the host and on an accelerator."""

from __future__ import annotations

import math
import random

import pytest
import torch

from cyxtrain.metrics import accumulator
from cyxtrain.metrics.accumulator import ALIKE, REDUCES, Accumulator, joined, number_of
from cyxtrain.world.world import World


@pytest.fixture(params=["host", "accelerator"])
def place(request, monkeypatch):
    """Where numbers are added; the second way, which waits for nothing, works on a CPU's tensors too."""
    if request.param == "accelerator":
        monkeypatch.setattr(accumulator, "_on_host", lambda number: number)
    return request.param


def numbers(count: int, seed: int = 0) -> list[torch.Tensor]:
    drawn = random.Random(seed)
    return [torch.tensor(drawn.uniform(-9, 9), dtype=torch.float64) for _ in range(count)]


def test_a_mean_is_of_terms_over_weights_and_nothing_counts_as_0(place):
    table = Accumulator(["loss", "accuracy"])
    for number in range(40):
        table.add("loss", torch.tensor(float(number)), 2.0, sum_factor=4.0)
        table.add("accuracy", torch.tensor(1), torch.tensor(2), sum_factor=1.0)
    table.add("loss", torch.tensor(math.nan), 0.0, sum_factor=4.0)
    assert table.pairs() == {"loss": (4.0 * sum(range(40)), 80.0), "accuracy": (40.0, 80.0)}
    assert table.table().tolist() == [[3120.0, 80.0, 40.0, 80.0]]


@pytest.mark.parametrize("reduce", [*REDUCES, ALIKE])
def test_each_way_of_combining_has_the_number_that_python_finds(place, reduce):
    found, values = Accumulator(), numbers(37)
    for step, value in enumerate(values):
        found.add("own", value, step if reduce == "last" else 1.0, reduce=reduce)
    plain = [value.item() for value in values]
    expected = {"max": max(plain), "min": min(plain), "last": plain[-1], "sum": sum(plain)}
    pair = found.pairs()["own"]
    assert number_of(reduce, pair) == pytest.approx(expected.get(reduce, sum(plain) / 37), rel=1e-15)
    assert pair[0] == 36 or reduce != "last"


def test_a_number_of_the_host_is_added_to_a_table_on_the_accelerator(place):
    """A callback may log a float after a step has logged the accelerator's numbers."""
    table = Accumulator(["loss"])
    table.add("loss", torch.tensor(1.0), 1.0)
    assert table.pairs() == {"loss": (1.0, 1.0)}
    table.add("loss", 2.0, 1.0)
    assert table.pairs() == {"loss": (3.0, 2.0)}


@pytest.mark.parametrize("reduce", ["max", "min"])
def test_nan_stays_the_largest_and_the_smallest(place, reduce):
    found = Accumulator()
    for value in (1.0, math.nan, 2.0):
        found.add("own", torch.tensor(value), reduce=reduce)
    assert math.isnan(found.pairs()["own"][0])


@pytest.mark.parametrize("before", [0, 5, 40])
def test_rolled_back_it_is_as_before_the_step(place, before):
    table, kept = Accumulator(["loss"]), Accumulator(["loss"])
    for value in numbers(before):
        for each in (table, kept):
            each.keep()
            each.add("loss", value)
            each.add("most", value, reduce="max")
    table.keep()
    for value in numbers(50, seed=1):
        table.add("loss", value)
        table.add("most", value, reduce="max")
        table.add("new", value)
    table.roll_back()
    assert table.pairs() == kept.pairs()
    table.keep()
    kept.keep()
    for each in (table, kept):
        each.add("loss", torch.tensor(3.0))
    assert table.pairs() == kept.pairs()


def test_rows_are_added_exactly_whoever_fills_them(place):
    values = numbers(64)
    whole = Accumulator(["loss"], rows=64)
    for row in range(64):
        whole.add("loss", values[row], row=row)
    backwards = Accumulator(["loss"], rows=64)
    for row in reversed(range(64)):
        backwards.add("loss", values[row], row=row)
    assert whole.over(World()) == backwards.over(World())
    assert whole.pairs()["loss"] == (math.fsum(value.item() for value in values), 64.0)


def test_it_continues_from_what_was_kept(place):
    first, other, values = Accumulator(["loss"]), Accumulator(["loss"]), numbers(30)
    for value in values[:20]:
        first.add("loss", value)
        first.add("most", value, reduce="max")
    other.load(first.kept())
    for value in values[20:]:
        for each in (first, other):
            each.add("loss", value)
            each.add("most", value, reduce="max")
    assert other.pairs()["most"] == first.pairs()["most"]
    assert other.pairs()["loss"] == pytest.approx(first.pairs()["loss"], rel=1e-15)
    assert other.names == ["loss", "most"]


@pytest.mark.parametrize(
    ("reduce", "pair"),
    [("mean", (4.0, 6.0)), ("sum", (4.0, 6.0)), ("max", (3.0, 0.0)), ("min", (1.0, 0.0)), (ALIKE, (1.0, 2.0))],
)
def test_ranks_join_what_they_have(reduce, pair):
    assert joined(reduce, (1.0, 2.0), (3.0, 4.0)) == pair


def test_of_ranks_the_lowest_that_logged_in_the_last_step_has_the_last_number():
    assert joined("last", (7.0, 1.0), (7.0, 2.0)) == (7.0, 1.0)
    assert joined("last", (6.0, 1.0), (7.0, 2.0)) == (7.0, 2.0)
    assert joined("last", (7.0, 1.0), (7.0, 2.0), on_rank=True) == (7.0, 2.0)


def test_the_latest_numbers_are_there_at_once_on_the_host(place):
    table = Accumulator(["loss"])
    table.add("loss", torch.tensor(2.0))
    assert table.lately() == {"loss": (2.0, 1.0)}
