"""All ranks of a schedule at once, without sockets: what they send is moved by hand, in any order.

What a rank sends goes in one of two ways. Handed over: together with its receive, so that what comes through here
needs no buffer anywhere. Buffered: it leaves at once, as a copy.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from cyxtrain.ring.schedules.algorithms import NOTHING, Multicast, OnReceive, Step, Transfer


class Way(enum.Enum):
    """How a payload goes."""

    HANDED_OVER = 0
    BUFFERED = 1


class Sent(NamedTuple):
    """What is on its way, and of whom its sender had heard."""

    payload: list[Any]
    known: frozenset[int]


def own(rank: int, count: int) -> list[Any]:
    """The elements that a rank brings: each says whose it is, and where it was."""
    return [(rank, position) for position in range(count)]


def combined(one: Any, other: Any) -> Any:
    """Two elements in the order in which they are combined; what was combined before stands in brackets."""
    assert one[1] == other[1], "elements of two positions"
    return ((one[0], other[0]), one[1])


def in_order(step: Transfer, received: Sequence[Any], here: Sequence[Any]) -> list[Any]:
    """Combine received elements with those of the target, in the order that the step says."""
    if step.peer_first:
        return [combined(*pair) for pair in zip(received, here, strict=True)]
    return [combined(*pair) for pair in zip(here, received, strict=True)]


def handed_over(sender: int, receiver: int, length: int) -> Way:
    return Way.HANDED_OVER


def buffered(sender: int, receiver: int, length: int) -> Way:
    return Way.BUFFERED


def handed_over_where_long(sender: int, receiver: int, length: int) -> Way:
    """As where no buffer has room for what is long; what says nothing finds room in any."""
    return Way.HANDED_OVER if length else Way.BUFFERED


def apart(schedule: Sequence[Step]) -> list[Transfer]:
    """The schedule with what a rank tells several, and hears of several, one after the other."""
    result: list[Transfer] = []
    for step in schedule:
        if isinstance(step, Multicast):
            result += [Transfer(other, step.send, None, NOTHING) for other in step.to]
            receives = zip(step.sources, step.receive, strict=True)
            result += [Transfer(None, NOTHING, other, span) for other, span in receives]
        else:
            result.append(step)
    return result


class Lockstep:
    """Runs the schedules of all ranks, and sees to it that what one sends is what another is to receive.

    Args:
        schedules: By rank.
        sources: What each rank sends from.
        targets: What each receives into; None: the same.
        way: How payloads go, by sender, receiver and length.
        order: Who goes first where several can; the last one moves only when nobody else can. None: by rank.

    Attributes:
        results: What each rank had in its target when it ended.
        received: By rank, of whom it has heard.
        links: Between which ranks elements went, as (sender, receiver).
    """

    def __init__(
        self,
        schedules: Sequence[Sequence[Step]],
        sources: list[list[Any]],
        targets: list[list[Any]] | None = None,
        way: Callable[[int, int, int], Way] = handed_over,
        order: Sequence[int] | None = None,
    ) -> None:
        self._size = len(schedules)
        self._schedules = [apart(schedule) for schedule in schedules]
        self._sources, self._targets = sources, sources if targets is None else targets
        self._way = way
        self._order = range(self._size) if order is None else order
        self._sent: dict[tuple[int, int], deque[Sent]] = {}
        self._next = [0] * self._size
        self._kept: list[list[Any] | None] = [None] * self._size
        self.results: list[Any] = [None] * self._size
        self.received = [{rank} for rank in range(self._size)]
        self.links: set[tuple[int, int]] = set()
        self._open: list[set[str]] = [set()] * self._size
        self._known: list[frozenset[int]] = [frozenset()] * self._size
        for rank in range(self._size):
            self._begin(rank)

    def run(self) -> Lockstep:
        while any(result is None for result in self.results):
            moved = any(self._advance(rank) for rank in self._order)
            assert moved, "the ranks wait for each other"
        assert not any(self._sent.values()), "something was sent that nobody received"
        return self

    def all_heard(self) -> bool:
        return all(len(known) == self._size for known in self.received)

    def _step(self, rank: int) -> Transfer:
        return self._schedules[rank][self._next[rank]]

    def _begin(self, rank: int) -> None:
        """Notes what is to be done in the rank's next step; ends it where there is none."""
        self._known[rank] = frozenset(self.received[rank])
        if self._next[rank] == len(self._schedules[rank]):
            self.results[rank] = list(self._targets[rank])
            self._open[rank] = set()
            return
        step = self._step(rank)
        sends, receives = step.send_to is not None, step.receive_from is not None
        if sends and receives and self._sources is self._targets and step.on_receive is not OnReceive.EXCHANGE:
            assert step.send[1] <= step.receive[0] or step.receive[1] <= step.send[0], "it sends what it receives"
        self._open[rank] = ({"send"} if sends else set()) | ({"receive"} if receives else set())

    def _advance(self, rank: int) -> bool:
        """Does one thing that the rank can do; returns whether there was one."""
        todo = self._open[rank]
        if "send" in todo and self._leaves(rank):
            return True
        if "receive" in todo:
            source = self._step(rank).receive_from
            assert source is not None
            if self._sent.get((source, rank)):
                self._receive(rank, self._sent[source, rank].popleft())
                return True
        return False

    def _leaves(self, rank: int) -> bool:
        step = self._step(rank)
        receiver, (first, end) = step.send_to, step.send
        assert receiver is not None
        sent = Sent(self._sources[rank][first:end], self._known[rank])
        assert len(sent.payload) == end - first, "it sends what it does not have"
        if sent.payload:
            self.links.add((rank, receiver))
        queue = self._sent.setdefault((rank, receiver), deque())
        if self._way(rank, receiver, end - first) is Way.BUFFERED:
            queue.append(sent)
            self._done(rank, "send")
            return True
        waits = "receive" in self._open[receiver] and self._step(receiver).receive_from == rank
        if not waits or queue:
            return False
        self._done(rank, "send")
        self._receive(receiver, sent)
        return True

    def _receive(self, rank: int, sent: Sent) -> None:
        step = self._step(rank)
        start, end = step.receive
        assert len(sent.payload) == end - start, "another length than is to come"
        self.received[rank] |= sent.known
        target = self._targets[rank]
        if step.on_receive is OnReceive.COMBINE:
            target[start:end] = in_order(step, sent.payload, target[start:end])
        elif step.on_receive is OnReceive.EXCHANGE:
            self._kept[rank] = sent.payload
        else:
            target[start:end] = sent.payload
        self._done(rank, "receive")

    def _done(self, rank: int, what: str) -> None:
        self._open[rank].discard(what)
        if self._open[rank]:
            return
        kept = self._kept[rank]
        if kept is not None:
            step = self._step(rank)
            assert step.receive_from is not None
            first, end = step.receive
            target = self._targets[rank]
            target[first:end] = in_order(step, kept, target[first:end])
            self._kept[rank] = None
        self._next[rank] += 1
        self._begin(rank)
