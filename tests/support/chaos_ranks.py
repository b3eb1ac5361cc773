"""What the ranks of test_chaos.py do, as threads behind a proxy or as processes; no pytest here."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import faults
import torch
import torch.distributed as dist
from chaos import ChaosStore, Proxy
from chaos_records import Happened, Traffic
from faults import Faults
from torch import Tensor
from worlds import join_threads

import cyxtrain as cx
from cyxtrain.config import RingOptions
from cyxtrain.ring import RingProcessGroup

Program = Callable[[RingProcessGroup, int], Any]
AT_ONCE = 6
"""Worlds that run at a time: most of them wait."""


@dataclasses.dataclass
class World:
    """What became of a world behind a proxy.

    Attributes:
        results: By rank: what the program returned, or the error that it met.
        seconds: By rank: from the first fault to the rank's error; None where either did not come.
        happened: The faults that did.
        traffic: What went over each direction of each link.
    """

    results: list[Any]
    seconds: list[float | None]
    happened: list[Happened]
    traffic: list[Traffic]

    @property
    def errors(self) -> list[BaseException | None]:
        return [result if isinstance(result, BaseException) else None for result in self.results]


def run_world(
    world_size: int,
    program: Program,
    plan: Faults = (),
    *,
    scale: int = 1,
    options: RingOptions | None = None,
    join_seconds: float = 20.0,
    seconds: float = 60.0,
) -> World:
    """Runs `program(group, scale)` as every rank, each in a thread, with a proxy between them.

    No rank leaves before all have come to an end: what one does at its end is no part of the claim.
    """
    results: list[Any] = [None] * world_size
    ended: list[float] = [0.0] * world_size
    all_done = threading.Barrier(world_size)

    def run(rank: int) -> None:
        group: RingProcessGroup | None = None
        try:
            group = RingProcessGroup(
                store,
                rank,
                world_size,
                timedelta(seconds=20),
                join_timeout=timedelta(seconds=join_seconds),
                options=over_tcp,
            )
            results[rank] = program(group, scale)
        except Exception as error:
            results[rank] = error
        ended[rank] = time.monotonic()
        all_done.wait(seconds)
        if group is not None:
            _last_words(group, rank, results, ended)
            group.shutdown()

    over_tcp = dataclasses.replace(options or RingOptions(secret="known"), transport="tcp")
    with Proxy(world_size, plan) as proxy:
        store = proxy.store(dist.HashStore())
        join_threads(
            [threading.Thread(target=run, args=(rank,), name=f"rank {rank}") for rank in range(world_size)], seconds
        )
    begun = proxy.happened[0].at if proxy.happened else None
    failed = [isinstance(result, Exception) for result in results]
    late = [end - begun if begun and bad else None for end, bad in zip(ended, failed, strict=True)]
    return World(results, late, proxy.happened, proxy.traffic())


def _last_words(group: RingProcessGroup, rank: int, results: list[Any], ended: list[float]) -> None:
    """A rank that was through already hears of an error that another met after it."""
    others = [result for result in results if isinstance(result, Exception)]
    if isinstance(results[rank], Exception) or not others:
        return
    try:
        group.barrier()
    except Exception as error:
        results[rank], ended[rank] = error, time.monotonic()


def run_worlds(plans: Sequence[Faults], run: Callable[[Faults], World], at_once: int = AT_ONCE) -> list[World]:
    """Runs a world for each plan, several at a time."""
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(run, plans))


# --- programs -------------------------------------------------------------------------------------------------------


def everything(group: RingProcessGroup, scale: int) -> str:
    """Does every kind of collective and messages both ways round; returns a hash of all results."""
    rank, size = group.rank(), group.size()
    generator = torch.Generator().manual_seed(rank)
    digest = hashlib.sha256()

    def random(count: int) -> Tensor:
        return torch.randn(count, generator=generator)

    def note(*tensors: Tensor) -> None:
        for tensor in tensors:
            digest.update(tensor.numpy().tobytes())

    for count in (0, 1, 7 * scale, 50 * scale):
        tensor = random(count)
        group.allreduce([tensor])
        note(tensor)
    for src in range(size):
        tensor, options = random(30 * scale), dist.BroadcastOptions()
        options.rootRank = src
        group.broadcast([tensor], options)
        note(tensor)
    gathered, part = torch.empty(size * 10 * scale), torch.empty(10 * scale)
    group.all_gather_single(gathered, random(10 * scale))
    group.reduce_scatter_single(part, random(size * 10 * scale))
    note(gathered, part)
    received = [torch.empty(20 * scale) for _ in range(size)]
    others = [other for other in range(size) if other != rank]
    works = [group.recv([received[other]], other, 5) for other in others]
    works += [group.send([random(20 * scale)], other, 5) for other in others]
    group.barrier()
    for work in works:
        work.wait()
    note(*(received[other] for other in others))
    group.barrier()
    return digest.hexdigest()


# --- processes ------------------------------------------------------------------------------------------------------


def sums_under(plan: Faults, rounds: int) -> tuple[str, float]:
    """Joins the world, with this rank's faults; returns a hash of its sums, and the longest time that one took."""
    os.environ["CYXTRAIN_SECRET"] = "known"
    faults.install(plan, int(os.environ["RANK"]))
    with cx.init():
        digest, longest = hashlib.sha256(), 0.0
        for number in range(rounds):
            tensor = torch.full((1000,), float(number + cx.get_rank()))
            begin = time.monotonic()
            cx.all_reduce(tensor)
            longest = max(longest, time.monotonic() - begin)
            digest.update(tensor.numpy().tobytes())
        return digest.hexdigest(), longest


def everything_behind(ports: list[int], store_port: int, options: RingOptions) -> str:
    """Does `everything` in its own process, behind a proxy of another process that stands at these ports."""
    store = dist.TCPStore("127.0.0.1", store_port, is_master=False, wait_for_workers=False)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    options = dataclasses.replace(options, transport="tcp")
    group = RingProcessGroup(ChaosStore(store, ports), rank, size, timedelta(seconds=20), options=options)
    try:
        return everything(group, 1)
    finally:
        group.shutdown()
