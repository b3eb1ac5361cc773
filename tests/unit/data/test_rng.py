"""Claims about random generators: data and training each draw their own numbers, whichever generator they draw from."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from markers import by_night
from torch.utils.data import Dataset

from cyxtrain.data.rng import (
    CPU,
    Generators,
    as_json,
    begin_pass,
    generators_apart,
    generators_as_json,
    generators_kept,
    row_seeds,
    use_own_numpy,
)
from cyxtrain.data.sources.fetching import RowLoader, RowRequest

SEED = 7
DRAWS: dict[str, Callable[[], float]] = {
    "random": random.random,
    "random.gauss": lambda: random.gauss(0, 1),
    "np.random.rand": np.random.rand,
    "np.random.randn": np.random.randn,  # every second call returns a number that is in store
    "np.random.permutation": lambda: float(np.random.permutation(5)[0]),
    "torch.rand": lambda: float(torch.rand(())),
    "torch.randn": lambda: float(torch.randn(())),
}


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """Leaves all generators as they were."""
    with generators_kept():
        torch.manual_seed(1)
        np.random.seed(1)
        random.seed(1)
        yield


@pytest.fixture(params=["NumPy's generator", "ours"])
def _installed(request: Any) -> None:
    if request.param == "ours":
        use_own_numpy()


def draw(count: int = 3) -> list[float]:
    """Draws an odd number from each, so that normal numbers stay in store."""
    return [each() for _ in range(count) for each in DRAWS.values()]


@pytest.mark.usefixtures("_installed")
def test_two_sets_of_generators_that_take_turns_draw_what_they_draw_alone():
    with generators_kept():
        expected = draw(9)
    with generators_kept():
        begin_pass([], [], SEED, 0)
        expected_of_data = draw(9)
    with generators_kept():
        begin_pass([], [], SEED, 0)
        data = Generators()
    found: list[float] = []
    of_data: list[float] = []
    for _ in range(3):
        found += draw()
        with generators_apart():
            data.use()
            of_data += draw()
            data = Generators()
    assert found == expected
    assert of_data == expected_of_data


@pytest.mark.usefixtures("_installed")
def test_states_of_generators_that_are_not_in_place_are_those_that_they_had_in_place():
    before = generators_as_json(CPU)
    with generators_kept():
        begin_pass([], [], SEED, 0)
        draw()
        expected = generators_as_json(CPU)
        data = Generators()
    assert as_json(data.states()) == expected
    assert generators_as_json(CPU) == before


def test_our_generator_has_the_states_of_numpys():
    np.random.randn()
    expected = str(np.random.get_state()), str(np.random.get_state(legacy=False))
    own = np.random.get_bit_generator()
    with generators_kept():
        use_own_numpy()
        assert np.random.get_bit_generator() is not own
        assert (str(np.random.get_state()), str(np.random.get_state(legacy=False))) == expected
        np.random.set_state(np.random.RandomState(3).get_state())
        assert np.random.rand() == np.random.RandomState(3).rand()
    assert np.random.get_bit_generator() is own
    assert (str(np.random.get_state()), str(np.random.get_state(legacy=False))) == expected


def test_a_generator_of_another_kind_is_replaced_and_put_back():
    other = np.random.PCG64(3)
    np.random.set_bit_generator(other)
    np.random.randn()  # the next one is in store
    expected = str(np.random.get_state(legacy=False))
    with generators_kept():
        use_own_numpy()
        np.random.seed(3)
        assert np.random.rand() == np.random.RandomState(3).rand()
    assert np.random.get_bit_generator() is other
    assert str(np.random.get_state(legacy=False)) == expected


# --- rows -----------------------------------------------------------------------------------------------------------


class Drawing(Dataset[Any]):
    """Rows of which those from `first` on draw random numbers; notes which it gives."""

    def __init__(self, first: int, *draws: str) -> None:
        self.first = first
        self.draws = [DRAWS[name] for name in draws]
        self.given: list[int] = []

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> list[float]:
        self.given.append(index)
        return [float(index), *(each() for each in self.draws if index >= self.first)]


def load(dataset: Dataset[Any], collate: Any = list) -> list[Any]:
    """Returns the rows of four batches of an epoch."""
    loader = RowLoader(dataset, torch.utils.data.DataLoader(dataset, collate_fn=collate), SEED)
    places = [range(first, first + 10) for first in range(0, 40, 10)]
    return [*loader.load(RowRequest(SEED, 0, each, [*each]) for each in places)]


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize("first", [by_night(0), 15])
@pytest.mark.parametrize("names", [[name] for name in DRAWS] + [[*DRAWS]], ids=str)
def test_what_a_row_draws_depends_on_its_seed_and_training_draws_as_without_it(names, first):
    before = generators_as_json(CPU)
    dataset = Drawing(first, *names)
    found = [row for batch in load(dataset) for row in batch]
    assert generators_as_json(CPU) == before
    for row, seed in enumerate(row_seeds(SEED, 0, range(40))):
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed >> 1)
        assert found[row] == Drawing(first, *names)[row]
    # Those of the batch that first draws twice.
    assert len(dataset.given) == 50


class Late(Drawing):
    """Draws from Python's generator, too, in rows whose first number is high."""

    def __getitem__(self, index: int) -> list[float]:
        row = super().__getitem__(index)
        if row[-1] > 0.9:
            row.append(random.random())
        return row


def test_a_generator_that_few_rows_draw_from_is_seeded_for_them():
    found = [row for batch in load(Late(0, "torch.rand")) for row in batch]
    assert 0 < sum(len(row) == 3 for row in found) < 20
    for row, seed in zip(found, row_seeds(SEED, 0, range(40)), strict=True):
        assert len(row) == 2 or row[2] == random.Random(seed).random()


def test_rows_that_draw_nothing_are_loaded_once_and_a_collate_fn_draws_from_its_own_seed():
    before = generators_as_json(CPU)
    dataset = Drawing(40)
    found = load(dataset, lambda rows: draw(1))
    assert dataset.given == [*range(40)]
    assert generators_as_json(CPU) == before
    assert load(dataset, lambda rows: draw(1)) == found
    assert len({numbers[0] for numbers in found}) == 4
