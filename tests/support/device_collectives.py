"""Every collective on tensors of a device and of the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


def every_collective(device: str = "cuda", counts: Sequence[int] = (1, 1000, 100_003, 2_000_003)) -> list[str]:
    """Does each collective on tensors of a device and of the CPU; returns those that differ in any bit."""
    import cyxtrain as cx

    with cx.init():
        rank, n = cx.get_rank(), cx.get_world_size()
        generator = torch.Generator().manual_seed(rank)
        different = []
        for count in counts:
            mine = torch.randn(count * n, generator=generator)
            on = {place: _results(mine.to(place), rank, n) for place in ("cpu", device)}
            for name, expected in on["cpu"].items():
                found = on[device][name]
                if not (found.device.type == device and torch.equal(found.cpu(), expected)):
                    different.append(f"{name} {count}")
        return different


def _results(mine: torch.Tensor, rank: int, n: int) -> dict[str, torch.Tensor]:
    count = mine.numel() // n
    results = {"all_reduce": mine.clone(), "strided": mine.view(n, count).t().clone().t(), "broadcast": mine.clone()}
    dist.all_reduce(results["all_reduce"])
    dist.all_reduce(results["strided"], dist.ReduceOp.MAX)
    dist.broadcast(results["broadcast"], 1)
    results["all_gather"] = mine.new_empty(n * mine.numel())
    dist.all_gather_into_tensor(results["all_gather"], mine)
    results["reduce_scatter"] = mine.new_empty(count)
    dist.reduce_scatter_tensor(results["reduce_scatter"], mine)
    results["all_to_all"] = torch.empty_like(mine)
    dist.all_to_all_single(results["all_to_all"], mine)
    results["message"] = torch.zeros_like(mine)
    works = [dist.isend(mine, (rank + 1) % n), dist.irecv(results["message"], (rank - 1) % n)]
    for work in works:
        assert work is not None
        work.wait()
    return results
