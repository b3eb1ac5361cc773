"""Rows come to the model in the order of the epoch; to an accelerator they come while it computes with others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from markers import by_night
from prefetching import RESUMED, SOURCES, WRONG, compare, look, resume_each
from stand_in.running import run_on_stand_in

from cyxtrain.config import DistributedTrainingConfig
from cyxtrain.data.batches.batch import Share
from cyxtrain.data.batches.prefetch import Placement, prefetch_one
from cyxtrain.data.feed import Place
from cyxtrain.data.sampler import Indices
from cyxtrain.data.sources.arrays import ArraySource
from cyxtrain.world.world import World

PLACEMENT = Placement(torch.device("cpu"), torch.float32, lambda targets, dtype: targets.to(dtype))


class Noting(ArraySource):
    """Notes which rows are gathered."""

    def __init__(self, rows: int) -> None:
        super().__init__(torch.arange(float(rows))[:, None], torch.arange(rows))
        self.asked: list[list[int]] = []

    def gather(self, indices: Indices, *, pinned: bool = False):
        self.asked.append(indices.tolist())
        return super().gather(indices, pinned=pinned)


def shares(source: Noting, rank: int, world_size: int, rows_at_once: int, first: int = 0) -> Iterator[Share]:
    accumulation_steps = -(-6 // (world_size * rows_at_once))
    config = DistributedTrainingConfig(batch_size=1, effective_batch_size=6, accumulation_steps=accumulation_steps)
    return source.feed(config, World(rank, world_size)).shares(Place(0, first, 0), PLACEMENT, None)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("rows_at_once", [1, 2, 6])
@pytest.mark.parametrize("first", [0, 2])
def test_on_a_cpu_rows_are_gathered_when_they_are_needed(world_size, rows_at_once, first):
    for rank in range(world_size):
        source, seen = Noting(25), []
        for share in shares(source, rank, world_size, rows_at_once, first):
            for batch in share:
                seen.append(batch.inputs[:, 0].tolist())
                share.prefetch_next(contextlib.nullcontext())
                assert source.asked == seen
        assert len(seen) > 1


def test_a_share_may_be_gone_through_again():
    for share in shares(Noting(25), 0, 2, 2):
        once, again = ([batch.targets.tolist() for batch in share] for _ in range(2))
        assert once == again
        assert sum(map(len, once)) == share.rows


def test_an_item_that_cannot_be_made_is_an_error_in_its_turn():
    asked, given = [], []

    def items() -> Iterator[int]:
        for number in range(3):
            asked.append(number)
            yield number
        raise ValueError("no more")

    def take_all() -> None:
        for item in prefetch_one(items()):
            given.append((item, len(asked)))

    with pytest.raises(ValueError, match="no more"):
        take_all()
    assert given == [(0, 2), (1, 3), (2, 3)]


FEW = [
    "NumPy arrays",
    "images on the device",
    "inputs on the device, targets not",
    "loader that pins",
    "IterableDataset",
]
FEW_RESUMED = ["arrays", "loader, passes", "function, passes"]


@pytest.mark.parametrize(("world_size", "names"), [(1, FEW), by_night(2, list(SOURCES))], ids=["few", "all, 2 ranks"])
def test_all_kinds_of_data_reach_an_accelerator_without_stopping_the_host(fakegpu_folder, world_size, names):
    assert run_on_stand_in(fakegpu_folder, world_size, compare, names, seconds=150.0) == [[]] * world_size


@pytest.mark.nightly
@pytest.mark.parametrize(("world_size", "names"), [(1, FEW_RESUMED), (2, list(RESUMED))], ids=["few", "2 ranks"])
def test_a_fit_on_an_accelerator_resumes_after_any_step(fakegpu_folder, world_size, names, tmp_path):
    for found in run_on_stand_in(fakegpu_folder, world_size, resume_each, str(tmp_path), names, seconds=150.0):
        assert {name: len(set(bits)) for name, bits in found.items()} == dict.fromkeys(names, 1)
        assert all(len(bits) > 2 for bits in found.values())


@pytest.fixture(scope="module")
def looked(fakegpu_folder):
    [found] = run_on_stand_in(fakegpu_folder, 1, look)
    return found


def test_an_accelerator_is_busy_while_the_next_rows_are_fetched(looked):
    (on_cpu, _, _), (on_gpu, _, _) = looked["whole"]
    steps = on_cpu.count("update")
    assert on_cpu == ["fetch", "forward", "backward", "update", "end"] * steps
    expected = ["fetch", *["forward", "backward", "fetch", "update", "end"] * (steps - 1)]
    assert on_gpu == [*expected, "forward", "backward", "update", "end"]
    # The data set is asked for the same rows in the same order, and fails after the same steps with the same words.
    assert looked["whole"][0][1:] == looked["whole"][1][1:]
    assert looked["broken"][0][0].count("end") == looked["broken"][1][0].count("end") == WRONG // 8
    assert looked["broken"][0][1:] == looked["broken"][1][1:]
    assert f"This happened while loading sample {WRONG} of the dataset." in looked["broken"][1][2]
    # A fit that stops early trains the same steps, and takes no more of what is given once.
    assert looked["stopped"][0][0].count("end") == looked["stopped"][1][0].count("end") < steps
    assert looked["left"][0] == looked["left"][1] > 0


def test_the_side_stream_copies_what_is_on_the_host_alone_and_hands_its_memory_over(looked):
    assert looked["copies"] == {
        "host": [2, True, 2],
        "device": [0, False, 0],
        "both": [1, True, 1],
        "pinned": [2, True, 2],
    }
