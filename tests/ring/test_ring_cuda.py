"""CUDA tensors over the ring: they travel by way of pinned memory, and give what CPU tensors give."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import nn
from worlds import run_processes

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here")
RING = {"DISTRIBUTED_BACKEND": "cpu"}


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
        work.wait()
    return results


def streams_in_order() -> bool:
    """Asks for all_reduces in the middle of what streams compute: each sees what came before, and nothing after."""
    import cyxtrain as cx

    with cx.init():
        n, right = cx.get_world_size(), True
        side = torch.cuda.Stream()
        for stream in (torch.cuda.current_stream(), side) * 20:
            with torch.cuda.stream(stream):
                tensor = torch.ones(1_000_000, device="cuda")
                for _ in range(50):
                    tensor.mul_(1.0)
                tensor.mul_(3.0)
                work = dist.all_reduce(tensor, async_op=True)
                busy = torch.ones(1_000_000, device="cuda").cumsum(0)
                work.wait()
                right &= bool((tensor == 3.0 * n).all()) and float(busy[-1]) > 0
        return right


def train(device: str) -> list[float]:
    """Trains a small model for some steps; returns its parameters."""
    import cyxtrain as cx

    with cx.init():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 50), nn.Tanh(), nn.Linear(50, 3)).to(device)
        ddp = cx.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        generator = torch.Generator().manual_seed(cx.get_rank())
        for _ in range(5):
            rows = torch.randn(8, 20, generator=generator).to(device)
            ddp(rows).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [float(value) for parameter in model.parameters() for value in parameter.flatten().tolist()]


@pytest.mark.parametrize("communication", ["inline", "thread"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_every_collective_gives_the_bits_of_cpu_tensors(world_size, communication):
    found = run_processes(world_size, every_collective, env=RING | {"CYXTRAIN_COMMUNICATION": communication})
    assert [result.value for result in found] == [[]] * world_size


@pytest.mark.parametrize("communication", ["inline", "thread"])
def test_a_collective_sees_what_its_stream_was_asked_for_before(communication):
    found = run_processes(2, streams_in_order, env=RING | {"CYXTRAIN_COMMUNICATION": communication})
    assert [result.value for result in found] == [True, True]


def test_training_on_cuda_over_the_ring_is_the_same_on_every_rank_and_close_to_cpus():
    on_cuda, on_cpu = (run_processes(2, train, device, env=RING) for device in ("cuda", "cpu"))
    assert on_cuda[0].value == on_cuda[1].value
    assert on_cuda[0].value == pytest.approx(on_cpu[0].value, abs=1e-5)
