"""One rank of `ring_vs_gloo.py`: measures collectives over one backend, and checks what they give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import launches
import torch
import torch.distributed as dist
from torch import Tensor

import cyxtrain  # noqa: F401 - registers the backend "ring"

_WARM_UP = 10
"""How many times as long as it counts the first row is measured before."""
# PyTorch 2.13 warns of the older names at each call.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Case(NamedTuple):
    """One operation on tensors of one size."""

    run: Callable[[], None]
    """What is measured; it may be repeated for ever."""
    is_right: Callable[[], bool]
    """Runs once on values that differ between ranks, and says whether the result is the expected one."""
    calls: int = 1
    """How many calls `run` makes."""


def all_reduce(size: int) -> Case:
    tensor = torch.zeros(max(size // 4, 1))

    def run() -> None:
        dist.all_reduce(tensor)

    def is_right() -> bool:
        tensor.copy_(values_of(dist.get_rank(), len(tensor)))
        run()
        right = torch.equal(tensor, sum_of_all(len(tensor)))
        tensor.zero_()  # sums of zeros stay what they are
        return right

    return Case(run, is_right)


def broadcast(size: int) -> Case:
    """Every rank is the source in turn: one that only ever sends would run ahead of the others."""
    tensor = torch.zeros(max(size // 4, 1))
    ranks = range(dist.get_world_size())

    def run() -> None:
        for rank in ranks:
            dist.broadcast(tensor, rank)

    def is_right() -> bool:
        right = True
        for rank in ranks:
            tensor.copy_(values_of(dist.get_rank(), len(tensor)))
            dist.broadcast(tensor, rank)
            right &= torch.equal(tensor, values_of(rank, len(tensor)))
        return right

    return Case(run, is_right, len(ranks))


def all_gather(size: int) -> Case:
    world_size = dist.get_world_size()
    own = values_of(dist.get_rank(), max(size // 4 // world_size, 1))
    gathered = torch.zeros(world_size * len(own))

    def run() -> None:
        _all_gather(gathered, own)

    def is_right() -> bool:
        gathered.zero_()
        run()
        return all(
            torch.equal(row, values_of(rank, len(own))) for rank, row in enumerate(gathered.view(world_size, -1))
        )

    return Case(run, is_right)


def reduce_scatter(size: int) -> Case:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    own = torch.zeros(max(size // 4 // world_size, 1))
    full = values_of(rank, len(own) * world_size)

    def run() -> None:
        _reduce_scatter(own, full)

    def is_right() -> bool:
        own.zero_()
        run()
        return torch.equal(own, sum_of_all(len(full)).view(world_size, -1)[rank])

    return Case(run, is_right)


def barrier(size: int) -> Case:
    """There is no result to check."""
    return Case(dist.barrier, lambda: True)


CASES: dict[str, Callable[[int], Case]] = {
    "all_reduce": all_reduce,
    "broadcast": broadcast,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "barrier": barrier,
}


_longest = [torch.zeros(0)]
"""The pattern that was needed so far: it takes long to make."""


def values_of(rank: int, count: int) -> Tensor:
    """Returns what a rank begins with: small whole numbers, so that float32 sums are exact in any order."""
    return _pattern(count).add_(1000 * (rank + 1))


def sum_of_all(count: int) -> Tensor:
    """Returns the sum of what all ranks begin with."""
    world_size = dist.get_world_size()
    return _pattern(count).mul_(world_size).add_(1000 * (world_size * (world_size + 1) // 2))


def _pattern(count: int) -> Tensor:
    if count > len(_longest[0]):
        _longest[0] = torch.arange(count, dtype=torch.int32).bitwise_and_(255).to(torch.float32)
    return _longest[0][:count].clone()


def agree(count: int) -> int:
    """Returns what rank 0 gave."""
    tensor = torch.tensor([count])
    dist.broadcast(tensor, 0)
    return int(tensor.item())


def measure(operation: str, size: int, seconds: float) -> dict[str, Any]:
    """Returns the row of one operation and size; "error" instead of figures where the backend has no such thing."""
    row: dict[str, Any] = {"operation": operation, "bytes": size}
    case = CASES[operation](size)
    try:
        right = case.is_right()
    except (RuntimeError, NotImplementedError) as error:
        if "support" not in str(error) and "implement" not in str(error):
            raise
        return row | {"error": str(error).splitlines()[0], "seconds": 0.0}
    if not right:
        raise AssertionError(f"rank {dist.get_rank()}: wrong result of {operation} of {size} bytes")
    figures = launches.repeat(case.run, seconds, agree)
    for name in ("seconds", "lower_quartile_seconds"):
        figures[name] /= case.calls
    return row | figures


def main() -> None:
    task = launches.given()
    torch.set_num_threads(1)
    dist.init_process_group(task["backend"])
    try:
        # Processes that have just started change cores for up to a second: three on one of two, say.
        measure(*task["rows"][0], _WARM_UP * task["seconds"])
        rows = [measure(operation, size, task["seconds"]) for operation, size in task["rows"]]
    finally:
        dist.destroy_process_group()
    launches.report(rows)


if __name__ == "__main__":
    main()
