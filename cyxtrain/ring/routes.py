"""Which schedule a collective takes.

What is summed in which order follows from world size and bytes alone. Where the ranks run decides only how the same
elements travel: on one machine they are read where they are, over several a ring of copies enters each machine once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cyxtrain.ring import algorithms
from cyxtrain.ring.algorithms import Spans, Step
from cyxtrain.ring.transfers import OFFER_BYTES, SEGMENT_BYTES, SHORT_BYTES

FEW_BYTES = 1 << 18
"""Up to this size the number of rounds decides how long a reduction takes, above it the number of bytes."""


def few(world_size: int, count: int, item_bytes: int) -> bool:
    """Returns whether a reduction goes by recursive doubling: every rank sums all, in log2 N rounds."""
    return world_size > 1 and count * item_bytes <= FEW_BYTES


@dataclass(frozen=True)
class Routes:
    """The schedules of one rank.

    Attributes:
        rank: This rank.
        world_size: How many there are.
        ring: All ranks, those of one machine next to each other.
        direct: Whether every rank can read the memory of every other.
    """

    rank: int
    world_size: int
    ring: tuple[int, ...]
    direct: bool = False

    def tells_all(self, count: int, item_bytes: int) -> bool:
        """Returns whether every rank tells all others at once: one round, and so little that no send has to wait."""
        return self.world_size <= algorithms.FEW_RANKS and count * item_bytes <= SHORT_BYTES

    def sums_alike(self, count: int, item_bytes: int) -> bool:
        """Returns whether each sum is made on one rank, or of memory that looks the same on all.

        In recursive doubling each rank adds what comes to what it has, which is another operand on every rank.
        """
        return self.tells_all(count, item_bytes) or not few(self.world_size, count, item_bytes)

    def reduce_scatter(self, spans: Spans, item_bytes: int) -> Sequence[Step]:
        """Leaves in `spans[rank]` the combination of all ranks."""
        if self.are_read(spans, item_bytes):
            return algorithms.folding(self.rank, self.world_size, spans)
        return algorithms.reduce_scatter(self.rank, self.world_size, spans)

    def all_gather(self, spans: Spans, item_bytes: int) -> Sequence[Step]:
        """Brings `spans[r]` of every rank r to all."""
        if self.tells_all(max(end - first for first, end in spans), item_bytes):
            return algorithms.telling(self.rank, self.world_size, spans[self.rank], spans)
        if self.are_read(spans, item_bytes):
            return algorithms.gathering(self.rank, self.world_size, spans)
        return algorithms.all_gather(self.rank, self.world_size, spans, self.ring)

    def broadcast(self, count: int, src: int, item_bytes: int) -> Sequence[Step]:
        """Brings the buffer of `src` to all."""
        if self.tells_all(count, item_bytes):
            return algorithms.telling_of(self.rank, self.world_size, count, src)
        if self.are_read(((0, count),), item_bytes):
            return algorithms.fan_out(self.rank, self.world_size, count, src)
        segment = max(1, SEGMENT_BYTES // item_bytes)
        return algorithms.broadcast(self.rank, self.world_size, count, src, segment, self.ring)

    def are_read(self, spans: Spans, item_bytes: int) -> bool:
        """Returns whether all these spans are offered to be read: then no send can wait for another rank."""
        return self.direct and all((end - first) * item_bytes >= OFFER_BYTES for first, end in spans)
