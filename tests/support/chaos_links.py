"""One link that goes through the proxy: two flows of bytes, and the faults that change them."""

from __future__ import annotations

import contextlib
import math
import selectors
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence

from chaos_records import Active, Handshake, Happened, Traffic
from faults import Close, Cut, Delay, Fault, Flip, Forge, OneWay, Reset, Slices, Throttle
from xxhash import xxh3_64_digest

from cyxtrain.ring.wire.frames import EXPECTED_BYTES, HEADER_BYTES

_READ_BYTES = 1 << 16
_QUEUE_BYTES = 1 << 18
"""What is held of one flow; where more comes, its sender must wait, as it would for a full network."""
_SENDS = 256
"""Of one flow in a row, before the others have a turn."""
_PIECES_PER_SECOND = 100
"""In how many pieces a throttled flow gets its share of a second."""
_ABORT = struct.pack("ii", 1, 0)
"""SO_LINGER of zero seconds: closing sends a RST."""


class _Flow:
    """One direction of a link: what was read from `source` and is to be sent to `target`."""

    def __init__(
        self,
        connection: Connection,
        source: socket.socket,
        target: socket.socket,
        link: tuple[int | None, int | None, str | None],
    ) -> None:
        self.source = source
        self.target = target
        self.rank, self.peer, self.role = link
        self.handshake = Handshake(self.role)
        self.actives = [Active(fault) for fault in connection.faults if fault.concerns(*link)]
        self._forger = _Forger() if any(isinstance(active.fault.what, Forge) for active in self.actives) else None
        self.sent = 0
        self.full = False
        self.done = False
        self._connection = connection
        self._taken = 0
        self._queue: deque[tuple[float, memoryview]] = deque()
        self._queued = 0
        self._last_due = 0.0
        self._not_before = 0.0
        self._ended = False
        self._ends_with_reset = False

    @property
    def shook(self) -> bool:
        """Whether the whole handshake has gone in this direction."""
        return self.handshake.end is not None and self.sent >= self.handshake.end

    # What comes in.

    @property
    def wants(self) -> bool:
        return not self._ended and self._queued < _QUEUE_BYTES

    def read(self, now: float) -> None:
        try:
            data = self.source.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.end(now, with_reset=True)
            return
        if data:
            self.take(data, now)
        else:
            self.end(now, with_reset=False)

    def take(self, data: bytes, now: float) -> None:
        self.handshake.feed(data)
        changed = bytearray(data)
        for active in self.actives:
            position = self._flipped_byte(active.fault)
            if position is not None and self._taken <= position < self._taken + len(data):
                assert isinstance(active.fault.what, Flip)
                changed[position - self._taken] ^= 1 << active.fault.what.bit % 8
        if self._forger is not None and self.handshake.end is not None:
            begin = max(self.handshake.end - self._taken, 0)
            changed[begin:] = self._forger.take(changed[begin:])
        self._taken += len(data)
        if changed:
            self._put(memoryview(bytes(changed)), now)

    def end(self, now: float, *, with_reset: bool) -> None:
        """Nothing more comes; the target learns it after all that came before."""
        if not self._ended:
            self._ended, self._ends_with_reset = True, with_reset
            self._put(memoryview(b""), now)

    def _put(self, data: memoryview, now: float) -> None:
        late = [a.fault.what.seconds for a in self.actives if isinstance(a.fault.what, Delay) and a.running(now)]
        self._last_due = max(self._last_due, now + sum(late))
        self._queue.append((self._last_due, data))
        self._queued += len(data)

    # What goes out.

    def pump(self, now: float) -> float:
        """Sends what may go now; returns when to come again (infinity: when a socket is ready)."""
        for _ in range(_SENDS):
            self._begin(now)
            if self.done or self._connection.stopped:
                return math.inf
            if self._connection.holds(self, now):
                return self._connection.heals_at(self, now)
            if not self._queue or self.full:
                return math.inf
            due, data = self._queue[0]
            if max(due, self._not_before) > now:
                return max(due, self._not_before)
            if data:
                self._send(data, now)
            else:
                self._finish()
        self._begin(now)
        return now

    def _send(self, data: memoryview, now: float) -> None:
        try:
            count = self.target.send(data[: self._most(len(data), now)])
        except (BlockingIOError, InterruptedError):
            self.full = True
            return
        except OSError:  # it has gone: its other direction ends, as it would without us
            self.done = True
            self._connection.opposite(self).end(now, with_reset=True)
            return
        self.sent += count
        self._queued -= count
        due, _ = self._queue.popleft()
        if count < len(data):
            self._queue.appendleft((due, data[count:]))
        for active in self.actives:
            if isinstance(active.fault.what, Throttle) and active.running(now):
                self._not_before = now + count / active.fault.what.bytes_per_second

    def _most(self, count: int, now: float) -> int:
        """Returns how many of so many bytes may go at once; the next fault begins at its very byte."""
        for active in self.actives:
            threshold = self._threshold(active.fault)
            if isinstance(active.fault.what, Slices) and active.running(now):
                count = min(count, active.fault.what.size)
            elif isinstance(active.fault.what, Throttle) and active.running(now):
                count = min(count, max(1, int(active.fault.what.bytes_per_second / _PIECES_PER_SECOND)))
            elif active.begun is None and threshold is not None and threshold > self.sent:
                count = min(count, threshold - self.sent)
        return count

    def _finish(self) -> None:
        self.done = True
        if self._ends_with_reset:
            self._connection.reset()
        else:
            with contextlib.suppress(OSError):  # it has ended by itself
                self.target.shutdown(socket.SHUT_WR)

    # Faults.

    def _begin(self, now: float) -> None:
        """Begins every fault whose time has come."""
        for active in self.actives:
            threshold = self._threshold(active.fault)
            flipped = self._flipped_byte(active.fault)
            if flipped is not None:
                threshold = flipped + 1
            if active.begun is not None or threshold is None or self.sent < threshold:
                continue
            if active.fault.past_handshake and not self._connection.opposite(self).shook:
                continue
            if active.fault.times is not None and self._connection.count(active.fault) >= active.fault.times:
                continue
            active.begun = now
            at = self.sent if flipped is None else flipped
            self._connection.happened.append(Happened(active.fault, self.rank, self.peer, self.role, at, now))
            if isinstance(active.fault.what, Close):
                self._connection.close_in_order()
            elif isinstance(active.fault.what, Reset):
                self._connection.reset()

    def _threshold(self, fault: Fault) -> int | None:
        if not fault.past_handshake:
            return fault.after_bytes
        return None if self.handshake.end is None else self.handshake.end + fault.after_bytes

    def _flipped_byte(self, fault: Fault) -> int | None:
        threshold = self._threshold(fault)
        return threshold + fault.what.bit // 8 if isinstance(fault.what, Flip) and threshold is not None else None


