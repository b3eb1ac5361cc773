"""Measure a connection: round trip, bandwidth in both directions, clock skew.

One side leads, the other follows. Each request says how many bytes come with it, and how many to send back; the reply
is two times, when all had arrived and when it was sent, and those bytes.
"""

from __future__ import annotations

import contextlib
import socket
import statistics
import struct
import time
from collections.abc import Sequence
from typing import NamedTuple

from cyxtrain.ring import Deadline

_REQUEST = struct.Struct(">QQ")
_TIMES = struct.Struct(">dd")
_ROUND_TRIPS = 50
_FIRST_BYTES = 256 << 10
# Sent after `_FIRST_BYTES` if those took less than `_QUICK_SECONDS`.
_BYTES = 8 << 20
_QUICK_SECONDS = 0.05
_PIECE_BYTES = 256 << 10
# An end after this time means that the kernel gave up on data that never arrived (`watch_over`).
_STALLED_SECONDS = 4.0


class LargeLostError(Exception):
    """Short messages arrive and large ones do not."""


class RoundTrip(NamedTuple):
    """Seconds of a request and its reply: the first and last by our clock, the others by the peer's."""

    sent: float
    arrived: float
    replied: float
    received: float

    @property
    def seconds(self) -> float:
        """The time on the network, both directions."""
        return (self.received - self.sent) - (self.replied - self.arrived)

    @property
    def skew_seconds(self) -> float:
        """How far the peer's clock is ahead if both directions take equally long (RFC 5905, section 8)."""
        return ((self.arrived - self.sent) + (self.replied - self.received)) / 2


class Figures(NamedTuple):
    """Median round trip, bandwidth of the slower direction, and how far the peer's clock is ahead."""

    round_trip_seconds: float
    bytes_per_second: float
    skew_seconds: float


def skew_of(trips: Sequence[RoundTrip]) -> float:
    """Return the skew by the shortest round trip: there the two directions differ least."""
    return min(trips, key=lambda trip: trip.seconds).skew_seconds


def lead(sock: socket.socket, seconds: float) -> Figures:
    """Measure a connection whose other side calls `follow`; raise TimeoutError if it does not reply.

    Raises LargeLostError if round trips work, and 256 KiB do not arrive. Cost: about 50 round trips, and up to 8 MiB in
    each direction.
    """
    deadline = Deadline(seconds)
    trips = [_exchange(sock, 0, 0, deadline) for _ in range(_ROUND_TRIPS + 1)][1:]  # the first waits for the follower
    trip_seconds = statistics.median(trip.seconds for trip in trips)
    begin = time.monotonic()
    try:
        send_rate = _bytes_per_second(sock, True, trip_seconds, deadline)
        receive_rate = _bytes_per_second(sock, False, trip_seconds, deadline)
    except OSError as error:
        if isinstance(error, TimeoutError) or time.monotonic() - begin > _STALLED_SECONDS:
            raise LargeLostError from None
        raise
    return Figures(trip_seconds, min(send_rate, receive_rate), skew_of(trips))


def follow(sock: socket.socket, seconds: float) -> None:
    """Reply to the other side, which calls `lead` and reports errors, until it closes the connection."""
    deadline = Deadline(seconds)
    with contextlib.suppress(OSError):
        while True:
            count, wanted = _REQUEST.unpack(_receive(sock, _REQUEST.size, deadline))
            _receive(sock, count, deadline, keep=False)
            arrived = time.time()
            _send(sock, _TIMES.pack(arrived, time.time()), deadline)
            _send_zeros(sock, min(wanted, _BYTES), deadline)


def _exchange(sock: socket.socket, count: int, wanted: int, deadline: Deadline) -> RoundTrip:
    """Send so many bytes, and receive as many as wanted."""
    sent = time.time()
    _send(sock, _REQUEST.pack(count, wanted), deadline)
    _send_zeros(sock, count, deadline)
    reply = _receive(sock, _TIMES.size, deadline)
    received = time.time()
    _receive(sock, wanted, deadline, keep=False)
    arrived, replied = _TIMES.unpack(reply)
    return RoundTrip(sent, arrived, replied, received)


def _bytes_per_second(sock: socket.socket, sends: bool, trip_seconds: float, deadline: Deadline) -> float:
    """Return how fast this side sends bytes, or receives them."""
    found = 0.0
    for count in (_FIRST_BYTES, _BYTES):
        num_sent = count if sends else 0
        begin = time.perf_counter()
        _exchange(sock, num_sent, count - num_sent, deadline)
        seconds = time.perf_counter() - begin
        # Without the time of a round trip, which varies: a fast exchange may be shorter than the median.
        found = count / max(seconds - trip_seconds, seconds / 10, 1e-9)
        if seconds > _QUICK_SECONDS:
            break
    return found


def _send(sock: socket.socket, data: bytes | memoryview, deadline: Deadline) -> None:
    sock.settimeout(max(deadline.left(), 0.001))
    sock.sendall(data)


def _send_zeros(sock: socket.socket, count: int, deadline: Deadline) -> None:
    piece = memoryview(bytes(_PIECE_BYTES))
    for start in range(0, count, _PIECE_BYTES):
        _send(sock, piece[: count - start], deadline)


def _receive(sock: socket.socket, count: int, deadline: Deadline, *, keep: bool = True) -> bytes:
    """Receive exactly so many bytes and return them, or the last ones unless `keep`."""
    kept = b""
    left = count
    while left:
        sock.settimeout(max(deadline.left(), 0.001))
        part = sock.recv(min(left, _PIECE_BYTES))
        if not part:
            raise ConnectionError
        left -= len(part)
        kept = kept + part if keep else part
    return kept
