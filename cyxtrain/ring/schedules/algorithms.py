"""Schedules: which rank sends which elements to which, without sockets.

A schedule is the list of one rank's steps, in order; all ranks run theirs at the same time. Positions are element
offsets: `send` in a source buffer, `receive` in a target buffer, which are the same for all_reduce.

Those that reduce add up in the order of `summation.py`.
"""

from __future__ import annotations

import enum
import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from cyxtrain.ring.schedules.summation import Span, Spans

NOTHING: Span = (0, 0)
FEW_RANKS = 8
"""Up to this number of ranks more messages in fewer rounds are faster."""


class OnReceive(enum.IntEnum):
    """What is done with the received elements."""

    REPLACE = 0
    COMBINE = 1
    """Combine them with the target, piece by piece."""
    EXCHANGE = 2
    """Combine them with the target once that was sent."""


class Transfer(NamedTuple):
    """A send and a receive at once; None if absent. If `peer_first`, received elements are the first operand."""

    send_to: int | None
    send: Span
    receive_from: int | None
    receive: Span
    on_receive: OnReceive = OnReceive.REPLACE
    peer_first: bool = False


class Multicast(NamedTuple):
    """Send the same few bytes to several ranks, then receive a few, each in its span, from each of several.

    The bytes fit into socket buffers, so that no send waits for another rank.
    """

    to: tuple[int, ...]
    send: Span
    sources: tuple[int, ...]
    receive: tuple[Span, ...]


Step = Transfer | Multicast


@functools.lru_cache(maxsize=256)
def even_spans(count: int, parts: int) -> Spans:
    """Return `parts` consecutive spans of `count` elements each."""
    return tuple((part * count, (part + 1) * count) for part in range(parts))


def neighbouring(lengths: Sequence[int]) -> list[Span]:
    """Return consecutive spans of these lengths."""
    spans = []
    start = 0
    for length in lengths:
        spans.append((start, start + length))
        start += length
    return spans


def dissemination_barrier(rank: int, world_size: int) -> list[Transfer]:
    """Wait for every rank: a dissemination barrier. Cost: ceil(log2 N) empty frames each way.

    Source: Hensgen, Finkel and Manber, Two algorithms for barrier synchronization (1988), section 3.
    """
    schedule = []
    distance = 1
    while distance < world_size:
        ahead = (rank + distance) % world_size
        behind = (rank - distance) % world_size
        schedule.append(Transfer(ahead, NOTHING, behind, NOTHING))
        distance *= 2
    return schedule


def with_agreement(rank: int, world_size: int, behind: int | None, transfers: Sequence[Transfer]) -> list[Step]:
    """Run transfers that receive only from `behind`, so that no rank leaves before it has heard from all.

    Few ranks send empty frames first, and receive those of ranks other than `behind` last, so that data waits for
    nobody. More ranks use a `dissemination_barrier`.
    """
    if world_size > FEW_RANKS or world_size == 1:
        return [*dissemination_barrier(rank, world_size), *transfers]
    others = others_of(rank, world_size)
    before = tuple(other for other in others if other == behind)
    after = tuple(other for other in others if other != behind)
    return [
        Multicast(others, NOTHING, before, (NOTHING,) * len(before)),
        *transfers,
        Multicast((), NOTHING, after, (NOTHING,) * len(after)),
    ]


def others_of(rank: int, world_size: int) -> tuple[int, ...]:
    """Return all other ranks, the next one first, so that not all start with the same."""
    return tuple((rank + distance) % world_size for distance in range(1, world_size))


@functools.lru_cache(maxsize=256)
def recursive_doubling(rank: int, world_size: int, count: int) -> list[Transfer]:
    """Leave the sum of all ranks, by `binary_tree`, in every rank's buffer: neighbouring blocks exchange their sums.

    Cost: log2 N frames of the whole buffer each way for powers of two; at most twice as many rounds otherwise.
    Source: Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in MPICH (2005),
    section 4.4.
    """
    schedule: list[Transfer] = []
    distance = 1
    while distance < world_size:
        left = rank - rank % (2 * distance)
        num_right = min(distance, world_size - left - distance)
        if num_right > 0:
            schedule += _join_blocks(rank, left, distance, num_right, (0, count))
        distance *= 2
    return schedule


def _join_blocks(rank: int, left: int, distance: int, num_right: int, whole: Span) -> list[Transfer]:
    """Bring the sum of two blocks to all their ranks; the right one, if it is the world's last, may be shorter.

    The right block's ranks exchange with as many on the left, which pass the sum on to as many, and so on. The last
    round of five ranks: 4 exchanges with 0; then 0 passes the sum on to 1; then 0 and 1 to 2 and 3.
    """
    place = rank - left
    if place >= distance:
        peer = rank - distance
        return [Transfer(peer, whole, peer, whole, OnReceive.EXCHANGE, peer_first=True)]
    schedule = []
    if place < num_right:
        peer = rank + distance
        schedule.append(Transfer(peer, whole, peer, whole, OnReceive.EXCHANGE))
    num_complete = num_right
    while num_complete < distance:
        if place < num_complete and place + num_complete < distance:
            schedule.append(Transfer(rank + num_complete, whole, None, NOTHING))
        elif num_complete <= place < 2 * num_complete:
            schedule.append(Transfer(None, NOTHING, rank - num_complete, whole))
        num_complete *= 2
    return schedule


