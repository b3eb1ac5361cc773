"""Claims about `all_gather_with_grad`: rows of all ranks in rank order, with gradients, in loops and in fit."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from fitting import everywhere, flat, make_model, make_rows, one_process, outcome, run_world, seeded
from markers import by_night
from torch import Tensor, nn
from torch.nn import functional

import cyxtrain as cx

pytestmark = pytest.mark.usefixtures("rank_server")
ROWS = {"even": [2, 2, 2], "uneven": [1, 3, 2], "one rank has none": [3, 0, 2], "one rank has all": [0, 4, 0]}


def rows_of(rank: int, counts: list[int]) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    everyone = torch.randn(sum(counts), 2, 3, generator=generator, dtype=torch.float64)
    return everyone.split(counts)[rank].transpose(1, 2)  # not contiguous


def gather_all() -> list[list[Any]]:
    """Gathers with gradients; each rank's loss is another function of all rows."""
    rank, found = cx.get_rank(), []
    for counts in ROWS.values():
        counts = counts[: cx.get_world_size()]
        own = rows_of(rank, counts).requires_grad_()
        gathered = cx.all_gather_with_grad(own)
        (gathered.square().sum() * (rank + 1)).backward()
        classes = cx.all_gather_with_grad(torch.arange(counts[rank]) + 10 * rank)
        found.append([gathered.detach().numpy(), own.grad.numpy(), classes.tolist(), classes.dtype is torch.int64])
    return found


@pytest.mark.parametrize("world_size", [1, 2, by_night(3)])
def test_rows_come_in_rank_order_and_gradients_are_summed_over_ranks(world_size):
    factor = sum(range(1, world_size + 1))
    for rank, found in enumerate(everywhere(world_size, gather_all)):
        for (gathered, gradient, classes, is_whole), counts in zip(found, ROWS.values(), strict=True):
            counts = counts[:world_size]
            everyone = torch.cat([rows_of(each, counts) for each in range(world_size)])
            np.testing.assert_array_equal(gathered, everyone)
            np.testing.assert_allclose(gradient, 2 * factor * rows_of(rank, counts), rtol=1e-15)
            assert classes == [10 * each + row for each in range(world_size) for row in range(counts[each])]
            assert is_whole


def gather_what_does_not_fit() -> str:
    with pytest.raises(cx.CollectiveMismatchError) as caught:
        cx.all_gather_with_grad(torch.zeros(2, 3 + cx.get_rank()))
    assert torch.equal(cx.all_gather_with_grad(torch.ones(1, 1)), torch.ones(2, 1)), "the world goes on"
    return str(caught.value)


def test_rows_of_other_shapes_are_refused_on_every_rank():
    for words in run_world(2, gather_what_does_not_fit):
        assert "shape [3] and dtype float32 on rank 0, and shape [4] and dtype float32 on rank 1" in words
    with one_process(), pytest.raises(cx.ConfigError, match=r"needs shape \(rows, ...\)"):
        cx.all_gather_with_grad(torch.tensor(1.0))


class Contrast(nn.Module):
    """Compares two views of each row with those of all rows of all ranks; the temperature comes after the gather."""

    def __init__(self) -> None:
        super().__init__()
        with seeded():
            self.body, self.temperature = make_model("float64"), nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.register_buffer("constant", torch.ones(2))  # ranks share buffers before a step's first forward

    def forward(self, inputs: Tensor) -> Tensor:
        views = [functional.normalize(self.body(inputs + shift), dim=1) for shift in (0.0, 0.3)]
        left, right = map(cx.all_gather_with_grad, views)
        return functional.cross_entropy(left @ right.T * self.temperature.exp(), torch.arange(len(left)))


class OfOwnRows(Contrast):
    """Each rank takes the mean over its own rows, compared with all."""

    def forward(self, inputs: Tensor) -> Tensor:
        left, right = (functional.normalize(self.body(inputs + shift), dim=1) for shift in (0.0, 0.3))
        keys = cx.all_gather_with_grad(right)
        numbers = cx.all_gather_with_grad(inputs[:, 0])
        own = (numbers == inputs[:, :1]).double().argmax(1)
        return functional.cross_entropy(left @ keys.T * self.temperature.exp(), own)


