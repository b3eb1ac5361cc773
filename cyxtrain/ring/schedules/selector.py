"""Selects the schedule of a collective.

The order of summation follows from world size and bytes alone. The machines of the ranks decide only how elements are
moved: on one machine through shared memory; across machines, copies along a ring enter each machine once.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cyxtrain.ring.schedules import algorithms
from cyxtrain.ring.schedules.algorithms import Step, others_of
from cyxtrain.ring.schedules.summation import Spans

ORDERS_WRITES = platform.machine().lower() in ("x86_64", "amd64")
"""Whether other cores see a core's writes in their order."""
SHORT_BYTES = 1 << 14
"""Up to this size a payload fits into any socket buffer, and costs little more than an empty one."""
SEGMENT_BYTES = 1 << 20
"""Bytes moved by one system call at most, and combined at once: they stay in the processor's cache."""
WINDOW_BYTES = 2 << 20
"""Bytes that a rank has in shared memory at once: more would leave the cache, and two copies would take longer."""


class Peers(NamedTuple):
    """The ranks that one rank sends its frame to in an exchange, and the ranks that it then receives from."""

    to: tuple[int, ...] = ()
    sources: tuple[int, ...] = ()


@dataclass(frozen=True)
class AlgorithmSelector:
    """Chooses the schedules of one rank; docs/ring.md has the table."""

    rank: int
    world_size: int
    ring: tuple[int, ...]
    """All ranks, ordered by machine."""
    shares_memory: bool = False
    """Whether the ranks are few, on one machine, and Unix sockets connect them all."""
    oversubscribed: bool = False
    """Whether three or more ranks share fewer cores of one machine: fewer messages are then faster."""
    core_per_rank: bool = False
    """Whether all ranks are on one machine, with a core for each."""

    def is_staged(self, count: int, item_bytes: int) -> bool:
        """Return whether so many elements go through shared memory, if frames carry no checksums."""
        return self.shares_memory and count * item_bytes > SHORT_BYTES

    def is_tiny(self, count: int, item_bytes: int) -> bool:
        """Return whether elements are so few that no send blocks, and a round takes longer than their bytes."""
        return 1 < self.world_size <= algorithms.FEW_RANKS and count * item_bytes <= SHORT_BYTES

    def exchanges(self) -> tuple[Peers, Peers]:
        """Return how all frames reach the ranks that reduce, and how the result reaches the others."""
        others = others_of(self.rank, self.world_size)
        if not self.oversubscribed:
            return Peers(to=others, sources=others), Peers()
        if self.rank == 0:
            return Peers(sources=others), Peers(to=others)
        return Peers(to=(0,)), Peers(sources=(0,))

    @property
    def uses_counters(self) -> bool:
        """Whether ranks publish progress counters in shared memory: each has a core to poll them."""
        return self.core_per_rank and ORDERS_WRITES

    @property
    def is_summing(self) -> bool:
        """Whether this rank sums between the two exchanges of a barrier."""
        return self.rank == 0 or not self.oversubscribed

    def all_gather(self, spans: Spans, item_bytes: int) -> Sequence[Step]:
        """Bring `spans[r]` of every rank r to all."""
        if self.is_tiny(max(end - first for first, end in spans), item_bytes):
            return [algorithms.multicast_spans(self.rank, self.world_size, spans[self.rank], spans)]
        return algorithms.all_gather(self.rank, self.world_size, spans, self.ring)

    def broadcast(self, count: int, src: int, item_bytes: int) -> Sequence[Step]:
        """Bring the buffer of `src` to all."""
        if self.is_tiny(count, item_bytes):
            return [algorithms.multicast_from(self.rank, self.world_size, count, src)]
        segment = max(1, SEGMENT_BYTES // item_bytes)
        return algorithms.broadcast(self.rank, self.world_size, count, src, segment, self.ring)
