"""Runs schedules: checks headers, sends and receives at once, and combines what arrives.

It works in the calling thread and cannot deadlock at any size: a send never waits while something can be received, nor
the other way round, and every wait ends at the deadline or when the group fails.

Memory that others read in place stays unchanged until they have acknowledged it, at the end of the operation: what an
all_reduce writes to a chunk was made of that chunk, after it was read.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from datetime import timedelta
from functools import partial
from typing import NamedTuple

from cyxtrain.errors import CollectiveTimeoutError, CyxtrainError, PeerLostError
from cyxtrain.ring.messages import Mailbox
from cyxtrain.ring.monitoring.monitor import PeerMonitor
from cyxtrain.ring.schedules.algorithms import NOTHING, Multicast, OnReceive, ReadReduce, Span, Transfer
from cyxtrain.ring.schedules.selector import SHORT_BYTES
from cyxtrain.ring.wire.frames import (
    HEADER_BYTES,
    FrameError,
    Numbered,
    Operation,
    at_operation,
    damaged,
    decode_header,
    expected_header,
    header,
    is_damaged,
    mismatch,
)
from cyxtrain.ring.wire.link import Deadline, Link, LinkBroken, Pollable, Poller
from cyxtrain.ring.wire.peer_read import LargePages
from cyxtrain.ring.wire.persistent import ExpectedFrame, PersistentHeader, ProgressCounter, Rounds
from cyxtrain.ring.wire.transfers import (
    Buffers,
    CorruptData,
    Incoming,
    IncomingDescriptor,
    Outgoing,
    OutgoingDescriptor,
    ShortIncoming,
    Stage,
    UnexpectedHeader,
    begin_sending,
    begin_sending_frame,
    is_offered,
    reduce_offers,
)

_NO_BYTES = memoryview(b"")
_LOOK_SECONDS = 0.1
"""After this wait a rank checks the links from which it expects nothing yet."""
_LONG_SECONDS = 0.5
"""After this wait a rank reports to all for whom it waits, so that a timeout names the slow rank."""
_SPIN_SECONDS = 1e-4
"""How long a rank polls before it sleeps: waking costs more than most answers take."""
_READING_SECONDS, _LONGEST_READING_SECONDS = 3e-10, 1e-3
"""Additional polling for each byte that another rank reads from this one, and its limit."""
_COUNTER_SPIN_SECONDS = 1e-3
"""Polling of a progress counter: nothing wakes a rank that waits for it."""
_SHORTEST_NAP_SECONDS, _LONGEST_NAP_SECONDS = 1e-4, 2e-3
"""Then it sleeps for a tenth of the wait so far between checks, within these bounds."""
_give_way = vars(os).get("sched_yield", partial(time.sleep, 0))
"""Yields the core: with more ranks than cores another process may be the awaited rank."""


_Incoming = Incoming | ShortIncoming | IncomingDescriptor | ExpectedFrame | ProgressCounter


class _Call(NamedTuple):
    """A running operation."""

    operation: Operation
    deadline: Deadline
    identity: bytes
    buffers: Buffers


class Executor:
    """The links of one rank to all others, and the running of schedules over them.

    Attributes:
        spins: Whether to poll before sleeping; not while another thread wants Python's lock.
    """

    def __init__(self, links: dict[int, Link], mailbox: Mailbox, watch: PeerMonitor) -> None:
        self._checksums = next(iter(links.values())).checksums
        self._rank = watch.rank
        self._links = links
        self._mailbox = mailbox
        self._watch = watch
        self._poller = Poller()
        self._landing = memoryview(bytearray(HEADER_BYTES + SHORT_BYTES))
        self.spins = True
        self._is_read = any(link.offers for link in links.values())
        self._pages = LargePages()
        self._offered: set[int] = set()
        self._read: set[int] = set()

    def run(self, operation: Operation, stages: Iterable[Stage], deadline: Deadline) -> None:
        """Do this rank's part of an operation; any error ends the group."""
        identity = operation.identity()
        try:
            for schedule, buffers, more in stages:
                if self._is_read:
                    self._pages.note(buffers.source)
                call = _Call(operation, deadline, identity, buffers)
                for step in schedule:
                    if isinstance(step, Transfer):
                        self._transfer(step, call)
                    elif isinstance(step, Multicast):
                        self._multicast(step, call)
                    else:
                        self._read_reduce(step, call)
                if not more and (self._offered or self._read):
                    self._acknowledge(call)
        except BaseException as error:
            raise self._failed(error, operation) from None

    def take_rounds(self, opening: PersistentHeader, rounds: Rounds, timeout: timedelta) -> None:
        """Do this rank's part of a persistent operation; any error ends the group."""
        deadline, head = None, b""
        try:
            for sends, receives in rounds:  # links keep the order of frames
                if deadline is None:  # often there is nothing to send or receive
                    deadline, head = Deadline(timeout.total_seconds()), opening.number()
                for link in sends:
                    outgoing = begin_sending_frame(link, opening.frame)
                    if outgoing is not None:
                        self._drive(outgoing, None, opening, deadline)
                for incoming in receives:
                    incoming.expect(head)
                    spin_seconds = _COUNTER_SPIN_SECONDS if isinstance(incoming, ProgressCounter) else _SPIN_SECONDS
                    self._drive(None, incoming, opening, deadline, spin_seconds)
        except BaseException as error:
            raise self._failed(error, opening) from None

    def share_descriptor(self, operation: Operation, descriptor: int, src: int, deadline: Deadline) -> int:
        """Send rank `src`'s descriptor to all ranks over Unix sockets, right after a broadcast; see `Ranks`."""
        try:
            if descriptor >= 0:
                for link in self._links.values():
                    self._drive(OutgoingDescriptor(link, descriptor), None, operation, deadline)
                return descriptor
            incoming = IncomingDescriptor(self._links[src])
            self._drive(None, incoming, operation, deadline)
            return incoming.descriptor
        except BaseException as error:
            raise self._failed(error, operation) from None

    def _failed(self, error: BaseException, operation: Numbered) -> BaseException:
        """End the group because of `error`; return what to raise: for an error of the ring, the group's first one."""
        self._watch.is_raised = True
        if isinstance(error, LinkBroken):
            error = self._watch.explain(error.rank, error.reason)
        elif isinstance(error, UnexpectedHeader):
            error = mismatch(self._rank, operation, error.rank, error.found)
        elif isinstance(error, CorruptData):
            error = damaged(error.rank, self._rank, operation.describe())
        if isinstance(error, CyxtrainError):
            return at_operation(self._watch.fail(error), operation)
        # Ctrl-C, say: the streams are out of step, so that no later result could be right.
        reason = f"rank {self._rank} was interrupted in {operation.describe()} by {error!r}: start all ranks again."
        self._watch.fail(PeerLostError(reason, rank=self._rank, during=operation.describe()))
        return error

    def _transfer(self, transfer: Transfer, call: _Call) -> None:
        to, source = transfer.send_to, transfer.receive_from
        item = call.buffers.item_bytes
        outgoing: Outgoing | None = None
        incoming: _Incoming | None = None
        if to is not None:
            link, payload = self._links[to], call.buffers.source[transfer.send[0] * item : transfer.send[1] * item]
            offered = is_offered(link.offers, len(payload), transfer.then)
            outgoing = begin_sending(link, call.identity, payload, offered=offered)
            if offered:
                self._offered.add(to)
        if source is not None:
            first, end = transfer.receive
            if transfer.then is OnReceive.REPLACE and (end - first) * item <= SHORT_BYTES:
                incoming = self._short(source, transfer.receive, call)
            else:
                incoming = self._incoming(source, transfer.receive, transfer.then, call)
                if incoming.offered:
                    self._read.add(source)
        self._drive(outgoing, incoming, *call[:2])
        if transfer.then is OnReceive.EXCHANGE and isinstance(incoming, Incoming):
            incoming.combine(theirs_first=incoming.link.rank < self._rank)

    def _read_reduce(self, step: ReadReduce, call: _Call) -> None:
        offers = []
        for source in step.sources:
            offers.append(self._incoming(source, step.span, OnReceive.READ_REDUCE, call))
            self._drive(None, offers[-1], *call[:2])
        reduce_offers(offers, step.span, call.buffers)
        self._read.update(step.sources)

    def _acknowledge(self, call: _Call) -> None:
        """Acknowledge the peers that this rank read from; wait until its own buffers are acknowledged."""
        read, offered = sorted(self._read), sorted(self._offered)
        spin_seconds = _SPIN_SECONDS + min(len(call.buffers.source) * _READING_SECONDS, _LONGEST_READING_SECONDS)
        self._read.clear()
        self._offered.clear()
        self._send_to_all(read, header(expected_header(call.identity, 0), _NO_BYTES, checksums=self._checksums), call)
        for peer in offered:
            self._drive(None, self._short(peer, NOTHING, call), *call[:2], spin_seconds)

    def _multicast(self, step: Multicast, call: _Call) -> None:
        source, item = call.buffers.source, call.buffers.item_bytes
        if step.to:
            payload = source[step.send[0] * item : step.send[1] * item]
            frame = header(expected_header(call.identity, len(payload)), payload, checksums=self._checksums) + payload
            self._send_to_all(step.to, frame, call)
        for other, span in zip(step.sources, step.receive, strict=True):
            self._drive(None, self._short(other, span, call), *call[:2])

    def _send_to_all(self, ranks: Iterable[int], frame: bytes, call: _Call) -> None:
        for rank in ranks:
            self._drive(begin_sending_frame(self._links[rank], frame), None, *call[:2])

    def _short(self, source: int, span: Span, call: _Call) -> ShortIncoming:
        item = call.buffers.item_bytes
        into = call.buffers.target[span[0] * item : span[1] * item]
        begin = expected_header(call.identity, len(into))
        return ShortIncoming(self._links[source], begin, into, self._landing)

    def _incoming(self, source: int, span: Span, then: OnReceive, call: _Call) -> Incoming:
        link = self._links[source]
        return Incoming(link, call.identity, span, then, call.buffers, self._landing)

    def _drive(
        self,
        outgoing: Outgoing | OutgoingDescriptor | None,
        incoming: _Incoming | None,
        operation: Numbered,
        deadline: Deadline,
        spin_seconds: float = _SPIN_SECONDS,
    ) -> None:
        """Move both until they are done."""
        spin_until = 0.0
        while outgoing or incoming:
            moved = False
            if outgoing:
                moved = outgoing.advance()
                outgoing = None if outgoing.done else outgoing
            if incoming:
                moved = incoming.advance() or moved
                incoming = None if incoming.done else incoming
            if moved:
                spin_until = 0.0
                continue
            now = time.monotonic()
            spin_until = spin_until or now + (spin_seconds if self.spins else 0.0)
            if now < spin_until:
                _give_way()
            else:
                self._wait(incoming, outgoing, operation, deadline)

    def _wait(
        self,
        incoming: _Incoming | None,
        outgoing: Outgoing | OutgoingDescriptor | None,
        operation: Numbered,
        deadline: Deadline,
    ) -> None:
        """Wait until this transfer can continue, and move messages meanwhile."""
        waited_for = (incoming or outgoing).link  # type: ignore[union-attr]
        since = time.monotonic()
        patience = Deadline(min(_LONG_SECONDS, deadline.left() / 2))
        while not patience.passed():
            if self._poll(incoming, outgoing, deadline, min(_LOOK_SECONDS, patience.left())):
                return
            self._look_around(operation, incoming, deadline)
        with self._watch.waiting(operation, waited_for.rank, since):
            while not self._poll(incoming, outgoing, deadline) and not deadline.passed():
                self._look_around(operation, incoming, deadline)
        if not deadline.passed():
            return
        peer = self._watch.blame(operation.sequence, waited_for.rank)
        raise CollectiveTimeoutError(
            f"rank {self._rank} timed out in {operation.describe()}: it waited for rank {peer} until its timeout of "
            f"{deadline.seconds:g} s was over. Look at what rank {peer} does; collective_timeout_ms sets the timeout.",
            rank=peer,
            during=operation.describe(),
        )

    def _look_around(self, operation: Numbered, incoming: _Incoming | None, deadline: Deadline) -> None:
        """Raise if another rank is in another collective: not every two schedules exchange frames."""
        identity, began = operation.identity(), time.monotonic()
        if isinstance(incoming, ProgressCounter):
            self._ask(incoming, operation, deadline)
        for link in self._links.values():
            if incoming is not None and link is incoming.link and not isinstance(incoming, ProgressCounter):
                continue
            found = link.peek(HEADER_BYTES)
            if len(found) < HEADER_BYTES or found.startswith(identity):
                continue
            if is_damaged(found, self._checksums):
                raise CorruptData(link.rank)
            with contextlib.suppress(FrameError):
                if decode_header(found)[0].sequence == operation.sequence:
                    raise UnexpectedHeader(link.rank, found)
        deadline.woke(time.monotonic() - began)  # the process may have been stopped here too

    def _poll(
        self,
        incoming: _Incoming | None,
        outgoing: Outgoing | OutgoingDescriptor | None,
        deadline: Deadline,
        longest_seconds: float = _LONG_SECONDS,
    ) -> bool:
        if isinstance(incoming, ProgressCounter):
            return self._poll_counter(incoming, Deadline(min(deadline.left(), longest_seconds)), deadline)
        readers: list[Pollable] = [incoming.link] if incoming else []
        writers: list[Pollable] = [outgoing.link] if outgoing else []
        if self._mailbox.busy:
            self._mailbox.progress()
            more_readers, more_writers = self._mailbox.waiting()
            readers, writers = readers + more_readers, writers + more_writers
        return self._poller.wait(readers, writers, deadline, longest_seconds)

    def _poll_counter(self, counter: ProgressCounter, until: Deadline, deadline: Deadline) -> bool:
        """Return whether a peer's counter is reached before `until`; messages move meanwhile."""
        began = time.monotonic()
        while not counter.advance():
            if self._watch.is_over(counter.link.rank) and not counter.advance():  # it may have counted before
                raise LinkBroken(counter.link.rank, "it shows nothing any more")
            if self._mailbox.busy:
                self._mailbox.progress()
            now = time.monotonic()
            nap_seconds = min(max((now - began) / 10, _SHORTEST_NAP_SECONDS), _LONGEST_NAP_SECONDS)
            time.sleep(nap_seconds)
            deadline.woke(time.monotonic() - now - nap_seconds)
            if until.passed():
                return False
        return True

    def _ask(self, counter: ProgressCounter, operation: Numbered, deadline: Deadline) -> None:
        """Ask a peer whose counter does not move, once: in another collective it finds out now."""
        question = counter.question(operation.sequence)
        if question is not None:
            outgoing = begin_sending_frame(counter.link, question)
            if outgoing is not None:
                self._drive(outgoing, None, operation, deadline)


class SoloExecutor:
    """The executor of a world of one: nothing is sent."""

    spins = True

    def run(self, operation: Operation, stages: Iterable[Stage], deadline: Deadline) -> None:
        """Do the arithmetic between the stages."""
        for _ in stages:
            pass

    def take_rounds(self, header: PersistentHeader, rounds: Rounds, timeout: timedelta) -> None:
        """Raise: a world of one has no persistent operations."""
        raise NotImplementedError

    def share_descriptor(self, operation: Operation, descriptor: int, src: int, deadline: Deadline) -> int:
        """Return the own descriptor."""
        return descriptor
