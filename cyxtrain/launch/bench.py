"""Measure all_reduce over the ring and over Gloo in one run."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from cyxtrain.config import BackendType, DistributedConfig
from cyxtrain.doctor.terminal import duration, print_report, rate, size, table
from cyxtrain.world import runtime

if TYPE_CHECKING:
    from rich.console import RenderableType

SIZES = (4, 1 << 10, 16 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
"""Bytes of float32."""
_SECONDS = 10.0
# The ring and Gloo alternate, so that a disturbance of the machine affects both.
_ROUNDS = 5
_WARM_UP_CALLS = 3
_MAX_CALLS = 500
_ONE_RANK = (
    "nothing to measure: a single rank sends nothing. Start several ranks: cyxtrain launch -n 2 -- cyxtrain bench"
)
_FOOTNOTE = (
    "median times on the slowest rank; bus bandwidth of the ring: 2 (N - 1) / N x bytes / seconds, as nccl-tests "
    "define it: what each link carries"
)


class Row(NamedTuple):
    """Results for one size in bytes: median seconds on the slowest rank; None if there is no Gloo."""

    size_bytes: int
    ring_seconds: float
    gloo_seconds: float | None


def bench(config: DistributedConfig, sizes: Sequence[int] = SIZES, seconds: float = _SECONDS) -> int:
    """Measure all_reduce (SUM, float32), alternating between the ring and Gloo; rank 0 prints a table.

    The backend of the config does not matter; each size (in bytes) gets at least 5 calls of each, in about `seconds`
    altogether. Returns the exit code: 2 for a single rank, where there is nothing to measure.
    """
    if config.world_size == 1:
        print(_ONE_RANK, flush=True)
        return 2
    with runtime.init(dataclasses.replace(config, backend=BackendType.CPU)) as world:
        if world.is_first:
            print(
                f"all_reduce (SUM, float32) on {world.size} ranks, ring and Gloo in turns: about {seconds:g} s\n",
                flush=True,
            )
        gloo = _gloo(config)
        rows = [_measure(count, gloo, seconds / len(sizes)) for count in sizes]
    if world.is_first:
        print_report(report_of(rows, world.size))
    return 0


def report_of(rows: Sequence[Row], ranks: int) -> list[RenderableType]:
    """Return a table and its footnote."""
    cells = []
    for count, ring, gloo in rows:
        gloo_cells = ("none", "")
        if gloo is not None:
            gloo_cells = (duration(gloo), f"{gloo / ring:.2f}")
        bus_bandwidth = 2 * (ranks - 1) / ranks * count / ring
        cells.append((size(count), duration(ring), *gloo_cells, rate(bus_bandwidth)))
    titles = ("size", "ring", "Gloo", "Gloo / ring", "bus bandwidth")
    return [table(titles, cells, right=range(5)), _FOOTNOTE]


def _gloo(config: DistributedConfig) -> Any:
    """Return a second group over Gloo, or None on all ranks if one of them cannot create it."""
    group = None
    if dist.is_gloo_available():
        with contextlib.suppress(RuntimeError):  # Gloo may find no network interface
            group = dist.new_group(backend="gloo", timeout=timedelta(milliseconds=config.timeout_ms))
    exists = torch.tensor([int(group is not None)], device="cpu")
    dist.all_reduce(exists, dist.ReduceOp.MIN)
    return group if exists.item() else None


def _measure(count: int, gloo: Any, seconds: float) -> Row:
    tensor = torch.zeros(max(count // 4, 1), device="cpu")  # sums of zeros stay zero
    groups = {"ring": dist.group.WORLD}
    if gloo is not None:
        groups["gloo"] = gloo
    for group in groups.values():
        _timed(tensor, group, _WARM_UP_CALLS)
    one_turn = sum(_timed(tensor, group, 1)[0] for group in groups.values())
    affordable_calls = int(seconds / _ROUNDS / one_turn)
    calls = torch.tensor([min(max(affordable_calls, 1), _MAX_CALLS)], device="cpu")
    dist.broadcast(calls, 0)  # each call needs all ranks
    found: dict[str, list[float]] = {name: [] for name in groups}
    for _ in range(_ROUNDS):
        for name, group in groups.items():
            found[name] += _timed(tensor, group, int(calls))
    medians = torch.tensor([statistics.median(each) for each in found.values()], dtype=torch.float64, device="cpu")
    dist.all_reduce(medians, dist.ReduceOp.MAX)
    slowest = dict(zip(groups, medians.tolist(), strict=True))
    return Row(tensor.nbytes, slowest["ring"], slowest.get("gloo"))


def _timed(tensor: Tensor, group: Any, calls: int) -> list[float]:
    """Return the seconds of each call, after a barrier."""
    dist.barrier()
    found = []
    for _ in range(calls):
        begin = time.perf_counter()
        dist.all_reduce(tensor, group=group)
        found.append(time.perf_counter() - begin)
    return found
