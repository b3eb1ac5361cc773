"""What ranks do in test_survival.py and test_survival_nightly.py, each in its own process; no pytest here."""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import faults
import torch
import torch.distributed as dist
from fitting import fingerprint, make_rows, seeded
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter
from worlds import wait_until

import cyxtrain as cx
from cyxtrain.ring import RingProcessGroup
from cyxtrain.ring.rendezvous import handshake, mesh
from cyxtrain.ring.schedules.kernels import Reduction
from cyxtrain.ring.wire.frames import Kind
from cyxtrain.ring.wire.link import Deadline, Poller

MIB = 2**20
Facts = dict[str, Any]


def note(folder: str, name: str, text: object = "") -> None:
    """Leaves a file that is complete when it appears."""
    part = Path(folder) / f"{name}.part{os.getpid()}"
    part.write_text(str(text))
    part.rename(Path(folder) / name)


def noted(folder: str, name: str) -> bool:
    return (Path(folder) / name).exists()


def wait_for(folder: str, *names: str) -> None:
    wait_until(lambda: all(noted(folder, name) for name in names), 30.0)


def wait_for_all(folder: str, name: str) -> None:
    wait_for(folder, *(f"{name}{rank}" for rank in range(cx.get_world_size())))


def learnt(error: cx.CyxtrainError) -> Facts:
    """How this rank learnt of the end, and when, on a clock that all processes of a machine share."""
    return {"at": time.monotonic()} | error.to_facts()


def failed() -> bool:
    """Whether the world has failed, as this rank knows it by now, without a call."""
    group = dist.group.WORLD
    assert isinstance(group, RingProcessGroup)
    return group.group.failure.error is not None


def small_model() -> nn.Module:
    with seeded():
        return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))


# --- what a rank is in when another is killed: each goes on until the world ends ------------------------------------


def reduce_large(begin: Callable[[], None]) -> None:
    tensor = torch.ones(4 * MIB + 3)
    begin()
    while True:
        cx.all_reduce(tensor, dist.ReduceOp.MAX)


def sum_large(begin: Callable[[], None]) -> None:
    """From the second on, over Unix sockets, sums go through shared memory in windows."""
    tensor, world = torch.ones(4 * MIB + 3), dist.group.WORLD
    cx.all_reduce(tensor, dist.ReduceOp.AVG)
    assert isinstance(world, RingProcessGroup)
    staged = world.group.engine.staged.find(Kind.ALL_REDUCE, tensor, Reduction.AVG)
    assert (staged is not None) == (world.transport == "unix") == (os.environ["CYXTRAIN_TRANSPORT"] != "tcp")
    begin()
    while True:
        cx.all_reduce(tensor, dist.ReduceOp.AVG)


def meet(begin: Callable[[], None]) -> None:
    begin()
    while True:
        cx.barrier()


def go_backward(begin: Callable[[], None]) -> None:
    """Gradients in many buckets, which leave while the backward goes on."""
    model = cx.DistributedDataParallel(small_model(), bucket_size_mb=0.002)
    inputs = torch.ones(16, 4)
    begin()
    while True:
        model(inputs).square().mean().backward()


def fit(begin: Callable[[], None]) -> None:
    trainer = cx.DistributedTrainer(small_model(), nn.CrossEntropyLoss(), ddp_config=cx.DDPConfig(bucket_size_mb=0.01))
    begin()
    trainer.fit(*make_rows(1000), epochs=10_000, batch_size=8, verbose=False)


def do_nothing(begin: Callable[[], None]) -> None:
    """The others compute, and hear of the end at their next call."""
    begin()
    wait_until(failed, 30.0)
    cx.barrier()


def reduce_in_parts(begin: Callable[[], None]) -> None:
    """Every rank is in a group of two neighbours or more besides the world, and works in both by turns."""
    size = cx.get_world_size()
    parts = [list(range(first, size if size - first < 4 else first + 2)) for first in range(0, max(size - 1, 1), 2)]
    groups = [dist.new_group(part) for part in parts]
    mine = next(group for group, part in zip(groups, parts, strict=True) if cx.get_rank() in part)
    tensor = torch.ones(10_000)
    begin()
    while True:
        cx.all_reduce(tensor, dist.ReduceOp.MAX, group=mine)
        cx.all_reduce(tensor, dist.ReduceOp.MAX)


