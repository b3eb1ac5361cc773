"""Runs schedules: checks headers, sends and receives concurrently, and reduces what arrives.

It runs in the calling thread and cannot deadlock at any size: sends and receives progress independently, and every wait
ends at the deadline or when the group fails.
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
from cyxtrain.ring.schedules.algorithms import Multicast, OnReceive, Transfer
from cyxtrain.ring.schedules.reduction import Buffers, Stage
from cyxtrain.ring.schedules.selector import SHORT_BYTES
from cyxtrain.ring.schedules.summation import Span
from cyxtrain.ring.wire.frames import (
    HEADER_BYTES,
    FrameError,
    Numbered,
    Operation,
    damaged_error,
    decode_header,
    expected_header,
    header,
    is_damaged,
    mismatch_error,
)
from cyxtrain.ring.wire.link import Deadline, Link, LinkBroken, Pollable, Poller
from cyxtrain.ring.wire.persistent import PersistentOperation, ProgressCounter, Rounds
from cyxtrain.ring.wire.transfers import (
    CorruptData,
    DescriptorTransfer,
    ExpectedFrame,
    Incoming,
    Outgoing,
    UnexpectedHeader,
    begin_sending,
    begin_sending_frame,
)

_MISMATCH_CHECK_SECONDS = 0.1
"""After this wait a rank checks the links from which it expects nothing yet."""
_LONG_SECONDS = 0.5
"""After this wait a rank tells all ranks which one it waits for, so that a timeout names the slow rank."""
_SPIN_SECONDS = 1e-4
"""How long a rank polls before it blocks: waking up takes longer than most answers."""
_COUNTER_SPIN_SECONDS = 1e-3
"""Polling of a progress counter: nothing wakes a rank that waits for it."""
_SHORTEST_BACKOFF_SECONDS = 1e-4
_LONGEST_BACKOFF_SECONDS = 2e-3
"""After polling, it sleeps between checks of the counter for a tenth of the wait so far, within these bounds."""
_yield_cpu = vars(os).get("sched_yield", partial(time.sleep, 0))
"""Yields the core: with more ranks than cores another process may be the awaited rank."""


_Sending = Outgoing | DescriptorTransfer
_Receiving = Incoming | ExpectedFrame | DescriptorTransfer | ProgressCounter


class _Call(NamedTuple):
    """A running operation."""

    operation: Operation
    deadline: Deadline
    identity: bytes
    buffers: Buffers


class Executor:
    """Runs schedules over the links of one rank to all others."""

    def __init__(self, links: dict[int, Link], mailbox: Mailbox, monitor: PeerMonitor) -> None:
        self._checksums = next(iter(links.values())).checksums
        self._rank = monitor.rank  # global, like `Link.rank`, as errors and reports name ranks
        self._links = links  # by rank in the group
        self._mailbox = mailbox
        self._monitor = monitor
        self._poller = Poller()
        self._receive_buffer = memoryview(bytearray(HEADER_BYTES + SHORT_BYTES))
        # False in the collective thread: spinning would keep the GIL from the thread that computes.
        self.spin_before_blocking = True

    def run(self, operation: Operation, stages: Iterable[Stage], timeout: timedelta) -> None:
        """Do this rank's part of an operation; any error ends the group."""
        identity = operation.identity()
        deadline = Deadline(timeout.total_seconds())
        try:
            for schedule, buffers in stages:
                call = _Call(operation, deadline, identity, buffers)
                for step in schedule:
                    if isinstance(step, Transfer):
                        self._transfer(step, call)
                    else:
                        self._multicast(step, call)
        except BaseException as error:
            raise self._fail(error, operation) from None

    def run_persistent(self, operation: PersistentOperation, rounds: Rounds, timeout: timedelta) -> None:
        """Do this rank's part of a persistent operation; any error ends the group."""
        deadline: Deadline | None = None
        expected = b""
        try:
            # All rounds have the same header: links are FIFO, so the frame of an earlier round arrives first.
            for sends, receives in rounds:
                # With progress counters there is often no round, and nothing to prepare.
                if deadline is None:
                    deadline = Deadline(timeout.total_seconds())
                    expected = operation.write_number()
                if sends:
                    operation.seal()
                for link in sends:
                    outgoing = begin_sending_frame(link, operation.frame)
                    if outgoing is not None:
                        self._progress(outgoing, None, operation, deadline)
                for incoming in receives:
                    incoming.expect(expected)
                    spin_seconds = _COUNTER_SPIN_SECONDS if isinstance(incoming, ProgressCounter) else _SPIN_SECONDS
                    self._progress(None, incoming, operation, deadline, spin_seconds)
        except BaseException as error:
            raise self._fail(error, operation) from None

    def share_descriptor(self, operation: Operation, descriptor: int, src: int, timeout: timedelta) -> int:
        """Send rank `src`'s descriptor to all ranks over Unix sockets, right after a broadcast, under its number."""
        deadline = Deadline(timeout.total_seconds())
        try:
            if descriptor >= 0:
                for link in self._links.values():
                    self._progress(DescriptorTransfer(link, descriptor), None, operation, deadline)
                return descriptor
            incoming = DescriptorTransfer(self._links[src])
            self._progress(None, incoming, operation, deadline)
            return incoming.descriptor
        except BaseException as error:
            raise self._fail(error, operation) from None

    def _fail(self, error: BaseException, operation: Numbered) -> BaseException:
        """End the group because of `error`; return what the call raises: the error of the group, or Ctrl-C itself."""
        during = operation.describe()
        # Whatever it turns out to be: the program sees that this call failed.
        self._monitor.failure.is_raised = True
        if isinstance(error, LinkBroken):
            error = self._monitor.broken_link_error(error.rank, error.reason)
        elif isinstance(error, UnexpectedHeader):
            error = mismatch_error(self._rank, operation, error.rank, error.found)
        elif isinstance(error, CorruptData):
            error = damaged_error(error.rank, self._rank, during)
        if isinstance(error, CyxtrainError):
            self._monitor.fail(error)
            return self._monitor.failure.call_error(during)
        # After Ctrl-C, say, the streams are out of step, so no later result could be right.
        reason = f"rank {self._rank} was interrupted in {during} by {error!r}: start all ranks again."
        self._monitor.fail(PeerLostError(reason, rank=self._rank, during=during))
        return error

    def _transfer(self, transfer: Transfer, call: _Call) -> None:
        buffers = call.buffers
        item = buffers.item_bytes
        outgoing: Outgoing | None = None
        incoming: _Receiving | None = None
        if transfer.send_to is not None:
            first, end = transfer.send
            payload = buffers.source[first * item : end * item]
            outgoing = begin_sending(self._links[transfer.send_to], call.identity, payload)
        if transfer.receive_from is not None:
            first, end = transfer.receive
            is_short = (end - first) * item <= SHORT_BYTES
            if is_short and transfer.on_receive is OnReceive.REPLACE:
                incoming = self._short_frame(transfer.receive_from, transfer.receive, call)
            else:
                link = self._links[transfer.receive_from]
                incoming = Incoming(link, call.identity, transfer, buffers, self._receive_buffer)
        self._progress(outgoing, incoming, call.operation, call.deadline)
        if transfer.on_receive is OnReceive.EXCHANGE and isinstance(incoming, Incoming):
            incoming.combine()

    def _multicast(self, step: Multicast, call: _Call) -> None:
        if step.to:
            first, end = step.send
            item = call.buffers.item_bytes
            payload = call.buffers.source[first * item : end * item]
            begin = expected_header(call.identity, len(payload))
            frame = header(begin, payload, checksums=self._checksums) + payload
            for rank in step.to:
                outgoing = begin_sending_frame(self._links[rank], frame)
                self._progress(outgoing, None, call.operation, call.deadline)
        for peer, span in zip(step.sources, step.receive, strict=True):
            incoming = self._short_frame(peer, span, call)
            self._progress(None, incoming, call.operation, call.deadline)

    def _short_frame(self, peer: int, span: Span, call: _Call) -> ExpectedFrame:
        first, end = span
        item = call.buffers.item_bytes
        target = call.buffers.target[first * item : end * item]
        expected = expected_header(call.identity, len(target))
        return ExpectedFrame(self._links[peer], self._receive_buffer[: HEADER_BYTES + len(target)], expected, target)

    def _progress(
        self,
        outgoing: _Sending | None,
        incoming: _Receiving | None,
        operation: Numbered,
        deadline: Deadline,
        spin_seconds: float = _SPIN_SECONDS,
    ) -> None:
        """Progress both until they are done."""
        spin_until = 0.0
        while outgoing or incoming:
            moved = False
            if outgoing:
                moved = outgoing.advance()
                if outgoing.done:
                    outgoing = None
            if incoming:
                moved = incoming.advance() or moved
                if incoming.done:
                    incoming = None
            # Bytes that move are often followed by more: the rank polls anew before it blocks.
            if moved:
                spin_until = 0.0
                continue
            now = time.monotonic()
            if not spin_until:
                spin_until = now
                if self.spin_before_blocking:
                    spin_until += spin_seconds
            if now < spin_until:
                _yield_cpu()
            else:
                self._wait(incoming, outgoing, operation, deadline)

    def _wait(
        self,
        incoming: _Receiving | None,
        outgoing: _Sending | None,
        operation: Numbered,
        deadline: Deadline,
    ) -> None:
        """Wait until this transfer can continue; progress point-to-point traffic meanwhile."""
        waited_for = (incoming or outgoing).link  # type: ignore[union-attr]
        since = time.monotonic()
        # At the latest half-way, so that reports arrive before a short timeout ends.
        report_deadline = Deadline(min(_LONG_SECONDS, deadline.left() / 2))
        while not report_deadline.passed():
            if self._poll(incoming, outgoing, deadline, min(_MISMATCH_CHECK_SECONDS, report_deadline.left())):
                return
            self._check_for_mismatch(operation, incoming, deadline)
        with self._monitor.waiting(operation, waited_for.rank, since):
            while not self._poll(incoming, outgoing, deadline) and not deadline.passed():
                self._check_for_mismatch(operation, incoming, deadline)
        if deadline.passed():
            raise self._timeout_error(operation, waited_for.rank, deadline)

    def _timeout_error(self, operation: Numbered, waited_for: int, deadline: Deadline) -> CollectiveTimeoutError:
        peer = self._monitor.find_straggler(operation.sequence, waited_for)
        return CollectiveTimeoutError(
            f"rank {self._rank} timed out in {operation.describe()}: it waited for rank {peer} until its timeout of "
            f"{deadline.seconds:g} s was over. Look at what rank {peer} does; collective_timeout_ms sets the timeout.",
            rank=peer,
            during=operation.describe(),
        )

    def _check_for_mismatch(self, operation: Numbered, incoming: _Receiving | None, deadline: Deadline) -> None:
        """Raise if another rank is in another collective: mismatched schedules may never exchange a frame."""
        began = time.monotonic()
        expecting: Link | None = None
        if isinstance(incoming, ProgressCounter):
            self._probe(incoming, operation, deadline)
        elif incoming is not None:
            # The transfer itself checks the header that it expects.
            expecting = incoming.link
        identity = operation.identity()
        for link in self._links.values():
            if link is not expecting:
                self._check_next_frame(link, operation, identity)
        # The process may have been suspended here too.
        deadline.extend_if_suspended(time.monotonic() - began)

    def _check_next_frame(self, link: Link, operation: Numbered, identity: bytes) -> None:
        """Raise if the next frame of a link is damaged, or of another operation with the same number."""
        found = link.peek(HEADER_BYTES)
        if len(found) < HEADER_BYTES or found.startswith(identity):
            return
        if is_damaged(found, self._checksums):
            raise CorruptData(link.rank)
        with contextlib.suppress(FrameError):
            other, _ = decode_header(found)
            if other.sequence == operation.sequence:
                raise UnexpectedHeader(link.rank, found)

    def _poll(
        self,
        incoming: _Receiving | None,
        outgoing: _Sending | None,
        deadline: Deadline,
        longest_seconds: float = _LONG_SECONDS,
    ) -> bool:
        if isinstance(incoming, ProgressCounter):
            return self._poll_counter(incoming, Deadline(min(deadline.left(), longest_seconds)), deadline)
        readers: list[Pollable] = []
        writers: list[Pollable] = []
        if incoming:
            readers.append(incoming.link)
        if outgoing:
            writers.append(outgoing.link)
        if self._mailbox.busy:
            self._mailbox.progress()
            waiting_readers, waiting_writers = self._mailbox.waiting()
            readers += waiting_readers
            writers += waiting_writers
        return self._poller.wait(readers, writers, deadline, longest_seconds)

    def _poll_counter(self, counter: ProgressCounter, until: Deadline, deadline: Deadline) -> bool:
        """Return whether a peer's counter is reached before `until`; progress messages meanwhile."""
        began = time.monotonic()
        while not counter.advance():
            # The peer may have counted before it left: look once more.
            if self._monitor.is_closed(counter.link.rank) and not counter.advance():
                raise LinkBroken(counter.link.rank, "its progress counter stopped")
            if self._mailbox.busy:
                self._mailbox.progress()
            now = time.monotonic()
            backoff_seconds = min(max((now - began) / 10, _SHORTEST_BACKOFF_SECONDS), _LONGEST_BACKOFF_SECONDS)
            time.sleep(backoff_seconds)
            deadline.extend_if_suspended(time.monotonic() - now - backoff_seconds)
            if until.passed():
                return False
        return True

    def _probe(self, counter: ProgressCounter, operation: Numbered, deadline: Deadline) -> None:
        """Probe a peer whose counter does not move, once: if it is in another collective, it now finds out."""
        probe = counter.probe(operation.sequence)
        if probe is None:
            return
        # Not sealed: counters exist only if frames have no checksums (`can_share_memory`).
        outgoing = begin_sending_frame(counter.link, probe)
        if outgoing is not None:
            self._progress(outgoing, None, operation, deadline)


class SingleRankExecutor:
    """The executor of a world of one rank: nothing is sent."""

    spin_before_blocking = True

    def run(self, operation: Operation, stages: Iterable[Stage], timeout: timedelta) -> None:
        """Do the arithmetic between the stages."""
        for _ in stages:
            pass

    def run_persistent(self, operation: PersistentOperation, rounds: Rounds, timeout: timedelta) -> None:
        """Raise: a world of one has no persistent operations."""
        raise NotImplementedError

    def share_descriptor(self, operation: Operation, descriptor: int, src: int, timeout: timedelta) -> int:
        """Return its own descriptor."""
        return descriptor
