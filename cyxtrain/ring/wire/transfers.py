"""One transfer: a header and a payload to send, and a header and a payload to receive.

Nothing here waits: it moves the bytes that the kernel takes or has, and the caller waits in between.
"""

from __future__ import annotations

from cyxtrain.ring.schedules.algorithms import OnReceive, Transfer
from cyxtrain.ring.schedules.reduction import Buffers
from cyxtrain.ring.schedules.selector import SEGMENT_BYTES
from cyxtrain.ring.wire.frames import HEADER_BYTES, expected_header, header, is_damaged, payload_sum
from cyxtrain.ring.wire.link import Link

_JOIN_BYTES = 1 << 16
"""Up to this size header and payload are copied together, which saves a system call and a packet."""


class UnexpectedHeader(Exception):  # noqa: N818 - an event inside the ring, never shown as an error
    """A header arrived that is not the expected one."""

    def __init__(self, rank: int, found: bytes) -> None:
        super().__init__(rank)
        self.rank = rank
        self.found = found


class CorruptData(Exception):  # noqa: N818 - an event inside the ring, never shown as an error
    """Data was corrupted in transit."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.rank = rank


def _check_header(link: Link, head: bytes, expected: bytes) -> None:
    """Raise if a received header is damaged or not the expected one."""
    if is_damaged(head, link.checksums):
        raise CorruptData(link.rank)
    if not head.startswith(expected):
        raise UnexpectedHeader(link.rank, head)


class Outgoing:
    """The rest of a frame to send, in non-empty parts."""

    __slots__ = ("_parts", "done", "link")

    def __init__(self, link: Link, parts: list[memoryview]) -> None:
        self.link = link
        self.done = False
        self._parts = parts

    def advance(self) -> bool:
        """Send what the kernel takes; return whether anything moved."""
        part = self._parts[0]
        sent = self.link.send(part[:SEGMENT_BYTES])
        if sent < len(part):
            self._parts[0] = part[sent:]
        else:
            del self._parts[0]
            self.done = not self._parts
        return sent > 0


def begin_sending(link: Link, identity: bytes, payload: memoryview) -> Outgoing | None:
    """Start to send a frame; return its rest."""
    head = header(expected_header(identity, len(payload)), payload, checksums=link.checksums)
    if len(payload) <= _JOIN_BYTES:
        return begin_sending_frame(link, head + payload)
    sent = link.send_both(head, payload[:SEGMENT_BYTES])
    sent_of_payload = sent - HEADER_BYTES
    if sent_of_payload == len(payload):
        return None
    if sent_of_payload < 0:
        return Outgoing(link, [memoryview(head)[sent:], payload])
    return Outgoing(link, [payload[sent_of_payload:]])


def begin_sending_frame(link: Link, frame: bytes | memoryview) -> Outgoing | None:
    """Start to send a whole small frame; return its rest, nearly always None."""
    sent = link.send(frame)
    if sent == len(frame):
        return None
    return Outgoing(link, [memoryview(frame)[sent:]])


class DescriptorTransfer:
    """A file descriptor to send over a Unix socket; if it is negative, one to receive, which may have been lost."""

    __slots__ = ("descriptor", "done", "link")

    def __init__(self, link: Link, descriptor: int = -1) -> None:
        self.link = link
        self.done = False
        self.descriptor = descriptor

    def advance(self) -> bool:
        """Send the descriptor if the kernel takes it, or receive it if it has arrived; return whether it is done."""
        if self.descriptor >= 0:
            self.done = self.link.send_descriptor(self.descriptor)
        else:
            self.done, self.descriptor = self.link.receive_descriptor()
        return self.done


class ExpectedFrame:
    """The next frame, header and payload, from one rank; `done` when all of it has arrived.

    It is received into `frame`; its payload is then copied to `target`, if one is given.
    """

    __slots__ = ("_expected", "_have", "_target", "done", "frame", "link")

    def __init__(self, link: Link, frame: memoryview, expected: bytes = b"", target: memoryview | None = None) -> None:
        self.link = link
        self.frame = frame
        self.done = False
        self._expected = expected
        self._target = target
        self._have = 0

    def expect(self, expected: bytes) -> None:
        """Start again, with a frame that begins like this."""
        self._expected = expected
        self._have = 0
        self.done = False

    def advance(self) -> bool:
        """Receive what has arrived; return whether anything moved."""
        missing = self.frame
        if self._have:
            missing = missing[self._have :]
        count = self.link.receive(missing)
        have = self._have + count
        self._have = have
        # The header is checked before the payload is complete: after another header, nothing more may come.
        if count and have >= HEADER_BYTES:
            head = bytes(self.frame[:HEADER_BYTES])
            checksums = self.link.checksums
            if checksums is not None or not head.startswith(self._expected):
                _check_header(self.link, head, self._expected)
            if have == len(self.frame):
                if checksums is not None and checksums.of(self.frame[HEADER_BYTES:]) != payload_sum(head):
                    raise CorruptData(self.link.rank)
                if self._target is not None:
                    self._target[:] = self.frame[HEADER_BYTES:]
                self.done = True
        return count > 0


class Incoming:
    """A transfer to receive: a header, then the payload, piece by piece, replaced or combined."""

    def __init__(
        self,
        link: Link,
        identity: bytes,
        transfer: Transfer,
        buffers: Buffers,
        receive_buffer: memoryview,
    ) -> None:
        first, end = transfer.receive
        self._first = first
        self._total = (end - first) * buffers.item_bytes
        self._expected = expected_header(identity, self._total)
        self._buffers = buffers
        self._on_receive = transfer.on_receive
        self._peer_first = transfer.peer_first
        self._head = receive_buffer[:HEADER_BYTES]
        self._missing = self._head  # the rest of the header
        self._sum = None if link.checksums is None else link.checksums.begin()
        self._sum_expected = b""
        self.link = link
        self.done = False
        self._begin_piece(0)

    def advance(self) -> bool:
        """Receive what has arrived; return whether anything moved."""
        if self._missing:
            return self._receive_head()
        count = self.link.receive(self._room)
        if count:
            self._take(count)
        return count > 0

    def _receive_head(self) -> bool:
        """Receive the header and any payload bytes behind it, which are not used before the header is checked."""
        missing_bytes = len(self._missing)
        count = self.link.receive_both(self._missing, self._room)
        self._missing = self._missing[count:]
        if count >= missing_bytes:
            head = bytes(self._head)
            _check_header(self.link, head, self._expected)
            self._sum_expected = payload_sum(head)
            self._take(count - missing_bytes)
        return count > 0

    def _begin_piece(self, start: int) -> None:
        """Provide room for the piece that begins at a byte."""
        buffers = self._buffers
        self._start = start
        if self._on_receive is not OnReceive.REPLACE:
            assert buffers.scratch is not None
            self._end = min(start + len(buffers.scratch), self._total)
            self._room = buffers.scratch[: self._end - start]
        else:
            self._end = min(start + SEGMENT_BYTES, self._total)
            place = self._first * buffers.item_bytes
            self._room = buffers.target[place + start : place + self._end]

    def _take(self, count: int) -> None:
        """Count payload bytes that have arrived in the room; if they fill it, use the piece and begin the next one."""
        if self._sum is not None:
            self._sum.update(self._room[:count])
        if count < len(self._room):
            self._room = self._room[count:]
            return
        if self._on_receive is OnReceive.COMBINE:
            self.combine()
        if self._end < self._total:
            self._begin_piece(self._end)
            return
        self.done = True
        if self._sum is not None:
            self._check_sum()

    def combine(self) -> None:
        """Combine the current piece; for an exchange, after this rank's own was sent.

        An exchange has one piece: at most `FEW_BYTES`, and the scratch has room for more.
        """
        combiner = self._buffers.combiner
        item = self._buffers.item_bytes
        assert combiner is not None
        first = self._first + self._start // item
        end = self._first + self._end // item
        combiner.combine(first, end, peer_first=self._peer_first)

    def _check_sum(self) -> None:
        # Combined elements may be wrong by now, but the group fails, so nobody uses them.
        assert self.link.checksums is not None
        assert self._sum is not None
        if self.link.checksums.end(self._sum) != self._sum_expected:
            raise CorruptData(self.link.rank)
