"""SyncBatchNorm where ranks have different numbers of micro-batches: it works, or is refused before the first step.

PyTorch has it on accelerators alone. Most tests take a layer that computes the same on CPUs; one takes PyTorch's own on
the stand-in for a GPU.
"""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fitting import CLASSES, FEATURES, flat, make_rows, one_process, run_world, seeded
from refusals import refusal
from stand_in.running import run_on_stand_in
from torch import Tensor, nn

import cyxtrain as cx
from cyxtrain.data.sharding import BatchSharding, RowSharding
from cyxtrain.training.inputs import plan
from cyxtrain.training.model import placement

pytestmark = pytest.mark.usefixtures("rank_server")
RATE = 0.1


class SumOverRanks(torch.autograd.Function):
    """All-reduces in forward, and the gradient in backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        found = tensor.clone()
        dist.all_reduce(found)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        found = gradient.clone()
        dist.all_reduce(found)
        return found


class OnCPUs(nn.SyncBatchNorm):
    """What PyTorch's SyncBatchNorm computes, on CPUs."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return nn.functional.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias)
        rows = x.transpose(0, 1).flatten(1)
        own = torch.cat([rows.sum(1), rows.square().sum(1), rows.new_tensor([rows.shape[1]])])
        total, squares, count = SumOverRanks.apply(own).split([len(rows), len(rows), 1])
        mean, count = total / count, count.detach()
        variance = squares / count - mean.square()
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * count / (count - 1), self.momentum)
        shape = [-1, *[1] * (x.dim() - 2)]
        mean, scale = mean.view(shape), (self.weight / torch.sqrt(variance + self.eps)).view(shape)
        return (x - mean) * scale + self.bias.view(shape)


@contextlib.contextmanager
def allowed_on_cpus():
    with mock.patch.object(plan, "check_batch_norm"), mock.patch.object(placement, "check_batch_norm"):
        yield


class Whole(nn.Module):
    """Cannot compute on no rows."""

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(len(x), -1) / x.abs().amax()


def make_model(norm: str, images: bool = False) -> nn.Sequential:
    with seeded():
        if images:
            plain, head = nn.BatchNorm2d(4), [nn.Flatten(), nn.Linear(4 * 4, CLASSES)]
            layers = [nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 4, 1), plain, *head]
        else:
            layers = [nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, CLASSES)]
    if norm == "sync":
        layers = [OnCPUs(each.num_features) if "BatchNorm" in type(each).__name__ else each for each in layers]
    return nn.Sequential(*layers).double()


def fit(rows: int, norm: str = "sync", images: bool = False, fails: bool = False, **settings: Any) -> Any:
    model = make_model(norm, images)
    if fails:
        model.insert(0, Whole())
    x, y = make_rows(rows)
    with allowed_on_cpus():
        trainer = cx.DistributedTrainer(model, "cross_entropy", torch.optim.SGD(model.parameters(), RATE))
        history = trainer.fit(x.double(), y, epochs=2, shuffle=False, verbose=False, **settings)
    model.cpu()
    return flat([*model.parameters(), *model.buffers()]), history.train_losses


def fit_each(given: list[dict[str, Any]]) -> list[Any]:
    return [fit(**each) for each in given]


def refuse_each(given: list[dict[str, Any]]) -> list[str]:
    return [refusal(fit, **each) for each in given]


def two_updates(trainer: cx.DistributedTrainer, batch: Any) -> dict[str, Any]:
    """Updates "d" and then "g", each by a forward through batch norm."""
    (rows,) = batch
    made = trainer.model["g"](rows)
    of_d = trainer.optimize(trainer.model["d"](made.detach()).square().mean(), "d")
    return {"d_loss": of_d, "g_loss": trainer.optimize(nn.functional.mse_loss(trainer.model["d"](made), rows), "g")}


