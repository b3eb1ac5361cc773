"""What the ranks of test_ring_processes.py do, each in its own process; no pytest here."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_reduce as functional_all_reduce
from torch.nn.parallel import DistributedDataParallel
from unchanged import run_cases
from worlds import wait_until

import cyxtrain
from cyxtrain.config import DistributedConfig, RingOptions, complete_config
from cyxtrain.errors import CyxtrainError, RendezvousError
from cyxtrain.ring import RingProcessGroup
from cyxtrain.world.join import forget_store, open_world_store

FOLDER = Path(os.environ.get("TEST_FOLDER", "."))
MIB = 2**20
SIXTY_SECONDS = timedelta(seconds=60)


# --- cases ----------------------------------------------------------------------------------------------------------


def the_environment_alone_makes_a_world() -> None:
    assert dist.get_backend() == "ring"
    assert (dist.get_rank(), dist.get_world_size()) == (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))


def all_reduce_is_right_at_every_size() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for payload_bytes in (4, MIB, 17 * MIB, 256 * MIB):
        tensor = torch.full((payload_bytes // 4,), float(rank + 1))
        tensor[0] = -rank
        dist.all_reduce(tensor)
        assert tensor[0] == -sum(range(size)), payload_bytes
        assert bool((tensor[1:] == sum(range(1, size + 1))).all()), payload_bytes


def every_collective_on_objects_works() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = {"rank": rank, "text": "x" * 1000 * rank}
    everyone = [{"rank": other, "text": "x" * 1000 * other} for other in range(size)]
    outputs: list[Any] = [None] * size
    dist.all_gather_object(outputs, mine)
    assert outputs == everyone
    objects: list[Any] = [mine, rank]
    dist.broadcast_object_list(objects, src=size - 1)
    assert objects == [everyone[-1], size - 1]
    gathered: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object(mine, gathered)
    assert gathered == (everyone if rank == 0 else None)
    output: list[Any] = [None]
    dist.scatter_object_list(output, everyone if rank == 0 else None)
    assert output == [mine]
    if rank == 0:
        dist.send_object_list([mine, "more"], dst=1)
    elif rank == 1:
        output = [None, None]
        assert dist.recv_object_list(output, src=0) == 0
        assert output == [everyone[0], "more"]


def parts_of_the_world_are_groups_of_their_own() -> None:
    rank = dist.get_rank()
    pair: Any = dist.new_group([0, 2])  # Any: outside of a group PyTorch returns a number
    all_again: Any = dist.new_group([2, 1, 0])
    tensor = torch.tensor([float(rank)])
    if rank != 1:
        dist.all_reduce(tensor, group=pair)
        assert tensor == 2
        dist.broadcast(tensor.fill_(rank), src=2, group=pair)
        assert tensor == 2
        if rank == 0:
            dist.send(torch.tensor([7.0]), 2, group=pair)
        else:
            assert dist.recv(tensor, group=pair) == 0
            assert tensor == 7
    dist.all_reduce(tensor.fill_(rank), group=all_again)
    assert tensor == 3
    if rank != 1:
        error = end_of_world(lambda: dist.all_reduce(torch.zeros(1 + rank), group=pair))
        assert error is not None
        assert error["rank"] in (0, 2)
        assert "rank 0 is in all_reduce #3 (SUM, float32 [1])" in error["message"]
        assert "rank 2 is in all_reduce #3 (SUM, float32 [3])" in error["message"]
    dist.all_reduce(tensor.fill_(rank))  # the world has not failed
    assert tensor == 3


def a_world_can_be_left_and_made_again() -> None:
    """PyTorch's own store races where the next life of rank 0 opens it at the same port: each life has its own."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for port in os.environ["MORE_PORTS"].split():
        dist.destroy_process_group()
        dist.init_process_group(
            "ring", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size, timeout=SIXTY_SECONDS
        )
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [size] * 3
        dist.barrier()


# --- worlds that end badly ------------------------------------------------------------------------------------------


