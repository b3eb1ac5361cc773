"""Who sends which elements to whom: pure schedules, without sockets.

A schedule is the list of one rank's transfers, in order; ranks run theirs at the same time. Positions are
element offsets. `send` refers to a source buffer, `receive` to a target buffer; for all_reduce they are one.

The order in which elements are summed is a pure function of (world size, count): chunk c is summed along the
ring, beginning at rank c + 1 and ending at rank c, and every rank gets those very bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

Span = tuple[int, int]
_NOTHING: Span = (0, 0)


class Transfer(NamedTuple):
    """One step of one rank: a send and a receive at once; either may be absent (None)."""

    send_to: int | None
    send: Span
    receive_from: int | None
    receive: Span
    reduce: bool = False
    """Combine what arrives with what is there, instead of replacing it."""


def chunks(count: int, parts: int) -> list[Span]:
    """Returns `parts` neighbouring spans that cover 0..count, as even as they can be."""
    bounds = [count * part // parts for part in range(parts + 1)]
    return list(itertools.pairwise(bounds))


def agreement(rank: int, world_size: int) -> list[Transfer]:
    """Every rank hears of every other that it is here: a dissemination barrier.

    Cost: ceil(log2 N) empty frames sent and received by each rank.
    Source: Hensgen, Finkel and Manber, Two algorithms for barrier synchronization (1988), section 3.
    """
    schedule = []
    distance = 1
    while distance < world_size:
        ahead, behind = (rank + distance) % world_size, (rank - distance) % world_size
        schedule.append(Transfer(ahead, _NOTHING, behind, _NOTHING))
        distance *= 2
    return schedule


def reduce_scatter(rank: int, world_size: int, spans: Sequence[Span]) -> list[Transfer]:
    """Leaves in `spans[rank]` the combination of all ranks; the other spans hold partial results after it.

    Cost: N - 1 frames, (N - 1) / N of the buffer each way.
    Source: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms (2009), section 4.
    """
    ahead, behind = (rank + 1) % world_size, (rank - 1) % world_size
    return [
        Transfer(ahead, spans[(rank - 1 - step) % world_size], behind, spans[(rank - 2 - step) % world_size], True)
        for step in range(world_size - 1)
    ]


def all_gather(rank: int, world_size: int, spans: Sequence[Span]) -> list[Transfer]:
    """Brings `spans[r]` of every rank r to all. Cost: N - 1 frames, (N - 1) / N of the buffer each way."""
    ahead, behind = (rank + 1) % world_size, (rank - 1) % world_size
    return [
        Transfer(ahead, spans[(rank - step) % world_size], behind, spans[(rank - 1 - step) % world_size])
        for step in range(world_size - 1)
    ]


def broadcast(rank: int, world_size: int, count: int, src: int, segment: int) -> list[Transfer]:
    """Passes the buffer of `src` along a chain, in segments that follow each other closely.

    The agreement comes first: else `src` could leave before it hears that others called something else.
    Cost: ceil(log2 N) empty frames, then the buffer once in and once out, N - 1 hops of latency.
    """
    place = (rank - src) % world_size
    behind = None if place == 0 else (rank - 1) % world_size
    ahead = None if place == world_size - 1 else (rank + 1) % world_size
    pieces = [(start, min(start + segment, count)) for start in range(0, count, segment)]
    schedule = agreement(rank, world_size)
    if world_size == 1:
        return schedule
    if behind is None:
        return schedule + [Transfer(ahead, piece, None, _NOTHING) for piece in pieces]
    for index, piece in enumerate(pieces):
        forward = ahead if index > 0 else None
        schedule.append(Transfer(forward, pieces[index - 1] if index else _NOTHING, behind, piece))
    if ahead is not None and pieces:
        schedule.append(Transfer(ahead, pieces[-1], None, _NOTHING))
    return schedule


def gather(rank: int, world_size: int, spans: Sequence[Span], dst: int, own: Span) -> list[Transfer]:
    """Brings the span `own` of every rank's source to `spans[r]` of the target on rank `dst`, directly.

    Cost: ceil(log2 N) empty frames; `dst` receives N - 1 frames, the others send one.
    """
    schedule = agreement(rank, world_size)
    if rank != dst:
        return [*schedule, Transfer(dst, own, None, _NOTHING)]
    return schedule + [Transfer(None, _NOTHING, other, spans[other]) for other in range(world_size) if other != dst]


def scatter(rank: int, world_size: int, spans: Sequence[Span], src: int, own: Span) -> list[Transfer]:
    """Brings `spans[r]` of the source on rank `src` to the span `own` of rank r's target, directly.

    Cost: ceil(log2 N) empty frames; `src` sends N - 1 frames, the others receive one.
    """
    schedule = agreement(rank, world_size)
    if rank != src:
        return [*schedule, Transfer(None, _NOTHING, src, own)]
    return schedule + [Transfer(other, spans[other], None, _NOTHING) for other in range(world_size) if other != src]


def all_to_all(rank: int, world_size: int, send: Sequence[Span], receive: Sequence[Span]) -> list[Transfer]:
    """Brings `send[r]` of the source to rank r, and what rank r has for us to `receive[r]`. Cost: N - 1 frames."""
    schedule = []
    for distance in range(1, world_size):
        ahead, behind = (rank + distance) % world_size, (rank - distance) % world_size
        schedule.append(Transfer(ahead, send[ahead], behind, receive[behind]))
    return schedule