def fit_two(rows: int, norm: str = "sync") -> Any:
    model = nn.ModuleDict({name: make_model(norm) for name in ("g", "d")})
    for part in model.values():
        part[3] = nn.Linear(8, FEATURES).double()
        nn.init.eye_(part[3].weight)
        nn.init.zeros_(part[3].bias)
    optimizers = {name: torch.optim.SGD(part.parameters(), RATE) for name, part in model.items()}
    with allowed_on_cpus():
        trainer = cx.DistributedTrainer(model, optimizers=optimizers, train_step=two_updates)
        x = make_rows(rows)[0].double()
        history = trainer.fit(x, epochs=2, shuffle=False, effective_batch_size=8, verbose=False).history
    return flat([*model.parameters(), *model.buffers()]), [history[name] for name in ("loss", "d_loss", "g_loss")]


def fit_two_and_refuse() -> tuple[list[Any], str]:
    return [fit_two(rows) for rows in (24, 23)], refusal(fit_two, 18)


def test_two_optimizers_train_through_the_statistics_of_all_ranks():
    ranks = run_world(2, fit_two_and_refuse)
    with one_process():
        alone = [fit_two(rows, "plain") for rows in (24, 23)]
    for found, refused in ranks:
        for (parameters, losses), (expected, numbers) in zip(found, alone, strict=True):
            assert parameters == pytest.approx(expected, rel=1e-9, abs=1e-12)
            assert [*losses] == [pytest.approx(each, rel=1e-9) for each in numbers]
        assert "are 1, 0 micro-batches by rank (set drop_last=True, or another batch_size)" in refused
        assert "a train_step that calls optimize does not run without samples." in refused


def by_hand(rows: int, effective: int, at_once: int, ranks: int) -> Any:
    """Two epochs in one process; batch norm sees together what all ranks have at the same time."""
    model = make_model("plain")
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    x, y = make_rows(rows)
    for _ in range(2):
        sharding = RowSharding(rows, effective, at_once, ranks, drop_last=False)
        for step in range(sharding.steps):
            optimizer.zero_grad()
            shards = [sharding.shard(rank, step) for rank in range(ranks)]
            for number in range(max(len(shard.pieces) for shard in shards)):
                places = [place for shard in shards for piece in shard.pieces[number : number + 1] for place in piece]
                loss = nn.functional.cross_entropy(model(x[places].double()), y[places], reduction="sum")
                (loss / shards[0].global_rows).backward()
            optimizer.step()
    return flat([*model.parameters(), *model.buffers()])


def test_rank_without_rows_in_the_last_step_takes_part_and_all_train_as_one():
    given = [{"rows": 27, "effective_batch_size": 12}, {"rows": 25, "effective_batch_size": 12, "images": True}]
    ranks = run_world(2, fit_each, given)
    with one_process():
        alone = [fit(norm="plain", **each) for each in given]
    for found in ranks:
        for (parameters, losses), (expected, expected_losses) in zip(found, alone, strict=True):
            assert parameters == pytest.approx(expected, abs=1e-12)
            assert losses == pytest.approx(expected_losses, abs=1e-12)


def over_all_but_channels(x: Tensor) -> tuple[list[int], list[int]]:
    """The dimensions that are not channels, and the shape of a number per channel."""
    return [0, *range(2, x.dim())], [1, -1, *[1] * (x.dim() - 2)]


def stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    dims, _ = over_all_but_channels(x)
    return x.mean(dims), (x.var(dims, correction=0) + eps).rsqrt()


def gather_stats(x, means, invstds, running_mean, running_var, momentum, eps, counts):
    shares = (counts / counts.sum())[:, None]
    mean = (means * shares).sum(0)
    variance = ((invstds**-2 - eps + means.square()) * shares).sum(0) - mean.square()
    running_mean.lerp_(mean, momentum)
    running_var.lerp_(variance * counts.sum() / (counts.sum() - 1), momentum)
    return mean, (variance + eps).rsqrt()


def normalised(x, weight, bias, mean, invstd, eps):
    shape = over_all_but_channels(x)[1]
    return (x - mean.view(shape)) * (invstd * weight).view(shape) + bias.view(shape)


