"""One transfer: a header and a payload to send, and a header and a payload to receive.

Nothing here waits: what the kernel takes or has is moved, and the caller waits between.
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
    """Another header than the expected one came."""

    def __init__(self, rank: int, found: bytes) -> None:
        super().__init__(rank)
        self.rank = rank
        self.found = found


class CorruptData(Exception):  # noqa: N818 - an event inside the ring, never shown as an error
    """Data was corrupted in transit."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.rank = rank


def check_header(link: Link, head: bytes, expected: bytes) -> None:
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
    if sent_of_payload == len(payload):  # often
        return None
    return Outgoing(link, [payload[sent_of_payload:]] if sent_of_payload >= 0 else [memoryview(head)[sent:], payload])


def begin_sending_frame(link: Link, frame: bytes | memoryview) -> Outgoing | None:
    """Start to send a whole small frame; return its rest, nearly always None."""
    sent = link.send(frame)
    return None if sent == len(frame) else Outgoing(link, [memoryview(frame)[sent:]])


class DescriptorTransfer:
    """A file descriptor to send over a Unix socket; if it is negative, one to receive, which may have been lost."""

    __slots__ = ("descriptor", "done", "link")

    def __init__(self, link: Link, descriptor: int = -1) -> None:
        self.link = link
        self.done = False
        self.descriptor = descriptor

    def advance(self) -> bool:
        """Send it if the kernel takes it, or receive it if it has arrived; return whether that is done."""
        if self.descriptor >= 0:
            self.done = self.link.send_descriptor(self.descriptor)
        else:
            self.done, self.descriptor = self.link.receive_descriptor()
        return self.done


class ShortIncoming:
    """A short transfer to receive, header and payload in one piece, which replaces what is there."""

    __slots__ = ("_expected", "_have", "_payload", "_receive_buffer", "done", "link")

    def __init__(self, link: Link, expected: bytes, payload: memoryview, receive_buffer: memoryview) -> None:
        self.link = link
        self.done = False
        self._expected = expected
        self._payload = payload
        self._receive_buffer = receive_buffer[: HEADER_BYTES + len(payload)]
        self._have = 0

    def advance(self) -> bool:
        """Receive what has arrived; return whether anything moved."""
        have = self._have
        count = self.link.receive(self._receive_buffer[have:] if have else self._receive_buffer)
        have = self._have = have + count
        if have >= HEADER_BYTES:  # of another header there may come no more
            head = bytes(self._receive_buffer[:HEADER_BYTES])
            check_header(self.link, head, self._expected)
            if have == len(self._receive_buffer):
                self._payload[:] = self._receive_buffer[HEADER_BYTES:]
                checksums = self.link.checksums
                if checksums is not None and checksums.of(self._payload) != payload_sum(head):
                    raise CorruptData(self.link.rank)
                self.done = True
        return count > 0


class Incoming:
    """A transfer to receive: a header, then the payload, piece by piece, replaced or combined."""

    __slots__ = (
        *("_buffers", "_end", "_expected", "_first", "_head", "_missing", "_on_receive", "_peer_first", "_room"),
        *("_start", "_sum", "_sum_expected", "_total", "done", "link"),
    )

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
        self._head = self._missing = receive_buffer[:HEADER_BYTES]
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
            self._took(count)
        return count > 0

    def _receive_head(self) -> bool:
        """Receive the header, and with it what of the payload has arrived, unused until the header is checked."""
        count, missing = self.link.receive_both(self._missing, self._room), len(self._missing)
        self._missing = self._missing[count:]
        if count >= missing:
            head = bytes(self._head)
            check_header(self.link, head, self._expected)
            self._sum_expected = payload_sum(head)
            self._took(count - missing)
        return count > 0

    def _begin_piece(self, start: int) -> None:
        """Provide room for the piece that begins at a byte."""
        buffers, self._start = self._buffers, start
        if self._on_receive:
            assert buffers.scratch is not None
            self._end = end = min(start + len(buffers.scratch), self._total)
            self._room = buffers.scratch[: end - start]
        else:
            self._end = end = min(start + SEGMENT_BYTES, self._total)
            place = self._first * buffers.item_bytes
            self._room = buffers.target[place + start : place + end]

    def _took(self, count: int) -> None:
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
        """Combine the current piece; for an exchange, which has one, after this rank's own was sent."""
        combiner, item = self._buffers.combiner, self._buffers.item_bytes
        assert combiner is not None
        first, end = self._first + self._start // item, self._first + self._end // item
        combiner.combine(first, end, peer_first=self._peer_first)

    def _check_sum(self) -> None:
        # What was combined by now is wrong; nobody sees it, as the group fails.
        assert self.link.checksums is not None
        assert self._sum is not None
        if self.link.checksums.end(self._sum) != self._sum_expected:
            raise CorruptData(self.link.rank)