def multicast_spans(rank: int, world_size: int, send: Span, receive: Sequence[Span]) -> Multicast:
    """Bring the span `send` of every rank's source to `receive[r]` on all others. Cost: N - 1 frames, one round."""
    others = others_of(rank, world_size)
    return Multicast(others, send, others, tuple(receive[other] for other in others))


@functools.lru_cache(maxsize=256)
def multicast_from(rank: int, world_size: int, count: int, src: int) -> Multicast:
    """Bring the source of `src` to all others, who also hear from each other. Cost: N - 1 frames, one round."""
    spans = [NOTHING] * world_size
    spans[src] = (0, count)
    return multicast_spans(rank, world_size, spans[rank], spans)


@functools.lru_cache(maxsize=256)
def reduce_scatter(rank: int, world_size: int, spans: Spans) -> list[Transfer]:
    """Leave in `spans[rank]` the sum of all ranks, as `along_ring` says, and partial sums in the other spans.

    Cost: N - 1 frames, (N - 1) / N of the buffer each way.
    Source: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms (2009), section 4.
    """
    ahead = (rank + 1) % world_size
    behind = (rank - 1) % world_size
    return [
        Transfer(
            ahead,
            spans[(rank - 1 - step) % world_size],
            behind,
            spans[(rank - 2 - step) % world_size],  # its own is the last one received
            OnReceive.COMBINE,
        )
        for step in range(world_size - 1)
    ]


@functools.lru_cache(maxsize=256)
def all_gather(rank: int, world_size: int, spans: Spans, ring: tuple[int, ...]) -> list[Transfer]:
    """Bring `spans[r]` of every rank r to all, along `ring`. Cost: N - 1 frames, (N - 1) / N of the bytes."""
    place = ring.index(rank)
    ahead = ring[(place + 1) % world_size]
    behind = ring[(place - 1) % world_size]
    return [
        Transfer(ahead, spans[ring[place - step]], behind, spans[ring[place - 1 - step]])
        for step in range(world_size - 1)
    ]


def broadcast(rank: int, world_size: int, count: int, src: int, segment: int, ring: Sequence[int]) -> list[Step]:
    """Pass the buffer of `src` along the chain `ring`, in pieces of `segment` elements that follow each other.

    Cost: as `with_agreement`; the buffer once in and once out, N - 1 hops of latency.
    """
    if world_size == 1:
        return []
    first = ring.index(src)
    chain = [*ring[first:], *ring[:first]]
    place = chain.index(rank)
    behind: int | None = None
    ahead: int | None = None
    if place > 0:
        behind = chain[place - 1]
    if place < world_size - 1:
        ahead = chain[place + 1]
    pieces = [(start, min(start + segment, count)) for start in range(0, count, segment)]
    return with_agreement(rank, world_size, behind, _pass_on(pieces, behind, ahead))


def _pass_on(pieces: Sequence[Span], behind: int | None, ahead: int | None) -> list[Transfer]:
    """Receive pieces from the rank behind, and send each to the rank ahead while the next one arrives."""
    if behind is None:
        return [Transfer(ahead, piece, None, NOTHING) for piece in pieces]
    if not pieces:
        return []
    schedule = [Transfer(None, NOTHING, behind, pieces[0])]
    for previous, piece in itertools.pairwise(pieces):
        schedule.append(Transfer(ahead, previous, behind, piece))
    if ahead is not None:
        schedule.append(Transfer(ahead, pieces[-1], None, NOTHING))
    return schedule


def gather(rank: int, world_size: int, spans: Sequence[Span], dst: int, own: Span) -> list[Transfer]:
    """Bring the span `own` of every rank to `spans[r]` on rank `dst`. Cost: ceil(log2 N) empty frames, one of data."""
    schedule = dissemination_barrier(rank, world_size)
    if rank != dst:
        schedule.append(Transfer(dst, own, None, NOTHING))
        return schedule
    for other in range(world_size):
        if other != dst:
            schedule.append(Transfer(None, NOTHING, other, spans[other]))
    return schedule


def scatter(rank: int, world_size: int, spans: Sequence[Span], src: int, own: Span) -> list[Transfer]:
    """Bring `spans[r]` on rank `src` to the span `own` of rank r. Cost: ceil(log2 N) empty frames, one of data."""
    schedule = dissemination_barrier(rank, world_size)
    if rank != src:
        schedule.append(Transfer(None, NOTHING, src, own))
        return schedule
    for other in range(world_size):
        if other != src:
            schedule.append(Transfer(other, spans[other], None, NOTHING))
    return schedule


def all_to_all(rank: int, world_size: int, send: Sequence[Span], receive: Sequence[Span]) -> list[Transfer]:
    """Bring `send[r]` of the source to rank r, and that rank's elements to `receive[r]`. Cost: N - 1 frames."""
    schedule = []
    for distance in range(1, world_size):
        ahead = (rank + distance) % world_size
        behind = (rank - distance) % world_size
        schedule.append(Transfer(ahead, send[ahead], behind, receive[behind]))
    return schedule