def make_groups(begin: Callable[[], None]) -> None:
    begin()
    while True:
        group = dist.new_group()
        cx.barrier(group)
        dist.destroy_process_group(group)


def pass_on(begin: Callable[[], None]) -> None:
    """A message to each neighbour and from each, of which some are on their way at any time."""
    rank, size = cx.get_rank(), cx.get_world_size()
    begin()
    while True:
        works = []
        for other in {(rank + 1) % size, (rank - 1) % size}:
            works += [dist.isend(torch.ones(MIB), other), dist.irecv(torch.empty(MIB), other)]
        for work in works:
            assert work is not None
            work.wait()
        cx.barrier()


def live_until_the_end(folder: str, activity: str, plan: faults.Faults) -> Facts:
    """Joins, goes on until the world ends, and returns how this rank learnt of it."""
    faults.suffer = functools.partial(suffer_and_note, folder, faults.suffer)
    try:
        cx.init()
        cx.barrier()
        globals()[activity](functools.partial(begin, folder, plan))
    except cx.CyxtrainError as error:
        return learnt(error)
    raise AssertionError("the world goes on")


def begin(folder: str, plan: faults.Faults) -> None:
    """From here on it may happen."""
    faults.install(plan, cx.get_rank())
    note(folder, f"busy{cx.get_rank()}")


def suffer_and_note(folder: str, suffer: Callable[[Any], None], what: Any) -> None:
    note(folder, "at", time.monotonic())
    suffer(what)


def join_and_be_killed(folder: str, victim: int, step: int) -> Facts:
    """One rank is killed at a step of its handshakes: after the roll call, before its last connection is made."""
    gather = mesh._Connector.connect_all

    def connect_and_be_killed(connector: Any) -> None:
        steps = itertools.count()
        for owner, names in (
            (handshake.HandshakeClient, ("hello", "prove", "conclude")),
            (handshake.HandshakeServer, ("answer", "check", "verdict")),
        ):
            for name in names:
                setattr(owner, name, _dying(folder, getattr(owner, name), steps, step))
        gather(connector)

    if int(os.environ["RANK"]) == victim:
        mock.patch.object(mesh._Connector, "connect_all", connect_and_be_killed).start()
    try:
        cx.init()
        cx.barrier()
    except cx.CyxtrainError as error:
        return learnt(error)
    raise AssertionError("the world goes on")


def _dying(folder: str, inner: Callable[..., Any], steps: Iterator[int], step: int) -> Callable[..., Any]:
    def outer(*args: Any, **kwargs: Any) -> Any:
        if next(steps) == step:
            note(folder, "at", time.monotonic())
            os.kill(os.getpid(), signal.SIGKILL)
        return inner(*args, **kwargs)

    return outer


def lose_the_last_rank_beside_a_group(folder: str, makes: bool) -> Facts:
    """The last of three ranks is killed: the others are about to make a group with it, or one waits in one without it.

    Args:
        folder: For notes.
        makes: Which of the two.
    """
    try:
        cx.init()
        rank, world = cx.get_rank(), dist.group.WORLD
        pair = None if makes else dist.new_group([0, 1])
        cx.barrier()
        if rank == 2:
            note(folder, "at", time.monotonic())
            os.kill(os.getpid(), signal.SIGKILL)
        if makes:
            dist.new_group()
        # Rank 1 learns of it from the world, and ends; rank 0 waits for rank 1 in the pair.
        cx.all_reduce(torch.ones(10), group=pair if rank == 0 else world)
    except cx.CyxtrainError as error:
        return learnt(error)
    raise AssertionError("the world goes on")


def feed_from_a_worker(folder: str) -> Facts:
    """Each rank has a DataLoader's worker; the survivors find that of the killed rank alive when they learn."""
    rank = int(os.environ["RANK"])
    cx.init()
    data = TensorDataset(torch.arange(64.0))
    # By itself a rank of these tests would have its workers made by the server that it was made by.
    loader = DataLoader(data, 4, num_workers=1, persistent_workers=True, multiprocessing_context="fork")
    batches = iter(loader)
    next(batches)
    assert isinstance(batches, _MultiProcessingDataLoaderIter)
    note(folder, f"worker{rank}", batches._workers[0].pid)
    try:
        wait_for_all(folder, "worker")
        cx.barrier()
        note(folder, f"busy{rank}")
        while True:
            for (batch,) in loader:
                cx.all_reduce(batch)
    except cx.PeerLostError as error:
        facts = learnt(error)
        os.kill(int((Path(folder) / f"worker{error.rank}").read_text()), 0)  # raises where it has ended too
        note(folder, f"learnt{rank}")
        return facts