def backward_reduce(gradient, x, mean, invstd, weight, *_):
    dims, shape = over_all_but_channels(x)
    summed, by_x = gradient.sum(dims), (gradient * (x - mean.view(shape))).sum(dims)
    return summed, by_x, by_x * invstd, summed.clone()


def backward_elemt(gradient, x, mean, invstd, weight, summed, by_x, counts):
    shape, count = over_all_but_channels(x)[1], counts.sum()
    inner = gradient - (summed / count).view(shape)
    inner = inner - (x - mean.view(shape)) * (invstd.square() * by_x / count).view(shape)
    return inner * (invstd * weight).view(shape)


def fit_on_stand_in(given: list[dict[str, Any]]) -> list[Any]:
    """With PyTorch's SyncBatchNorm, whose kernels the stand-in does not have."""
    library = torch.library.Library("aten", "IMPL", "PrivateUse1")
    library.impl("batch_norm_stats", stats)
    library.impl("batch_norm_gather_stats_with_counts", gather_stats)
    library.impl("batch_norm_elemt", normalised)
    library.impl("batch_norm_backward_reduce", backward_reduce)
    library.impl("batch_norm_backward_elemt", backward_elemt)
    with cx.init():
        found = [fit(norm="plain", sync_batchnorm=True, **each) for each in given]
    return [(parameters.tolist(), losses) for parameters, losses in found]


@pytest.mark.nightly
def test_pytorchs_own_layer_trains_as_one_on_the_stand_in_for_a_gpu(fakegpu_folder):
    given = [{"rows": 27, "effective_batch_size": 12}]
    with one_process():
        alone = [fit(norm="plain", **each) for each in given]
    for found in run_on_stand_in(fakegpu_folder, 2, fit_on_stand_in, given):
        for (parameters, losses), (expected, expected_losses) in zip(found, alone, strict=True):
            assert parameters == pytest.approx(expected, abs=1e-9)
            assert losses == pytest.approx(expected_losses, abs=1e-9)


def test_ranks_with_fewer_micro_batches_take_part_in_all():
    given = [{"rows": 24, "effective_batch_size": 8, "accumulation_steps": 2}]
    for [(parameters, _)] in run_world(3, fit_each, given):
        assert parameters == pytest.approx(by_hand(24, 8, 2, 3), abs=1e-12)


def test_what_cannot_work_is_refused_on_all_ranks_with_counts_and_remedy():
    given = [
        {"rows": 27, "effective_batch_size": 12, "fails": True},
        {"rows": 25, "effective_batch_size": 12},
        {"rows": 27, "effective_batch_size": 12, "norm": "plain", "sync_batchnorm": True, "fails": True},
    ]
    for without_rows, single, converted in run_world(2, refuse_each, given):
        assert "has 3 samples" in without_rows
        assert "1, 0 micro-batches by rank" in without_rows
        assert "drop_last=True" in without_rows
        assert "has 1 sample" in single
        assert "all ranks together have a single sample" in single
        assert converted == without_rows


def test_steps_in_which_ranks_have_different_numbers_of_micro_batches_are_found():
    even = RowSharding(24, 12, 6, 2, drop_last=False)
    assert even.uneven_step() is None
    assert RowSharding(27, 12, 6, 2, drop_last=True).uneven_step() is None
    assert RowSharding(27, 12, 6, 2, drop_last=False).uneven_step() == (3, [1, 0], True)
    assert RowSharding(24, 8, 2, 3, drop_last=False).uneven_step() == (8, [2, 2, 1], False)
    ends = torch.tensor([4, 8, 12, 16, 17]).numpy()
    assert BatchSharding(ends, 2, 2, drop_last=True).uneven_step() is None
    assert BatchSharding(ends, 2, 2, drop_last=False).uneven_step() == (1, [1, 0], True)
    assert BatchSharding(ends, 2, 2, drop_last=False).single_row(together=True) == (0, True)
    assert BatchSharding(ends, 3, 3, drop_last=False).single_row(together=True) is None
