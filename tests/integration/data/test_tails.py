"""The last step of an epoch: nobody is dealt a single row where that can be, batch norm is looked after, drop_last."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from fitting import CLASSES, FEATURES, everywhere, fingerprint, flat, make_model, make_rows, seeded
from markers import by_night
from refusals import refuses
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

import cyxtrain as cx
from cyxtrain.data.sharding import RowSharding, micro_batches_of

pytestmark = pytest.mark.usefixtures("rank_server")


def deals(rows: int, effective: int, at_once: int, world_size: int, step: int) -> list[list[range]]:
    """The micro-batches of every rank in a step."""
    sharding = RowSharding(rows, effective, at_once, world_size, drop_last=False)
    return [sharding.shard(rank, step).pieces for rank in range(world_size)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("per_rank", [1, 2, 3, 8])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_every_row_of_a_tail_is_dealt_once_and_alone_only_where_it_must_be(world_size, per_rank, accumulation):
    effective = per_rank * accumulation * world_size
    for tail in range(1, effective + 1):
        dealt = deals(effective + tail, effective, per_rank, world_size, 1)
        seen = sorted(place for rank in dealt for piece in rank for place in piece)
        assert seen == list(range(effective, effective + tail))
        sizes = [len(piece) for rank in dealt for piece in rank]
        assert max(sizes) <= per_rank
        assert max(sum(map(len, rank)) for rank in dealt) <= per_rank * accumulation
        if per_rank > 2 or accumulation == 1:
            odd = per_rank == 2 and tail % 2 == 1  # an odd row cannot be dealt in twos
            assert (1 in sizes) == (tail == 1 or per_rank == 1 or odd)


def test_tails_with_two_rows_for_everybody_and_full_steps_are_dealt_as_ever():
    for world_size, rows in itertools.product((1, 2, 3, 4), range(2, 40)):
        for step in (0, 1):
            joined = range(step * 16, min(step * 16 + 16, rows))
            if len(joined) == 16 or len(joined) >= 2 * world_size:
                expected = [list(joined[rank::world_size]) for rank in range(world_size)]
                dealt = deals(rows, 16, -(-16 // world_size), world_size, step)
                assert [[place for piece in rank for place in piece] for rank in dealt] == expected


def test_the_last_micro_batch_takes_a_row_from_the_one_before():
    assert [len(piece) for piece in micro_batches_of(range(9), 4)] == [4, 3, 2]
    assert [len(piece) for piece in micro_batches_of(range(10), 4)] == [4, 4, 2]
    assert [len(piece) for piece in micro_batches_of(range(5), 2)] == [2, 2, 1]
    assert micro_batches_of(range(0), 4) == []


# --- batch norm -----------------------------------------------------------------------------------------------------


def normed(kind: str) -> tuple[nn.Module, torch.Size]:
    """A model with batch norm, and the shape of its rows."""
    with seeded():
        if kind.startswith("image"):
            size = int(kind.removeprefix("image"))
            layers = [nn.Conv2d(1, 4, 1), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * size * size, CLASSES)]
            return nn.Sequential(*layers), torch.Size([1, size, size])
        norm = {"group": nn.GroupNorm(2, 8), "batch": nn.BatchNorm1d(8)}[kind]
        model = nn.Sequential(nn.Linear(FEATURES, 8), norm, nn.Linear(8, CLASSES))
        return model, torch.Size([FEATURES])


def fit_normed(rows: int, kind: str, settings: dict[str, Any], loader: bool) -> str:
    model, shape = normed(kind)
    inputs, targets = torch.randn(rows, *shape, generator=torch.Generator().manual_seed(0)), torch.arange(rows) % 3
    before = fingerprint(model)
    data: tuple[Any, ...] = (inputs, targets)
    if loader:
        data = (DataLoader(Subset(TensorDataset(inputs, targets), range(rows)), 64 // cx.get_world_size()),)
    trainer = cx.DistributedTrainer(model, "cross_entropy", "sgd")
    try:
        trainer.fit(*data, **({} if loader else {"effective_batch_size": 64}), epochs=1, verbose=False, **settings)
    except cx.ConfigError as error:
        assert fingerprint(model) == before
        return str(error)
    return f"{trainer.step} steps"


SINGLE = "the last step of an epoch has 1 sample of 129 samples"
CASES = {
    (130, "batch", False): "3 steps",  # two ranks would have a row each
    (129, "batch", False): SINGLE,
    (129, "batch", True): SINGLE,
    (129, "group", False): "3 steps",
    (129, "image1", False): SINGLE,
    (129, "image7", False): "3 steps",
}


def fit_all_normed() -> list[str]:
    found = [fit_normed(rows, kind, {}, loader) for rows, kind, loader in CASES]
    return [*found, fit_normed(129, "batch", {"drop_last": True}, False)]


@pytest.mark.parametrize("world_size", [1, by_night(2)])
def test_a_single_row_for_batch_norm_is_refused_before_the_first_step_and_else_trained(world_size):
    for found in everywhere(world_size, fit_all_normed):
        for said, expected in zip(found, [*CASES.values(), "2 steps"], strict=True):
            assert expected in said
            assert ("Set drop_last=True" in said) == (expected == SINGLE)


class Streamed(IterableDataset[Any]):
    """Rows one after the other, whose number nobody knows."""

    def __iter__(self) -> Any:
        return iter(zip(*make_rows(9), strict=True))


IN_ONE = DataLoader(TensorDataset(*make_rows(9)), batch_sampler=[[0, 1, 2], [3], [4, 5]])


def fit_in_batches(*data: Any, **settings: Any) -> None:
    cx.DistributedTrainer(normed("batch")[0], "cross_entropy", "sgd").fit(*data, **settings)


test_tails_that_cannot_be_are_refused = refuses(
    (lambda: fit_in_batches(IN_ONE), "makes a batch of a single sample"),
    (lambda: fit_in_batches(DataLoader(Streamed(), 1)), "Give each of 1 rank at least two samples at once"),
    (
        lambda: fit_in_batches(*make_rows(6), effective_batch_size=3, accumulation_steps=2),
        "a step has 3 samples, so on 1 rank with micro-batches of up to 2 samples one is a single sample: .* Set a "
        "larger effective_batch_size; or",
    ),
    (
        lambda: fit_in_batches(*make_rows(6), batch_size=1, virtual_ranks=3),
        r"a step has 3 samples, so in 3 slices \(virtual_ranks\) with up to 1 sample at once one is a single sample: "
        ".* Set a larger batch_size, or fewer virtual_ranks; or",
    ),
    (
        lambda: fit_in_batches(*make_rows(5), batch_size=8, drop_last=True),
        "drop_last leaves nothing: 5 samples, and a step has 8",
    ),
    (lambda: fit_in_batches(lambda: iter([make_rows(5)]), drop_last=True), "the number of samples of X is unknown"),
)


# --- drop_last ------------------------------------------------------------------------------------------------------


def fit_dropping(rows: int, epochs: int) -> tuple[Any, int, list[float]]:
    model = make_model("float64")
    trainer = cx.DistributedTrainer(model, "cross_entropy", torch.optim.SGD(model.parameters(), 0.1))
    history = trainer.fit(*make_rows(rows), epochs=epochs, effective_batch_size=12, drop_last=True, verbose=False)
    return flat(model.parameters()), trainer.step, history.train_losses


def test_drop_last_leaves_out_what_does_not_fill_a_step_on_any_number_of_ranks():
    [(alone, steps, losses)] = everywhere(1, fit_dropping, 41, 2)
    assert steps == 6
    for found, step, measured in everywhere(2, fit_dropping, 41, 2):
        assert step == 6
        assert abs(found - alone).max() < 1e-12
        assert measured == pytest.approx(losses, rel=1e-12)
