"""All ranks of a schedule at once, without sockets: what they send, read and offer is moved by hand, in any order.

What a rank sends goes in one of three ways. Handed over: together with its receive, so that what comes through here
needs no buffer anywhere. Buffered: it leaves at once, as a copy. Offered: it stays where it is, and whoever receives
it reads it there, later.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from cyxtrain.ring.schedules.algorithms import NOTHING, Multicast, OnReceive, ReadReduce, Step, Transfer

GARBAGE = "garbage"


class Way(enum.Enum):
    """How a payload goes."""

    HANDED_OVER = 0
    BUFFERED = 1
    OFFERED = 2


class Sent(NamedTuple):
    """What is on its way: for an offer, the memory, and how it was when it was offered."""

    payload: list[Any]
    known: frozenset[int]
    memory: list[Any] | None = None
    first: int = 0


class ChangedError(AssertionError):
    """An offer is no longer what it was when somebody reads it."""


def own(rank: int, count: int) -> list[Any]:
    """The elements that a rank brings: each says whose it is, and where it was."""
    return [(rank, position) for position in range(count)]


def combined(one: Any, other: Any) -> Any:
    """Two elements in the order in which they are combined; what was combined before stands in brackets."""
    assert one[1] == other[1], "elements of two positions"
    return ((one[0], other[0]), one[1])


def handed_over(sender: int, receiver: int, length: int, on_receive: OnReceive) -> Way:
    return Way.HANDED_OVER


def buffered(sender: int, receiver: int, length: int, on_receive: OnReceive) -> Way:
    return Way.BUFFERED


def handed_over_where_long(sender: int, receiver: int, length: int, on_receive: OnReceive) -> Way:
    """As where no buffer has room for what is long; what says nothing finds room in any."""
    return Way.HANDED_OVER if length else Way.BUFFERED


def offered(sender: int, receiver: int, length: int, on_receive: OnReceive) -> Way:
    """As where all ranks can read each other, and everything is large; what says nothing needs no memory."""
    return Way.OFFERED if length and on_receive is not OnReceive.EXCHANGE else Way.BUFFERED


def apart(schedule: Sequence[Step]) -> list[ReadReduce | Transfer]:
    """The schedule with what a rank tells several, and hears of several, one after the other."""
    result: list[ReadReduce | Transfer] = []
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
        way: How payloads go, by sender, receiver, length, and what is done with them.
        order: Who goes first where several can; the last one moves only when nobody else can. None: by rank.
        settles: Whether ranks end only when all who read from them have said so, as the mesh sees to it.

    Attributes:
        results: What each rank had in its target when it ended. Its memory is garbage from then on.
        heard: By rank, of whom it has heard.
        links: Between which ranks elements went, as (sender, receiver).
    """

    def __init__(
        self,
        schedules: Sequence[Sequence[Step]],
        sources: list[list[Any]],
        targets: list[list[Any]] | None = None,
        way: Callable[[int, int, int, OnReceive], Way] = handed_over,
        order: Sequence[int] | None = None,
        *,
        settles: bool = True,
    ) -> None:
        self._size = len(schedules)
        self._schedules = [apart(schedule) for schedule in schedules]
        self._sources, self._targets = sources, sources if targets is None else targets
        self._way = way
        self._order = range(self._size) if order is None else order
        self._sent: dict[tuple[int, int], deque[Sent]] = {}
        self._read: list[set[int]] = [set() for _ in schedules]
        self._offered: list[set[int]] = [set() for _ in schedules]
        self._settled = [not settles] * self._size
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

    def _step(self, rank: int) -> ReadReduce | Transfer | None:
        schedule = self._schedules[rank]
        return schedule[self._next[rank]] if self._next[rank] < len(schedule) else None

    def _transfer(self, rank: int) -> Transfer:
        """Return the rank's current step, which is a transfer."""
        step = self._step(rank)
        assert isinstance(step, Transfer)
        return step

    def _begin(self, rank: int) -> None:
        """Notes what is to be done in the rank's next step; ends it where there is none."""
        step = self._step(rank)
        if step is None and not self._settled[rank]:
            self._settled[rank] = True
            self._schedules[rank] += [Transfer(peer, NOTHING, None, NOTHING) for peer in sorted(self._read[rank])]
            self._schedules[rank] += [Transfer(None, NOTHING, peer, NOTHING) for peer in sorted(self._offered[rank])]
            step = self._step(rank)
        self._known[rank] = frozenset(self.received[rank])
        if step is None:
            self.results[rank] = list(self._targets[rank])
            for memory in (self._sources[rank], self._targets[rank]):
                memory[:] = [GARBAGE] * len(memory)
            self._open[rank] = set()
        elif isinstance(step, ReadReduce):
            self._open[rank] = {"fold"}
        else:
            sends, receives = step.send_to is not None, step.receive_from is not None
            if sends and receives and self._sources is self._targets and step.on_receive is not OnReceive.EXCHANGE:
                assert step.send[1] <= step.receive[0] or step.receive[1] <= step.send[0], "it sends what it receives"
            self._open[rank] = ({"send"} if sends else set()) | ({"receive"} if receives else set())

    def _advance(self, rank: int) -> bool:
        """Does one thing that the rank can do; returns whether there was one."""
        step, todo = self._step(rank), self._open[rank]
        if isinstance(step, ReadReduce):
            if not all(self._sent.get((source, rank)) for source in step.sources):
                return False
            self._read_reduce(rank, step)
            self._done(rank, "fold")
            return True
        if "send" in todo and self._leaves(rank):
            return True
        if "receive" in todo:
            source = self._transfer(rank).receive_from
            assert source is not None
            if self._sent.get((source, rank)):
                self._receive(rank, self._sent[source, rank].popleft())
                return True
        return False

    def _leaves(self, rank: int) -> bool:
        step = self._transfer(rank)
        receiver, (first, end) = step.send_to, step.send
        assert receiver is not None
        memory = self._sources[rank]
        payload = memory[first:end]
        assert len(payload) == end - first, "it sends what it does not have"
        way = self._way(rank, receiver, end - first, step.on_receive)
        if payload:
            self.links.add((rank, receiver))
        queue = self._sent.setdefault((rank, receiver), deque())
        if way is Way.HANDED_OVER:
            theirs = self._step(receiver)
            waits = isinstance(theirs, Transfer) and "receive" in self._open[receiver] and theirs.receive_from == rank
            if not waits or queue:
                return False
            known = self._known[rank]
            self._done(rank, "send")
            self._receive(receiver, Sent(payload, known))
            return True
        offer = way is Way.OFFERED
        queue.append(Sent(payload, self._known[rank], memory if offer else None, first))
        if offer:
            self._offered[rank].add(receiver)
        self._done(rank, "send")
        return True

    def _taken(self, rank: int, source: int, sent: Sent, length: int) -> list[Any]:
        """Returns a payload, read now where it was offered."""
        assert len(sent.payload) == length, "another length than is to come"
        if sent.memory is not None:
            self._read[rank].add(source)
            if sent.memory[sent.first : sent.first + length] != sent.payload:
                raise ChangedError(f"rank {rank} reads of rank {source} what has changed")
        self.received[rank] |= sent.known
        return sent.payload

    def _receive(self, rank: int, sent: Sent) -> None:
        step = self._transfer(rank)
        start, end = step.receive
        assert step.receive_from is not None
        payload = self._taken(rank, step.receive_from, sent, end - start)
        target = self._targets[rank]
        if step.on_receive is OnReceive.COMBINE:
            target[start:end] = map(combined, payload, target[start:end])
        elif step.on_receive is OnReceive.EXCHANGE:
            self._kept[rank] = payload
        else:
            target[start:end] = payload
        self._done(rank, "receive")

    def _read_reduce(self, rank: int, fold: ReadReduce) -> None:
        start, end = fold.span
        target = self._targets[rank]
        parts = [self._taken(rank, other, self._sent[other, rank].popleft(), end - start) for other in fold.sources]
        parts.append(target[start:end])
        total = parts[0]
        for part in parts[1:]:
            total = list(map(combined, total, part))
        target[start:end] = total

    def _done(self, rank: int, what: str) -> None:
        self._open[rank].discard(what)
        if self._open[rank]:
            return
        kept = self._kept[rank]
        if kept is not None:
            step = self._transfer(rank)
            assert step.receive_from is not None
            first, end = step.receive
            here, target = self._targets[rank][first:end], self._targets[rank]
            lower = step.receive_from < rank
            target[first:end] = map(combined, kept, here) if lower else map(combined, here, kept)
            self._kept[rank] = None
        self._next[rank] += 1
        self._begin(rank)