# --- stops ----------------------------------------------------------------------------------------------------------


def reduce_under(plan: faults.Faults, turns: int) -> tuple[str, int]:
    """Reduces other numbers in every turn; returns a hash of all results, and how many of the faults happened here."""
    rank = int(os.environ["RANK"])
    digest, generator = hashlib.sha256(), torch.Generator().manual_seed(rank)
    with cx.init():
        suffered = install(plan, rank)
        for turn in range(turns):
            tensor = torch.randn(100_003 * (1 + turn % 4), generator=generator)
            cx.all_reduce(tensor)
            digest.update(tensor.numpy().tobytes())
    return digest.hexdigest(), len(suffered)


def fit_under(plan: faults.Faults) -> tuple[tuple[str, list[float]], int]:
    """Fits; returns a hash of all parameters with the losses, and how many of the faults happened here."""
    with cx.init():
        suffered = install(plan, int(os.environ["RANK"]))
        trainer = cx.DistributedTrainer(small_model(), nn.CrossEntropyLoss())
        history = trainer.fit(*make_rows(300), epochs=3, batch_size=8, verbose=False)
        return (fingerprint(trainer.model), history.train_losses), len(suffered)


def install(plan: faults.Faults, rank: int) -> list[Any]:
    """Makes faults happen; returns a list of those that have."""
    suffered: list[Any] = []
    suffer = faults.suffer

    def suffer_and_count(what: Any) -> None:
        suffer(what)
        suffered.append(what)

    faults.suffer = suffer_and_count
    faults.install(plan, rank)
    return suffered


def reduce_until_told(folder: str) -> tuple[int, list[str]]:
    """Reduces the same numbers until rank 0 is told to stop; returns how often, and every result that there was."""
    with cx.init():
        rank = cx.get_rank()
        mine = torch.randn(300_007, generator=torch.Generator().manual_seed(rank))
        results, turns, going = set(), 0, torch.ones(1)
        note(folder, f"busy{rank}")
        while going:
            tensor = mine.clone()
            cx.all_reduce(tensor)
            results.add(hashlib.sha256(tensor.numpy().tobytes()).hexdigest())
            turns += 1
            going.fill_(not noted(folder, "enough"))
            cx.broadcast(going)
    return turns, sorted(results)


def wait_beside_a_stopped_rank(folder: str, victim: int, idle: bool) -> Facts:
    """All learn of a rank that is stopped and stays so: those who wait for it, those who do not, and it itself."""
    cx.init()
    cx.barrier()
    rank = cx.get_rank()
    note(folder, f"busy{rank}")
    try:
        if rank == victim:
            wait_for(folder, "resumed")  # here it is stopped
        elif idle:
            wait_until(failed, 30.0)
        cx.all_reduce(torch.ones(10))
    except cx.CyxtrainError as error:
        note(folder, f"learnt{rank}")
        return learnt(error)
    raise AssertionError("the world goes on")


def wait_through_an_own_stop(folder: str, deadline_seconds: float) -> float:
    """Rank 0 comes late; rank 1 waits for it with a short deadline. Returns how long it took."""
    with cx.init(cx.DistributedConfig(collective_timeout_ms=round(1000 * deadline_seconds))):
        cx.barrier()
        rank, began = cx.get_rank(), time.monotonic()
        note(folder, f"busy{rank}")
        if rank == 0:
            wait_for(folder, "late")
        cx.barrier()
        return time.monotonic() - began


def wait_alone(folder: str, deadline_seconds: float) -> tuple[float, float]:
    """Waits for nothing until a deadline; returns when it began, and when the deadline had passed."""
    ours, theirs = socket.socketpair()
    poller = Poller()
    note(folder, f"busy{os.environ['RANK']}")
    began, deadline = time.monotonic(), Deadline(deadline_seconds)
    while not deadline.passed():
        assert not poller.wait([ours], [], deadline)
    ended = time.monotonic()
    ours.close()
    theirs.close()
    return began, ended