class _Forger:
    """Changes every payload, and calculates the checksums without a key; holds back what is not a whole frame yet."""

    def __init__(self) -> None:
        self._held = bytearray()

    def take(self, data: bytearray) -> bytearray:
        held, at = self._held + data, 0
        while len(held) >= (payload := at + HEADER_BYTES):
            end = payload + int.from_bytes(held[at + EXPECTED_BYTES - 8 : at + EXPECTED_BYTES], "big")
            if len(held) < end:
                break
            if payload < end:
                held[end - 1] ^= 1
                held[payload - 16 : payload - 8] = xxh3_64_digest(held[payload:end])
                held[payload - 8 : payload] = xxh3_64_digest(held[at : payload - 8])
            at = end
        self._held = held[at:]
        return held[:at]


class Connection:
    """A link through the proxy.

    Args:
        near: Who has connected; non-blocking, owned from now on.
        far: The rank that listens; likewise.
        link: (rank that connected, rank that listens, role).
        faults: Of all links.
        happened: Where faults that begin are written down.
        heard: What `near` has said so far.

    Attributes:
        stopped: Nothing is sent on any more.
        over: Both sockets are closed.
    """

    def __init__(
        self,
        near: socket.socket,
        far: socket.socket,
        link: tuple[int | None, int, str | None],
        faults: Sequence[Fault],
        happened: list[Happened],
        received: bytes,
    ) -> None:
        self.faults = faults
        self.happened = happened
        self.stopped = False
        self.over = False
        self._there = _Flow(self, near, far, link)
        self._back = _Flow(self, far, near, (link[1], link[0], link[2]))
        self._flows = (self._there, self._back)
        self._draining: set[socket.socket] = set()
        self._watched: dict[socket.socket, int] = {}
        self._there.take(received, 0.0)

    def pump(self, now: float) -> float:
        """Sends what may go now, both ways; returns when to come again."""
        again = min([flow.pump(now) for flow in (*self._flows, self._there)])  # the way back may end the handshake
        if not self.stopped and all(flow.done for flow in self._flows):
            self._end()
        return again

    def count(self, fault: Fault) -> int:
        """Returns how often a fault has happened, on any connection."""
        return sum(happened.fault == fault for happened in self.happened)

    def opposite(self, flow: _Flow) -> _Flow:
        return self._back if flow is self._there else self._there

    def holds(self, flow: _Flow, now: float) -> bool:
        """Returns whether nothing of that flow comes through at the moment."""
        return bool(self._holes(flow, now))

    def heals_at(self, flow: _Flow, now: float) -> float:
        return min((active.heals_at for active in self._holes(flow, now)), default=now)

    def _holes(self, flow: _Flow, now: float) -> list[Active]:
        one_way = [active for active in flow.actives if isinstance(active.fault.what, OneWay)]
        both = [active for each in self._flows for active in each.actives if isinstance(active.fault.what, Cut)]
        return [active for active in one_way + both if active.running(now)]

    def close_in_order(self) -> None:
        """Ends both directions, and reads on: who closes with something unread sends a RST instead of a FIN."""
        self.stopped = True
        for flow in self._flows:
            with contextlib.suppress(OSError):
                flow.target.shutdown(socket.SHUT_WR)
            self._draining.add(flow.source)

    def reset(self) -> None:
        for flow in self._flows:
            with contextlib.suppress(OSError):
                flow.source.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)
        self._end()

    def _end(self) -> None:
        self.stopped = self.over = True

    def traffic(self) -> list[Traffic]:
        return [Traffic(f.rank, f.peer, f.role, f.sent, f.handshake.end) for f in self._flows]

    # What the proxy's selector is told.

    def watch(self, selector: selectors.BaseSelector) -> None:
        """Registers what can go on."""
        for flow in self._flows:
            mask = 0
            if flow.source in self._draining or (not self.stopped and flow.wants):
                mask |= selectors.EVENT_READ
            if not self.stopped and self.opposite(flow).full:
                mask |= selectors.EVENT_WRITE
            self._register(selector, flow, mask)

    def _register(self, selector: selectors.BaseSelector, flow: _Flow, mask: int) -> None:
        before = self._watched.get(flow.source, 0)
        if mask == before:
            return
        data: Callable[[int, float], None] = lambda ready, now: self._ready(flow, ready, now)  # noqa: E731
        if not before:
            selector.register(flow.source, mask, data)
        elif not mask:
            selector.unregister(flow.source)
        else:
            selector.modify(flow.source, mask, data)
        self._watched[flow.source] = mask

    def _ready(self, flow: _Flow, ready: int, now: float) -> None:
        if ready & selectors.EVENT_WRITE:
            self.opposite(flow).full = False
        if not ready & selectors.EVENT_READ:
            return
        if flow.source in self._draining:
            self._drain(flow.source)
        elif flow.wants and not self.stopped:
            flow.read(now)

    def _drain(self, sock: socket.socket) -> None:
        try:
            more = bool(sock.recv(_READ_BYTES))
        except BlockingIOError:
            return
        except OSError:
            more = False
        if not more:
            self._draining.discard(sock)
            self.over = not self._draining

    def close(self, selector: selectors.BaseSelector) -> None:
        """Gives everything back; what was not closed in order ends with what the kernel does then."""
        for flow in self._flows:
            if self._watched.pop(flow.source, 0):
                selector.unregister(flow.source)
            flow.source.close()
