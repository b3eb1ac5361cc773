"""Runs a schedule: headers are checked, payloads go both ways at once, what arrives is combined on the way.

It works in the thread that calls, and cannot deadlock at any size: a send never waits while something can be
received, nor the other way round, and every wait ends at the deadline or when the group fails.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from xxhash import xxh3_64

from cyxtrain.errors import CollectiveMismatchError, CollectiveTimeoutError, CyxtrainError, PeerLostError
from cyxtrain.ring.algorithms import Transfer
from cyxtrain.ring.frames import (
    HEADER_BYTES,
    FrameError,
    Operation,
    at_operation,
    damaged,
    decode_header,
    expected_header,
    finished_header,
    is_damaged,
    payload_sum,
)
from cyxtrain.ring.link import Deadline, Link, LinkBroken, Pollable, Poller
from cyxtrain.ring.mailbox import Mailbox
from cyxtrain.ring.watching.watch import Watch

SEGMENT_BYTES = 1 << 20
"""Bytes moved by one system call at most, and combined at once: they stay in the processor's cache."""
_JOIN_BYTES = 1 << 16
"""Up to this size header and payload are copied together, which saves a system call and a packet."""
_LONG_SECONDS = 0.5
"""A rank that waits longer for another says so to all: a timeout then names who holds all up."""


@dataclass(frozen=True)
class Buffers:
    """The memory that a schedule works on, in bytes.

    Attributes:
        source: What is sent from.
        target: What is received into; the same as `source` for reductions.
        item_bytes: Bytes per element: a schedule counts elements.
        combine: Called with (first, end, scratch) in elements, to combine scratch[: end - first] with
            target[first:end]; None where nothing is reduced.
    """

    source: memoryview
    target: memoryview
    item_bytes: int
    combine: Callable[[int, int], None] | None = None
    scratch: memoryview | None = None


class _Unexpected(Exception):  # noqa: N818 - an event inside the ring, never shown as an error
    """Another header came than the one that had to come."""

    def __init__(self, rank: int, found: bytes) -> None:
        super().__init__(rank)
        self.rank = rank
        self.found = found


