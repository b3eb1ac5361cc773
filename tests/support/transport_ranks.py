"""What the ranks of test_ring_transports.py do, each in its own process; no pytest here."""

from __future__ import annotations

import functools
import hashlib
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from ring_values import Op, bits, made
from torch import Tensor

import cyxtrain as cx
from cyxtrain.ring import RingProcessGroup

KIB, MIB = 2**10, 2**20
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int64": torch.int64, "complex64": torch.complex64}
Case = tuple[str, str, str, int]
"""Collective, dtype, reduction ("": none), and how many elements each rank brings or gets."""


def around(item_bytes: int, *limits: int) -> list[int]:
    """Counts of elements just below, at and above so many bytes."""
    return [limit // item_bytes + more for limit in limits for more in (-1, 0, 1)]


@functools.cache
def cases(world_size: int, full: bool = False) -> tuple[Case, ...]:
    """Every collective, at counts around every limit at which it takes another way; by day with fewer dtypes."""
    found: list[Case] = []
    by_day = ("float32", {2: "bfloat16", 3: "complex64"}.get(world_size, "int64"))
    reductions = {"float32": "SUM AVG MAX", "bfloat16": "SUM AVG", "int64": "SUM AVG", "complex64": "SUM"}
    for dtype, ops in reductions.items() if full else [(dtype, reductions[dtype]) for dtype in by_day]:
        item = DTYPES[dtype].itemsize
        counts = [1, 3, 1037, MIB // item, 1_000_003 // item]
        counts += around(item, 16 * KIB, 256 * KIB, 2 * MIB)
        found += [("all_reduce", dtype, op, count) for op in ops.split() for count in counts]
        for name in ("reduce", "reduce_scatter"):
            limits = (limit // world_size for limit in (16 * KIB, 256 * KIB, 2 * MIB))
            counts = [3, *around(item, *limits), MIB // item]
            found += [(name, dtype, ops.split()[0], count) for count in counts]
    for name, dtype in (("all_gather", "float32"), ("broadcast", "bfloat16"), ("gather", "int64")):
        found += [(name, dtype, "", count) for count in sides(dtype)]
    for name, dtype in (("scatter", "complex64"), ("all_to_all", "float32")):
        found += [(name, dtype, "", count) for count in sides(dtype)]
    most = 17 * MIB // 4 + 5
    return (*found, ("all_reduce", "float32", "SUM", most), ("broadcast", "float32", "", most))


def sides(dtype: str) -> list[int]:
    item = DTYPES[dtype].itemsize
    return [0, 1, 3, *around(item, 16 * KIB), 256 * KIB // item, MIB // item + 1, 2 * MIB // item + 1]


def brought(case: Case, rank: int, world_size: int) -> Tensor:
    """What a rank brings, the same whenever it is asked for."""
    name, dtype, _, count = case
    parts = world_size if name in ("reduce_scatter", "scatter", "all_to_all") else 1
    return _numbers(DTYPES[dtype], parts * count, rank)


@functools.cache
def _drawn(dtype: torch.dtype, rank: int) -> Tensor:
    return made(dtype, 300_007, rank)


def _numbers(dtype: torch.dtype, count: int, rank: int) -> Tensor:
    """Numbers that come again after a length that divides nothing: to draw them all would take long."""
    drawn = _drawn(dtype, rank)
    return drawn.repeat(-(-count // len(drawn)) or 1)[:count].clone()


def outcome(case: Case, rank: int, world_size: int) -> Tensor | None:
    """Calls it; returns what this rank gets, in one piece."""
    name, _, op, count = case
    mine, last = brought(case, rank, world_size), world_size - 1
    if name == "all_reduce":
        dist.all_reduce(mine, getattr(Op, op))
    elif name == "reduce":
        dist.reduce(mine, last, getattr(Op, op))
    elif name == "broadcast":
        dist.broadcast(mine, last)
    elif name == "reduce_scatter":
        part = torch.empty(count, dtype=mine.dtype)
        dist.reduce_scatter_tensor(part, mine, getattr(Op, op))
        return part
    elif name == "all_gather":
        whole = torch.empty(world_size * count, dtype=mine.dtype)
        dist.all_gather_into_tensor(whole, mine)
        return whole
    elif name == "gather":
        rows = [torch.empty_like(mine) for _ in range(world_size)] if rank == last else None
        dist.gather(mine, rows, dst=last)
        return None if rows is None else torch.cat(rows)
    elif name == "scatter":
        part = torch.empty(count, dtype=mine.dtype)
        rows = list(mine.split(count) if count else [mine] * world_size) if rank == last else None
        dist.scatter(part, rows, src=last)
        return part
    elif name == "all_to_all":
        whole = torch.empty_like(mine)
        dist.all_to_all_single(whole, mine)
        return whole
    return mine


def digest(tensor: Tensor | None) -> str:
    return "" if tensor is None else hashlib.blake2b(bits(tensor), digest_size=8).hexdigest()


def group() -> RingProcessGroup:
    world = dist.group.WORLD
    assert isinstance(world, RingProcessGroup)
    return world


def facts() -> dict[str, Any]:
    """How collectives travel, and what is left of the meeting."""
    engine = group().group.engine
    return {
        "transport": engine.transport,
        "shares memory": engine.selector.shares_memory,
        "unix": listening_unix_sockets(),
    }


def listening_unix_sockets() -> list[str]:
    """Those that ring ranks of this machine have a name for and listen at, by any process of this user."""
    lines = Path("/proc/net/unix").read_text().splitlines()[1:]
    own = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            own.add(os.readlink(entry))
        except OSError:
            continue  # the one that lists this folder
    listening = [line.split() for line in lines if line.split()[3] == "00010000"]
    return [fields[-1] for fields in listening if f"socket:[{fields[6]}]" in own and "cyxtrain" in fields[-1]]


def go_through_all(table: Sequence[Case]) -> dict[str, Any]:
    """Joins, calls each case, and returns what came, as digests in the order of the cases."""
    warnings.simplefilter("ignore")
    with cx.init(cx.DistributedConfig(collective_timeout_ms=30_000)):
        rank, size = cx.get_rank(), cx.get_world_size()
        found = [digest(outcome(case, rank, size)) for case in table]
        return facts() | {"digests": found, "nans": nans(rank), "doing": group().group.engine.sequence}


def nans(rank: int) -> list[str]:
    """Reduces NaNs of which each says who brought it; returns the bits that came, of few, more and many elements."""
    found = []
    for count in (1, 5, 3000, 30_000, 100_003, 600_001):
        for op in (Op.SUM, Op.MAX):
            payloads = np.full(count, 0x7FC00000 + 1 + rank, dtype=np.uint32)
            payloads[::3] = np.float32(rank).view(np.uint32)  # some are numbers, on some ranks
            if rank % 2:
                payloads[1::3] = np.float32(1).view(np.uint32)
            tensor = torch.from_numpy(payloads.view(np.float32))
            dist.all_reduce(tensor, op)
            found.append(digest(tensor))
    return found


def join_and_say() -> dict[str, Any]:
    """Joins, reduces something small and something large, and returns how it travelled."""
    with cx.init():
        for count in (3, MIB):
            tensor = torch.ones(count)
            dist.all_reduce(tensor)
            assert bool((tensor == cx.get_world_size()).all())
        return facts()


def join_and_make_groups() -> dict[str, Any]:
    """Joins, makes two more groups, and returns what was warned of on the way, and how all three travelled."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        found = join_and_say_of_groups()
    told = [str(each.message) for each in caught if issubclass(each.category, FutureWarning)]
    return {"told": told, "transports": found}


def join_and_say_of_groups() -> list[str]:
    with cx.init():
        groups = [group()]
        for _ in range(2):
            made_group = dist.new_group()
            assert isinstance(made_group, RingProcessGroup)
            groups.append(made_group)
        for each in groups:
            for _ in range(2):
                tensor = torch.ones(MIB)
                dist.all_reduce(tensor, group=each)
                assert bool((tensor == cx.get_world_size()).all())
        return [each.group.engine.transport for each in groups]