def end_of_world(call: Callable[[], object]) -> dict[str, Any] | None:
    """Return the error that ended this rank, and when, on a clock that all processes of a machine share."""
    try:
        call()
    except CyxtrainError as error:
        return {
            "at": time.monotonic(),
            "type": type(error).__name__,
            "message": str(error),
            "rank": error.rank,
            "during": error.during,
        }
    return None


def note(name: str) -> None:
    (FOLDER / name).touch()


def noted(name: str) -> bool:
    return (FOLDER / name).exists()


def wait_until_interrupted() -> dict[str, Any] | None:
    """Rank 1 waits in a collective until it gets a signal, rank 0 for a message."""
    dist.init_process_group("ring", timeout=SIXTY_SECONDS)
    dist.barrier()
    note(f"busy{dist.get_rank()}")
    if dist.get_rank() == 1:
        dist.barrier()
    return end_of_world(lambda: dist.recv(torch.ones(10), 1))


def join_as_a_rank_that_may_be_taken(names: list[str]) -> str | dict[str, str | None]:
    """Run the cases once another process has been refused; return the error if this one is."""
    try:
        dist.init_process_group("ring", timeout=SIXTY_SECONDS)
    except RendezvousError as error:
        note("refused")
        return str(error)
    wait_until(lambda: noted("refused"))
    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = os.environ["SECOND_PORT"]
    return run_cases("ring_ranks", names, os.environ["TEST_FOLDER"])


# --- a world that goes on without rank 0 ----------------------------------------------------------------------------


def power_sum(count: int) -> float:
    """Return the sum over the ranks of 2 to the power of RANK, which tells who took part."""
    tensor = torch.full((count,), 2.0 ** int(os.environ["RANK"]))
    dist.all_reduce(tensor)
    assert bool((tensor == tensor[0]).all())
    return float(tensor[0])


def descriptors_and_threads() -> list[int]:
    return [len(os.listdir("/proc/self/fd")), threading.active_count()]


def continue_without_rank_0() -> dict[str, Any]:
    """Rank 0 leaves, and the store with it; the others hear of it in their next collective, and continue as two."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.ones(1).sum()
    before = descriptors_and_threads()
    config = complete_config(DistributedConfig(timeout_ms=30_000))
    options = dataclasses.replace(RingOptions.from_environment(), keeps_listening=True)
    store = open_world_store(config, options.secret_bytes, 30.0)
    ring = RingProcessGroup(store, rank, size, SIXTY_SECONDS, options=options)
    dist.init_process_group("ring", store=store, rank=rank, world_size=size, pg_options=ring)
    found: dict[str, Any] = {"sum": power_sum(3)}
    if rank == 0:
        dist.destroy_process_group()
        forget_store()
        return found
    three = descriptors_and_threads()
    left = end_of_world(dist.barrier)
    assert left is not None
    forget_store()
    del store
    directory = ring.group.directory.without({left["rank"]})
    ring.replace_group(ring.group.next_generation(directory, SIXTY_SECONDS))
    world = cyxtrain.init()
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, rank)
    found |= {
        "left": left["message"],
        "rank": dist.get_rank(),
        "size": dist.get_world_size(),
        "world": [world.rank, world.size, list(world.members)],
        "sums": [power_sum(3), power_sum(MIB)],
        "gathered": gathered,
    }
    two = descriptors_and_threads()
    total: Any = functional_all_reduce(torch.tensor([float(rank)]), "sum", ring)
    model = nn.Linear(1, 1, bias=False)
    wrapped = DistributedDataParallel(model)
    wrapped(torch.full((1, 1), float(rank))).sum().backward()
    assert model.weight.grad is not None
    found |= {"functional": (total + 0).item(), "gradient": model.weight.grad.item()}
    mismatch = end_of_world(lambda: dist.all_reduce(torch.zeros(rank)))
    assert mismatch is not None
    found |= {"mismatch": mismatch["message"], "descriptors": two[0], "descriptors of three": three[0]}
    found |= {"threads": two[1], "threads of three": three[1]}
    ring.shutdown()
    dist.destroy_process_group()
    after = descriptors_and_threads()
    return found | {"left behind": [after[0] - before[0], after[1] - before[1]]}
