"""Which schedule a collective takes.

What is summed in which order follows from world size and bytes alone. Where the ranks run decides only how the same
elements travel: on one machine they are read where they are, over several a ring of copies enters each machine once.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass

from cyxtrain.ring.schedules import algorithms
from cyxtrain.ring.schedules.algorithms import SILENCE, Multicast, Spans, Step

ORDERS_WRITES = platform.machine().lower() in ("x86_64", "amd64")
"""Whether other cores see what one writes in the order in which it was written."""
SHORT_BYTES = 1 << 14
"""Up to this size a payload fits into any socket buffer, and costs little more than an empty one."""
OFFER_BYTES = 1 << 17
"""From this size on a payload that the receiver can read in place is not sent."""
SEGMENT_BYTES = 1 << 20
"""Bytes moved by one system call at most, and combined at once: they stay in the processor's cache."""
LONGEST_STAGED_BYTES = 4 << 20
"""Up to this size a tensor is reduced through shared memory: larger ones leave the cache, and two copies cost more."""
FEW_BYTES = 1 << 18
"""Up to this size the number of rounds decides how long a reduction takes, above it the number of bytes."""


def few(world_size: int, count: int, item_bytes: int) -> bool:
    """Return whether latency decides: then every rank reduces all elements, by recursive doubling."""
    return world_size > 1 and count * item_bytes <= FEW_BYTES


@dataclass(frozen=True)
class AlgorithmSelector:
    """Chooses the schedules of one rank; docs/ring.md has the table.

    Attributes:
        ring: All ranks, those of one machine next to each other.
        direct: Whether every rank can read the memory of every other.
        shares_memory: Whether few ranks of one machine are all connected by Unix sockets, over which they share memory.
        crowded: Whether three ranks or more share the cores of one machine: fewer messages are then faster.
        roomy: Whether all ranks are on one machine, with a core for each.
    """

    rank: int
    world_size: int
    ring: tuple[int, ...]
    direct: bool = False
    shares_memory: bool = False
    crowded: bool = False
    roomy: bool = False

    def tells_all(self, count: int, item_bytes: int) -> bool:
        """Return whether elements are so few that no send waits, and a round costs more than they do."""
        return self.world_size <= algorithms.FEW_RANKS and count * item_bytes <= SHORT_BYTES

    def meeting(self, count: int) -> tuple[Multicast, Multicast]:
        """Return how very few elements reach the ranks that sum them, and how the sum reaches the others."""
        if self.crowded:
            return (
                algorithms.collecting(self.rank, self.world_size, count),
                algorithms.spreading(self.rank, self.world_size, count),
            )
        return algorithms.telling_all(self.rank, self.world_size, count), SILENCE

    @property
    def shows(self) -> bool:
        """Whether ranks publish progress counters in shared memory: each has a core to poll, and writes keep order."""
        return self.roomy and ORDERS_WRITES

    @property
    def sums(self) -> bool:
        """Whether this rank sums between the two exchanges of a meeting."""
        return self.rank == 0 or not self.crowded

    def sums_alike(self, count: int, item_bytes: int) -> bool:
        """Return whether each sum is made on one rank only, or from the same operands on all."""
        return self.tells_all(count, item_bytes) or not few(self.world_size, count, item_bytes)

    def reduce_scatter(self, spans: Spans, item_bytes: int) -> Sequence[Step]:
        """Leave in `spans[rank]` the combination of all ranks."""
        if self.are_read(spans, item_bytes):
            return algorithms.folding(self.rank, self.world_size, spans)
        return algorithms.reduce_scatter(self.rank, self.world_size, spans)

    def all_gather(self, spans: Spans, item_bytes: int) -> Sequence[Step]:
        """Bring `spans[r]` of every rank r to all."""
        if self.tells_all(max(end - first for first, end in spans), item_bytes):
            return [algorithms.ending_group_on_error(self.rank, self.world_size, spans[self.rank], spans)]
        if self.are_read(spans, item_bytes):
            return algorithms.gathering(self.rank, self.world_size, spans)
        return algorithms.all_gather(self.rank, self.world_size, spans, self.ring)

    def broadcast(self, count: int, src: int, item_bytes: int) -> Sequence[Step]:
        """Bring the buffer of `src` to all."""
        if self.tells_all(count, item_bytes):
            return [algorithms.telling_of(self.rank, self.world_size, count, src)]
        if self.are_read(((0, count),), item_bytes):
            return algorithms.fan_out(self.rank, self.world_size, count, src)
        segment = max(1, SEGMENT_BYTES // item_bytes)
        return algorithms.broadcast(self.rank, self.world_size, count, src, segment, self.ring)

    def are_read(self, spans: Spans, item_bytes: int) -> bool:
        """Return whether all these spans are read in place: no send waits for another rank then."""
        return self.direct and all((end - first) * item_bytes >= OFFER_BYTES for first, end in spans)
