"""How long a connection takes there and back, how much it carries, and how far the two clocks are apart.

The one that leads asks, the other answers; each question is a letter and a number of bytes:

    "p"  0      the answer is two times, when the question came and when the answer went
    "g"  n      n bytes follow; the answer is one byte, when they have come
    "t"  n      the answer is n bytes
    "e"  0      the end
"""

from __future__ import annotations

import socket
import statistics
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass

from cyxtrain.ring import Deadline

_QUESTION = struct.Struct(">cQ")
_TIMES = struct.Struct(">dd")
_ROUND_TRIPS = 50
_FIRST_BYTES = 256 << 10
"""What goes first each way; where it takes long already, it is all that goes."""
_BYTES = 8 << 20
_QUICK_SECONDS = 0.05
_PIECE_BYTES = 256 << 10
_STALLED_SECONDS = 4.0
"""After which an end is no sudden one: the kernel there has given up on what never arrived (`watch_over`)."""


class ClosedError(Exception):
    """The other end has closed the connection."""


class LargeLostError(Exception):
    """Short messages arrive, and large ones do not."""


@dataclass(frozen=True)
class Exchange:
    """Four moments of one question and its answer, in seconds of each side's clock.

    Attributes:
        asked: When the question went, by the clock of the one who asks.
        came: When it came, by the other clock.
        answered: When the answer went, by the other clock.
        heard: When it came, by the clock of the one who asks.
    """

    asked: float
    came: float
    answered: float
    received: float

    @property
    def round_trip_seconds(self) -> float:
        """The time on the way, there and back."""
        return (self.received - self.asked) - (self.answered - self.came)

    @property
    def skew_seconds(self) -> float:
        """How much later it is by the other clock, were both ways equally long (RFC 5905, section 8)."""
        return ((self.came - self.asked) + (self.answered - self.received)) / 2


@dataclass(frozen=True)
class Figures:
    """What was measured.

    Attributes:
        round_trip_seconds: Median.
        bytes_per_second: Of the slower direction.
        skew_seconds: How much later it is at the other end.
    """

    round_trip_seconds: float
    bytes_per_second: float
    skew_seconds: float


def skew_of(exchanges: Sequence[Exchange]) -> float:
    """Returns the skew by the exchange that was shortest on its way: there the two ways differ least."""
    return min(exchanges, key=lambda exchange: exchange.round_trip_seconds).skew_seconds


def lead(sock: socket.socket, seconds: float) -> Figures:
    """Measures, with another process at the other end that follows.

    Cost: about 50 round trips, and up to 8 MiB each way.

    Args:
        sock: Connected; its timeout is changed.
        seconds: Until it gives up.

    Raises:
        ClosedError: The other end has gone.
        LargeLostError: Round trips work, and a quarter of a MiB does not arrive.
        OSError: It broke; TimeoutError: there was no answer.
    """
    deadline = Deadline(seconds)
    exchanges = [_ping(sock, deadline) for _ in range(_ROUND_TRIPS + 1)][1:]  # the first waits for who follows
    trip = statistics.median(exchange.round_trip_seconds for exchange in exchanges)
    begin = time.monotonic()
    try:
        there = _bytes_per_second(sock, b"g", trip, deadline)
        back = _bytes_per_second(sock, b"t", trip, deadline)
    except (ClosedError, OSError) as error:
        if isinstance(error, TimeoutError) or time.monotonic() - begin > _STALLED_SECONDS:
            raise LargeLostError from None
        raise
    _ask(sock, b"e", 0, deadline)
    return Figures(trip, min(there, back), skew_of(exchanges))


def follow(sock: socket.socket, seconds: float) -> None:
    """Answers one that leads, to its end.

    Args:
        sock: Connected; its timeout is changed.
        seconds: Until it gives up.

    Raises:
        ClosedError: The other end has gone.
        OSError: It broke; TimeoutError: nobody asked.
    """
    deadline = Deadline(seconds)
    while True:
        kind, count = _QUESTION.unpack(_receive(sock, _QUESTION.size, deadline))
        came = time.time()
        if kind == b"e":
            return
        if kind == b"p":
            _send(sock, _TIMES.pack(came, time.time()), deadline)
        elif kind == b"g":
            _drain(sock, count, deadline)
            _send(sock, b"y", deadline)
        else:
            _pour(sock, min(count, _BYTES), deadline)


def _ping(sock: socket.socket, deadline: Deadline) -> Exchange:
    asked = time.time()
    _ask(sock, b"p", 0, deadline)
    answer = _receive(sock, _TIMES.size, deadline)
    received = time.time()
    came, answered = _TIMES.unpack(answer)
    return Exchange(asked, came, answered, received)


def _bytes_per_second(sock: socket.socket, kind: bytes, trip_seconds: float, deadline: Deadline) -> float:
    """Measures one direction; with more bytes where a few are there at once."""
    found = 0.0
    for count in (_FIRST_BYTES, _BYTES):
        begin = time.perf_counter()
        _ask(sock, kind, count, deadline)
        if kind == b"g":
            _pour(sock, count, deadline)
            _receive(sock, 1, deadline)
        else:
            _drain(sock, count, deadline)
        seconds = time.perf_counter() - begin
        found = count / max(seconds - trip_seconds, seconds / 10, 1e-9)
        if seconds > _QUICK_SECONDS:
            break
    return found


def _ask(sock: socket.socket, kind: bytes, count: int, deadline: Deadline) -> None:
    _send(sock, _QUESTION.pack(kind, count), deadline)


def _send(sock: socket.socket, data: bytes | memoryview, deadline: Deadline) -> None:
    sock.settimeout(max(deadline.left(), 0.001))
    sock.sendall(data)


def _receive(sock: socket.socket, count: int, deadline: Deadline) -> bytes:
    """Returns exactly so many bytes."""
    received = bytearray()
    while len(received) < count:
        sock.settimeout(max(deadline.left(), 0.001))
        part = sock.recv(count - len(received))
        if not part:
            raise ClosedError
        received += part
    return bytes(received)


def _pour(sock: socket.socket, count: int, deadline: Deadline) -> None:
    piece = memoryview(bytes(_PIECE_BYTES))
    while count:
        step = min(count, len(piece))
        _send(sock, piece[:step], deadline)
        count -= step


def _drain(sock: socket.socket, count: int, deadline: Deadline) -> None:
    room = memoryview(bytearray(_PIECE_BYTES))
    while count:
        sock.settimeout(max(deadline.left(), 0.001))
        came = sock.recv_into(room, min(count, len(room)))
        if not came:
            raise ClosedError
        count -= came