def supervised(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (sum, weight) over pairs of one class, of all ranks; each rank sums over its own rows."""
    rows, classes = cx.all_gather_with_grad(output), cx.all_gather_with_grad(target)
    alike = (target[:, None] == classes).double()
    return ((output @ rows.T - 1).square() * alike).sum() / 10, alike.sum()


MODELS = {"all rows": (Contrast, None), "own rows": (OfOwnRows, None), "a loss_fn": (make_model, supervised)}
FITS = [(21, 8, 1), (17, 8, 1), (22, 12, 2), (28, 24, 4), (29, 24, 4)]  # rows, effective batch, micro-batches
"""Tails of 5 rows, 1, 10, 4 and 5: ranks without rows, and on 3 ranks, of the last one, with fewer micro-batches."""
OTHER_PAIRS = [(3, 29, 4)]
"""Ranks, rows and micro-batches of a tail whose joined micro-batches have other rows than those of one rank."""


def fit_all() -> dict[str, Any]:
    found = {}
    for name, (make, loss_fn) in MODELS.items():
        for rows, effective, steps in FITS:
            inputs, targets = make_rows(rows)
            model = make("float64") if loss_fn else make()
            data = (inputs, targets) if loss_fn else (inputs,)
            config = cx.DDPConfig(find_unused_parameters=True, bucket_size_mb=0.0001)
            trainer = cx.DistributedTrainer(model, loss_fn, torch.optim.SGD(model.parameters(), 0.1), ddp_config=config)
            history = trainer.fit(
                *data, epochs=1, effective_batch_size=effective, accumulation_steps=steps, shuffle=False, verbose=False
            )
            evaluation = [*dict(trainer.evaluate(*data, batch_size=6)).values()]
            found[f"{name}, {rows} rows, {steps}"] = outcome(trainer, history) | {"evaluation": evaluation}
    return found


@functools.cache
def alone() -> dict[str, Any]:
    with one_process():
        return fit_all()


def test_one_rank_trains_on_the_loss_over_all_pairs():
    model, (inputs, _) = Contrast(), make_rows(21)
    with one_process():
        for first in [0, 8, 16]:
            model.zero_grad()
            model(inputs[first : first + 8].double()).backward()
            torch.optim.SGD(model.parameters(), 0.1).step()
    tensors = [*model.parameters(), *model.buffers()]
    np.testing.assert_allclose(alone()["all rows, 21 rows, 1"]["parameters"], flat(tensors), atol=1e-12)


@pytest.mark.parametrize("world_size", [2, by_night(3)])
def test_n_ranks_train_on_the_loss_over_all_pairs_also_if_some_have_no_rows(world_size):
    ranks = run_world(world_size, fit_all)
    others = {f"{name}, {rows} rows, {steps}" for name in MODELS for n, rows, steps in OTHER_PAIRS if n == world_size}
    for name, expected in alone().items():
        assert len({rank[name]["fingerprint"] for rank in ranks}) == 1
        if name in others:
            continue
        np.testing.assert_allclose(
            ranks[0][name]["parameters"], expected["parameters"], rtol=0, atol=1e-12, err_msg=name
        )
        assert ranks[0][name]["history"][0] == pytest.approx(expected["history"][0], rel=1e-12)
        assert ranks[0][name]["evaluation"] == pytest.approx(expected["evaluation"], rel=1e-12, nan_ok=True)


class Detached(Contrast):
    """Compares with rows that get no gradient: detached after the gather, as in SimSiam, or gathered without one."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.target = way, nn.Linear(4, 3).double()
        with torch.no_grad():
            self.target.weight.fill_(0.5)
            self.target.bias.fill_(0.1)

    def forward(self, inputs: Tensor) -> Tensor:
        left = cx.all_gather_with_grad(self.body(inputs))
        with torch.set_grad_enabled(self.way != "no_grad"):
            right = cx.all_gather_with_grad(self.target(inputs + 0.3))
        if self.way == "in place":
            right.detach_()
        third = cx.all_gather_with_grad(self.body(inputs - 0.3)).detach() if self.way == "three" else right
        return functional.cross_entropy(left @ (right.detach() + third.detach()).T, torch.arange(len(left)))


def fit_detached() -> dict[str, Any]:
    found = {}
    for way in ("detach", "in place", "no_grad", "three"):
        for rows, effective, steps in FITS:
            model = Detached(way)
            sgd = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.1)
            config = cx.DDPConfig(find_unused_parameters=True)
            trainer = cx.DistributedTrainer(model, None, sgd, ddp_config=config)
            settings = {"accumulation_steps": steps, "shuffle": False, "verbose": False}
            history = trainer.fit(make_rows(rows)[0], epochs=2, effective_batch_size=effective, **settings)
            found[f"{way}, {rows} rows, {steps}"] = outcome(trainer, history)
    return found


@pytest.mark.nightly
@pytest.mark.parametrize("world_size", [2, 3])
def test_rows_that_get_no_gradient_after_the_gather_train_as_on_one_rank_also_if_some_ranks_have_no_rows(world_size):
    with one_process():
        expected = fit_detached()
    ranks = run_world(world_size, fit_detached)
    for name, alone_ in expected.items():
        assert len({rank[name]["fingerprint"] for rank in ranks}) == 1
        if not (world_size == 3 and "29 rows, 4" in name):
            given = ranks[0][name]
            np.testing.assert_allclose(given["parameters"], alone_["parameters"], rtol=0, atol=1e-12, err_msg=name)
            assert given["history"][0] == pytest.approx(alone_["history"][0], rel=1e-12)
