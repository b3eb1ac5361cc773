"""CUDA tensors over the ring: they travel by way of pinned memory, and give what CPU tensors give."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from device_collectives import every_collective
from torch import nn
from worlds import run_processes

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here")
RING = {"DISTRIBUTED_BACKEND": "cpu"}


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
