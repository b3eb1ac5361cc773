"""Small models and data for the tests of DistributedDataParallel, the same on every rank, and what must come out."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

import cyxtrain as cx

Loss = Callable[[nn.Module, int], Tensor]
EXACT = {"rtol": 1e-12, "atol": 1e-12}  # of float64, where only the order of summation differs


def network(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Three layers; the same weights on every rank."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def batch(rank: int, rows: int = 5, dtype: torch.dtype = torch.float64) -> Tensor:
    """The inputs of a rank."""
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(100 + rank), dtype=dtype)


def loss_on(model: nn.Module, rank: int) -> Tensor:
    """The loss of a rank's batch."""
    loss: Tensor = model(batch(rank)).square().mean()
    return loss


def mean_gradients(model: nn.Module, loss: Loss = loss_on) -> dict[str, Tensor]:
    """What every rank must end with: each rank's gradients, computed here one after the other, and their mean."""
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters() if p.requires_grad}
    for rank in range(cx.get_world_size()):
        alone = copy.deepcopy(model)
        alone.zero_grad()
        loss(alone, rank).backward()
        for name, parameter in alone.named_parameters():
            if parameter.grad is not None:
                total[name] += parameter.grad
    return {name: gradient / cx.get_world_size() for name, gradient in total.items()}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_close(
    found: dict[str, Tensor], expected: dict[str, Tensor], *, rtol: float = EXACT["rtol"], atol: float = EXACT["atol"]
) -> None:
    assert list(found) == list(expected)
    for name in expected:
        msg = functools.partial("{}: {}".format, name)
        torch.testing.assert_close(found[name], expected[name], rtol=rtol, atol=atol, msg=msg)


def assert_same_on_all_ranks(tensors: dict[str, Tensor]) -> None:
    """To the last bit."""
    for name, tensor in tensors.items():
        everyone = [torch.empty_like(tensor) for _ in range(cx.get_world_size())]
        dist.all_gather(everyone, tensor.detach().contiguous())
        for rank, other in enumerate(everyone):
            assert torch.equal(other, everyone[0]), f"{name} is another one on rank {rank} than on rank 0"
