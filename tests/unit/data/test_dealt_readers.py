"""Readers: the samples of a step come from them in turn, the same on any number of ranks, each read by one rank."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from cyxtrain.data.sources.parts import Parts, parts_of
from cyxtrain.data.sources.readers import RankReaders, in_turn, readers_of_evaluation, readers_of_training, samples_from
from cyxtrain.world.slices import Slices
from cyxtrain.world.world import World

LENGTHS = (11, 0, 5, 17, 1, 8)
"""Samples of each reader."""
READERS = len(LENGTHS)
TOTAL = sum(LENGTHS)


def numbered(reader: int, readers: int) -> Iterator[tuple[int, int, float]]:
    """Yields samples: the reader, the place in it, and a random number."""
    assert readers == READERS
    for place in range(LENGTHS[reader]):
        yield reader, place, float(torch.rand(())) + random.random() + float(np.random.rand())


PARTS = Parts("numbered", numbered, needs_readers=True)


def slices(rank: int, size: int) -> Slices:
    return Slices.of(dataclasses.replace(World(), rank=rank, size=size))


def passes(size: int, number: int = 0) -> list[RankReaders]:
    """Returns the readers of each rank."""
    owned = [readers_of_training(READERS, slices(rank, size)) for rank in range(size)]
    return [RankReaders(PARTS, each, READERS, seed=3, number=number) for each in owned]


def steps(ranks: list[RankReaders], step_size: int) -> list[list[list[Any]]]:
    """Returns the samples of each step to the end, by rank."""
    found = []
    divisions = [slices(rank, len(ranks)) for rank in range(len(ranks))]
    while True:
        taken = [each.take_step(step_size, own) for each, own in zip(ranks, divisions, strict=True)]
        step = [of_rank[rank] for rank, of_rank in enumerate(taken)]
        if not any(step):
            return found
        found.append(step)


def by_step(size: int, step_size: int = 13, number: int = 0) -> list[list[Any]]:
    return [sorted(itertools.chain(*step)) for step in steps(passes(size, number), step_size)]


@pytest.mark.parametrize(("step_size", "readers"), [(13, 6), (6, 6), (64, 8), (9, 1), (7, 5)])
def test_sample_i_of_a_step_comes_from_reader_i_mod_readers(step_size, readers):
    counts = [samples_from(reader, readers, step_size) for reader in range(readers)]
    assert counts == [sum(i % readers == reader for i in range(step_size)) for reader in range(readers)]
    assert [count - -(-(step_size - j) // readers) for j, count in enumerate(counts)] == [0] * readers
    samples = [[(reader, place) for place in range(count)] for reader, count in enumerate(counts)]
    assert [reader for reader, _ in in_turn(samples)] == [i % readers for i in range(step_size)]


def test_a_reader_that_has_ended_is_left_out_of_its_turn():
    assert in_turn([[1, 2, 3], [], [4], [None, 0]]) == [1, 4, None, 2, 0, 3]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
def test_steps_are_the_same_on_any_number_of_ranks_without_a_sample_lost_or_twice(size):
    found = by_step(size)
    assert found == by_step(1)
    samples = [(reader, place) for step in found for reader, place, _ in step]
    assert sorted(samples) == [(reader, place) for reader, length in enumerate(LENGTHS) for place in range(length)]


def test_a_step_on_one_rank_is_in_turn():
    (first,) = steps(passes(1), 13)[0]
    assert [sample[:2] for sample in first] == [
        *((0, 0), (2, 0), (3, 0), (4, 0), (5, 0), (0, 1), (2, 1), (3, 1), (5, 1), (0, 2)),
    ]


def test_random_numbers_belong_to_a_reader_and_a_pass():
    numbers = {number: [sample[2] for step in by_step(2, number=number) for sample in step] for number in (0, 1)}
    assert len({*numbers[0], *numbers[1]}) == 2 * TOTAL
    torch.manual_seed(5)
    before = torch.get_rng_state()
    by_step(3)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 4), (4, 1)])
@pytest.mark.parametrize("num_done", [0, 1, 2])
def test_readers_that_skip_steps_continue_with_the_same_samples_on_any_number_of_ranks(before, after, num_done):
    whole = steps(passes(before), 7)
    resumed = passes(after)
    for each in resumed:
        assert each.resume(num_done, 7, {}) == ""
    left = [sorted(itertools.chain(*step)) for step in steps(resumed, 7)]
    assert left == [sorted(itertools.chain(*step)) for step in whole[num_done:]]


@pytest.mark.parametrize("count", [1, 4, 100])
def test_samples_that_were_looked_at_stay_the_next_ones(count):
    (peeked,) = passes(1)
    first = peeked.peek(count)
    assert len(first) == min(count, TOTAL)
    assert peeked.peek(count) == first
    peeked.resume(1, 7, {})
    (skipped,) = passes(1)
    skipped.resume(1, 7, {})
    assert steps([peeked], 7) == steps([skipped], 7)


@pytest.mark.parametrize("size", [1, 2, 4, 9])
def test_an_evaluation_reads_one_reader_after_the_other(size):
    owned = [readers_of_evaluation(READERS, slices(rank, size)) for rank in range(size)]
    assert [*itertools.chain(*owned)] == [*range(READERS)]
    ranks = [RankReaders(PARTS, each, READERS, seed=3, number=0) for each in owned]
    batches = [each.batches(4, own) for each, own in zip(ranks, owned, strict=True)]
    found = [sample[:2] for batch in itertools.chain(*batches) for sample in batch]
    assert found == [(reader, place) for reader, length in enumerate(LENGTHS) for place in range(length)]


class Lazy:
    def __call__(self, reader: int, readers: int) -> list[Any]:
        return [reader]


def with_defaults(reader: int = 0, readers: int = 1) -> list[Any]:
    return [reader]


def test_functions_of_reader_and_readers_are_data_in_parts():
    for data in (numbered, Lazy(), lambda reader, readers: [reader]):
        parts = parts_of(data, trains=False)
        assert parts is not None
        assert parts.needs_readers
    for data in (lambda: [1], lambda size: [size], iter([1]), [1], dict, torch.zeros(3), max):
        assert parts_of(data, trains=True) is None, data
    assert parts_of(with_defaults, trains=False) is None
    parts = parts_of(with_defaults, trains=True)
    assert parts is not None
    assert not parts.needs_readers


@pytest.mark.nightly
def test_a_reader_of_parquet_has_a_small_part_of_a_row_group_in_memory(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    dataset = pytest.importorskip("pyarrow.dataset")
    rows, groups, width = 8192, 4, 1024
    values = pyarrow.array(np.random.default_rng(0).random(rows * groups * width, dtype=np.float32))
    features = pyarrow.FixedSizeListArray.from_arrays(values, width)
    table = pyarrow.table({"a": features, "label": np.arange(rows * groups)})
    parquet.write_table(table, tmp_path / "rows.parquet", row_group_size=rows)
    size = table.nbytes / groups
    del table, features, values
    parts = parts_of(dataset.dataset(str(tmp_path), format="parquet"), trains=True)
    assert parts is not None
    assert parts.number == groups
    before = pyarrow.total_allocated_bytes()
    most = 0
    labels = []
    for sample in parts.read(1, 2):
        most = max(most, pyarrow.total_allocated_bytes() - before)
        labels.append(int(sample["label"]))
        assert sample["a"].shape == (width,)
    assert labels == [row for group in range(1, groups, 2) for row in range(rows * group, rows * (group + 1))]
    assert most <= size / 2


@pytest.mark.nightly
def test_parquet_gives_columns_of_folders_converted_types_and_chosen_columns(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    dataset = pytest.importorskip("pyarrow.dataset")
    for label in range(2):
        folder = tmp_path / f"label={label}"
        folder.mkdir()
        kind = [pyarrow.int32(), pyarrow.int64()][label]
        numbers = pyarrow.array([10 * label, 10 * label + 1], kind)
        table = pyarrow.table({"text": ["a", "b"], "n": numbers, "x": [0.5, 1.5]})
        parquet.write_table(table, folder / "rows.parquet")

    def opened(*columns: Any) -> Parts:
        schema = pyarrow.schema([("x", pyarrow.float64()), ("n", pyarrow.int64()), *columns])
        data = dataset.dataset(str(tmp_path), schema, format="parquet", partitioning="hive")
        parts = parts_of(data, trains=True)
        assert parts is not None
        return parts

    of_file = [{"x": 0.5, "n": 10}, {"x": 1.5, "n": 11}]
    assert [*opened().read(0, 1)] == [{"x": 0.5, "n": 0}, {"x": 1.5, "n": 1}, *of_file]
    assert [*opened().read(1, 2)] == of_file
    with_folders = opened(("label", pyarrow.int32())).read(0, 1)
    assert [(sample["n"], sample["label"]) for sample in with_folders] == [(0, 0), (1, 0), (10, 1), (11, 1)]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_slices_have_the_same_samples_whichever_rank_has_them(size):
    expected = steps(passes(4), 13)
    divisions = [Slices.of(dataclasses.replace(World(), rank=rank, size=size), 4) for rank in range(size)]
    ranks = [RankReaders(PARTS, readers_of_training(READERS, each), READERS, seed=3, number=0) for each in divisions]
    for step in expected:
        taken = [each.take_step(13, own) for each, own in zip(ranks, divisions, strict=True)]
        assert [samples for of_rank in taken for samples in of_rank.values()] == step