class _Damaged(Exception):  # noqa: N818 - an event inside the ring, never shown as an error
    """Other bytes came than were sent."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.rank = rank


class _Begins(dict[int, bytes]):
    """How the headers of an operation begin, by the bytes of the payload: chunks are of one size or two."""

    def __init__(self, identity: bytes) -> None:
        super().__init__()
        self._identity = identity

    def __missing__(self, payload_bytes: int) -> bytes:
        begin = self[payload_bytes] = expected_header(self._identity, payload_bytes)
        return begin


class _Outgoing:
    """What one transfer sends: a header, then the payload."""

    def __init__(self, link: Link, head: bytes, payload: memoryview) -> None:
        self.link = link
        if len(payload) <= _JOIN_BYTES:
            self._parts = [memoryview(head + payload)]
        else:
            self._parts = [memoryview(head), payload]

    def advance(self) -> bool:
        """Sends what the kernel takes; returns whether anything moved."""
        parts = self._parts
        if len(parts) == 1:
            sent = self.link.send(parts[0][:SEGMENT_BYTES])
        else:
            sent = self.link.send_both(parts[0], parts[1][:SEGMENT_BYTES])
        left = sent
        while parts and left >= len(parts[0]):
            left -= len(parts.pop(0))
        if left:
            parts[0] = parts[0][left:]
        return sent > 0

    @property
    def done(self) -> bool:
        return not self._parts


class _Incoming:
    """What one transfer receives: the header that must come, then the payload, replaced or combined."""

    def __init__(
        self, link: Link, begins: _Begins, transfer: Transfer, buffers: Buffers, head: bytearray, checksums: bool
    ) -> None:
        self.link = link
        self._head = head
        self._head_view = memoryview(head)
        self._combine = buffers.combine if transfer.reduce else None
        self._item = buffers.item_bytes
        self._first = transfer.receive[0]
        self._total = (transfer.receive[1] - self._first) * self._item
        self._expected = begins[self._total]
        self._payload = buffers.target[self._first * self._item : self._first * self._item + self._total]
        self._scratch = buffers.scratch
        self._sum = xxh3_64() if checksums else None
        self._head_have = 0
        self._have = 0
        self._combined = 0
        self._checked = False

    def advance(self) -> bool:
        """Receives what has arrived; returns whether anything moved."""
        if not self._checked:
            return self._receive_head()
        count = self.link.receive(self._room())
        self._took(count)
        return count > 0

    @property
    def done(self) -> bool:
        return self._checked and self._have == self._total

    def _receive_head(self) -> bool:
        """Receives the header, and with it what of the payload has arrived: into its place, and not used yet."""
        count = self.link.receive_both(self._head_view[self._head_have :], self._room())
        self._head_have += count
        if self._head_have >= HEADER_BYTES:
            if self._sum is not None and is_damaged(self._head):
                raise _Damaged(self.link.rank)
            if not self._head.startswith(self._expected):
                raise _Unexpected(self.link.rank, bytes(self._head))
            self._checked = True
            self._took(self._head_have - HEADER_BYTES)
        return count > 0

    def _room(self) -> memoryview:
        """Returns where the next bytes of the payload go."""
        if self._combine is None:
            return self._payload[self._have : self._have + SEGMENT_BYTES]
        assert self._scratch is not None
        end = min(self._combined + len(self._scratch), self._total)
        return self._scratch[self._have - self._combined : end - self._combined]

    def _took(self, count: int) -> None:
        """Makes use of so many bytes more."""
        if self._sum is not None and count:
            self._sum.update(self._room()[:count])
        self._have += count
        if self._combine is not None and self._scratch is not None:
            end = min(self._combined + len(self._scratch), self._total)
            if self._have == end:
                self._combine(self._first + self._combined // self._item, self._first + end // self._item)
                self._combined = end
        if self._sum is not None and self._have == self._total:
            self._check_sum(self._sum.digest())

    def _check_sum(self, found: bytes) -> None:
        # What was combined by now is wrong; nobody sees it, as the group fails.
        if found != payload_sum(self._head):
            raise _Damaged(self.link.rank)


class Mesh:
    """The links of one rank to all others, and the running of schedules over them.

    Args:
        links: To each other rank, for collectives.
        mailbox: Messages between two ranks, which go on while a collective waits.
        watch: Knows why a link broke.
        checksums: Whether frames carry them.
    """

    def __init__(self, links: dict[int, Link], mailbox: Mailbox, watch: Watch, checksums: bool) -> None:
        self._checksums = checksums
        self._rank = watch.rank
        self._links = links
        self._mailbox = mailbox
        self._watch = watch
        self._poller = Poller()
        self._head = bytearray(HEADER_BYTES)  # one comes at a time

    def run(
        self,
        operation: Operation,
        schedule: Sequence[Transfer],
        buffers: Buffers,
        deadline: Deadline,
    ) -> None:
        """Does this rank's transfers, in order.

        Args:
            operation: What the ranks must agree on.
            schedule: This rank's transfers.
            buffers: What they work on.
            deadline: When to give up.

        Raises:
            PeerLostError, CollectiveMismatchError, CollectiveTimeoutError, DamagedFrameError: And the group has failed.
        """
        begins = _Begins(operation.identity())
        try:
            for transfer in schedule:
                self._transfer(begins, transfer, buffers, operation, deadline)
        except LinkBroken as broken:
            raise self._fail(self._watch.explain(broken.rank, broken.reason), operation) from None
        except _Unexpected as unexpected:
            raise self._fail(self._mismatch(operation, unexpected), operation) from None
        except _Damaged as found:
            raise self._fail(damaged(found.rank, self._rank, operation.describe()), operation) from None
        except CyxtrainError as error:
            raise self._fail(error, operation) from None
        except BaseException as error:
            # Ctrl-C in the middle, say: the streams are out of step, nothing that follows could be right.
            reason = f"rank {self._rank} was interrupted in {operation.describe()} by {error!r}."
            self._watch.fail(PeerLostError(reason, rank=self._rank, during=operation.describe()))
            raise

    def _fail(self, error: CyxtrainError, operation: Operation) -> CyxtrainError:
        """Ends the group because of `error`, and returns the error to raise: the first one, seen from here."""
        return at_operation(self._watch.fail(error), operation)

    def _transfer(
        self,
        begins: _Begins,
        transfer: Transfer,
        buffers: Buffers,
        operation: Operation,
        deadline: Deadline,
    ) -> None:
        item = buffers.item_bytes
        outgoing: _Outgoing | None = None
        incoming: _Incoming | None = None
        if transfer.send_to is not None:
            payload = buffers.source[transfer.send[0] * item : transfer.send[1] * item]
            head = finished_header(begins[len(payload)], payload, checksums=self._checksums)
            outgoing = _Outgoing(self._links[transfer.send_to], head, payload)
        if transfer.receive_from is not None:
            link = self._links[transfer.receive_from]
            incoming = _Incoming(link, begins, transfer, buffers, self._head, self._checksums)
        while outgoing or incoming:
            moved = False
            if outgoing:
                moved = outgoing.advance()
                outgoing = None if outgoing.done else outgoing
            if incoming:
                moved = incoming.advance() or moved
                incoming = None if incoming.done else incoming
            if not moved and (outgoing or incoming):
                self._wait(incoming, outgoing, operation, deadline)

    def _wait(
        self, incoming: _Incoming | None, outgoing: _Outgoing | None, operation: Operation, deadline: Deadline
    ) -> None:
        """Waits until this transfer can go on, and moves messages meanwhile."""
        waited_for = (incoming or outgoing).link  # type: ignore[union-attr]
        since = time.monotonic()
        if not self._poll(incoming, outgoing, deadline, min(_LONG_SECONDS, deadline.left() / 2)):
            with self._watch.waiting(operation, waited_for.rank, since):
                while not self._poll(incoming, outgoing, deadline) and not deadline.passed():
                    pass  # in pieces: another thread may post messages meanwhile, which are to move too
        if not deadline.passed():
            return
        peer = self._watch.blame(operation.sequence, waited_for.rank)
        raise CollectiveTimeoutError(
            f"rank {self._rank} waited for rank {peer} in {operation.describe()} until the deadline. "
            f"Look at what rank {peer} does; collective_timeout_ms sets the deadline.",
            rank=peer,
            during=operation.describe(),
        )

    def _poll(
        self,
        incoming: _Incoming | None,
        outgoing: _Outgoing | None,
        deadline: Deadline,
        longest_seconds: float = _LONG_SECONDS,
    ) -> bool:
        readers: list[Pollable] = [incoming.link] if incoming else []
        writers: list[Pollable] = [outgoing.link] if outgoing else []
        if self._mailbox.busy:
            self._mailbox.progress()
            more_readers, more_writers = self._mailbox.waiting()
            readers, writers = readers + more_readers, writers + more_writers
        return self._poller.wait(readers, writers, deadline, longest_seconds)

    def _mismatch(self, operation: Operation, unexpected: _Unexpected) -> CyxtrainError:
        peer, ours = unexpected.rank, operation.describe()
        try:
            theirs = decode_header(unexpected.found)[0].describe()
        except FrameError as error:
            theirs = f"something unreadable ({error})"
        if theirs == ours:
            theirs = f"{theirs} with other sizes"
        return CollectiveMismatchError(
            f"the ranks do not call the same collective: rank {self._rank} is in {ours}, rank {peer} is in {theirs}. "
            "Every rank must make the same calls, in the same order, with the same shapes, dtypes and reductions.",
            rank=peer,
            during=ours,
        )
