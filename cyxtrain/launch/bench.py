"""all_reduce over the ring and over Gloo, side by side in one run."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cyxtrain.config import BackendType, DistributedConfig
from cyxtrain.progress.tables import aligned, duration, rate, size, wrapped
from cyxtrain.world import runtime

SIZES = (4, 1 << 10, 16 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
"""Bytes of float32."""
_SECONDS = 10.0
_ROUNDS = 5
"""The ring and Gloo take turns so often: what disturbs a machine for a while then disturbs both."""
_WARM_UP_CALLS = 3
_MAX_CALLS = 500
_NOTHING_TRAVELS = (
    "alone: in a world of one nothing travels, so there is nothing to measure. Start it with several ranks: "
    "cyxtrain launch -n 2 -- cyxtrain bench"
)
_BUS = "bus bandwidth, of the ring: 2 (N - 1) / N x bytes / seconds, as nccl-tests define it: what each link carries"


@dataclass(frozen=True)
class Row:
    """What was measured for one size.

    Attributes:
        count: Bytes.
        ring_seconds: Median, on the rank where it is largest.
        gloo_seconds: The same; None: there is no Gloo.
    """

    count: int
    ring_seconds: float
    gloo_seconds: float | None


def bench(config: DistributedConfig, sizes: Sequence[int] = SIZES, seconds: float = _SECONDS) -> int:
    """Measures all_reduce (SUM, float32) over the ring and, in turns, over Gloo; rank 0 prints a table.

    Args:
        config: Complete; its backend does not matter.
        sizes: In bytes, at least 4.
        seconds: About how long it measures; each size gets at least 5 calls of each.

    Returns:
        0; 2: a world of one, where there is nothing to measure.

    Raises:
        RendezvousError: The ranks did not find each other.
        PeerLostError: Another rank has ended.
    """
    if config.world_size == 1:
        print(_NOTHING_TRAVELS, flush=True)
        return 2
    with runtime.init(dataclasses.replace(config, backend=BackendType.CPU)):
        shows = runtime.is_master()
        ranks = runtime.get_world_size()
        if shows:
            what = f"all_reduce (SUM, float32) on {ranks} ranks, ring and Gloo in turns"
            print(f"{what}: about {seconds:g} s", flush=True)
        gloo = _gloo(config)
        rows = []
        for number, count in enumerate(sizes):
            _progress(f"{size(count)} ({number + 1} of {len(sizes)})", shows)
            rows.append(_measure(count, gloo, seconds / len(sizes)))
        _progress("", shows)
    if shows:
        print("\n".join(lines_of(rows, ranks)), flush=True)
    return 0


def bus_bandwidth(count: int, seconds: float, ranks: int) -> float:
    """Returns bytes per second that each link carries, comparable over numbers of ranks (nccl-tests, PERFORMANCE.md).

    Args:
        count: Bytes of the tensor.
        seconds: Of one call.
        ranks: How many.
    """
    return 2 * (ranks - 1) / ranks * count / seconds


def lines_of(rows: Sequence[Row], ranks: int) -> list[str]:
    """Returns the table."""
    cells: list[Sequence[str]] = [("size", "ring", "Gloo", "Gloo / ring", "bus bandwidth")]
    for row in rows:
        gloo, ratio = "none", ""
        if row.gloo_seconds is not None:
            gloo, ratio = duration(row.gloo_seconds), f"{row.gloo_seconds / row.ring_seconds:.2f}"
        bus = rate(bus_bandwidth(row.count, row.ring_seconds, ranks))
        cells.append((size(row.count), duration(row.ring_seconds), gloo, ratio, bus))
    return ["", *aligned(cells, right=range(5)), "", *wrapped(f"median times on the slowest rank; {_BUS}", "  ")]


def _gloo(config: DistributedConfig) -> Any:
    """Returns a second group over Gloo; None, on all ranks: it cannot be made on all."""
    group = None
    if dist.is_gloo_available():
        with contextlib.suppress(RuntimeError):  # Gloo's own search for an address may find none
            group = dist.new_group(backend="gloo", timeout=timedelta(milliseconds=config.timeout_ms))
    there = torch.tensor([int(group is not None)], device="cpu")
    dist.all_reduce(there, dist.ReduceOp.MIN)
    return group if there.item() else None


def _measure(count: int, gloo: Any, seconds: float) -> Row:
    """Measures one size, all ranks together."""
    tensor = torch.zeros(max(count // 4, 1), device="cpu")  # sums of zeros stay what they are
    groups = {"ring": dist.group.WORLD} if gloo is None else {"ring": dist.group.WORLD, "gloo": gloo}
    for group in groups.values():
        _timed(tensor, group, _WARM_UP_CALLS)
    one_turn = sum(_timed(tensor, group, 1)[0] for group in groups.values())
    calls = _agreed_calls(seconds / _ROUNDS / one_turn)
    found: dict[str, list[float]] = {name: [] for name in groups}
    for _ in range(_ROUNDS):
        for name, group in groups.items():
            found[name] += _timed(tensor, group, calls)
    medians = torch.tensor([statistics.median(each) for each in found.values()], dtype=torch.float64, device="cpu")
    dist.all_reduce(medians, dist.ReduceOp.MAX)
    slowest = medians.tolist()
    return Row(tensor.nbytes, slowest[0], slowest[1] if len(slowest) > 1 else None)


def _agreed_calls(wanted: float) -> int:
    """Returns how many calls all ranks make: as many as rank 0 has time for."""
    calls = torch.tensor([min(max(int(wanted), 1), _MAX_CALLS)], device="cpu")
    dist.broadcast(calls, 0)
    return int(calls)


def _timed(tensor: Tensor, group: Any, calls: int) -> list[float]:
    """Returns the seconds of each call; all ranks begin together."""
    dist.barrier()
    found = []
    for _ in range(calls):
        begin = time.perf_counter()
        dist.all_reduce(tensor, group=group)
        found.append(time.perf_counter() - begin)
    return found


def _progress(text: str, shows: bool) -> None:
    """Shows what is measured, in a terminal; the next text takes its place."""
    if shows and sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
