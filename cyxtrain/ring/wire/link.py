"""A connection to a peer that sends and receives as much as it can without waiting.

Only `Poller.wait` waits, always with a `Deadline`.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

from cyxtrain.errors import reason_of
from cyxtrain.ring.wire.checksums import Checksums

POLL_SECONDS = 0.05
"""The longest pause between two checks of a condition."""
_SHORTEST_POLL_SECONDS = 0.001
_MAX_POLLS = 64
_LONGEST_POLL_SECONDS = 0.5
"""Waits are cut into pieces: one that takes longer shows that this process was stopped."""
_STOPPED_SECONDS = 0.5
_CONTROL_OPTIONS = {
    # The kernel gives up if nothing is acknowledged for this long: a cut of three seconds heals unnoticed, one of six
    # does not. Kernels acknowledge heartbeats also for processes that are stopped or busy. See tcp(7).
    "TCP_USER_TIMEOUT": 4500,  # milliseconds
    # On an idle connection the kernel probes after a second and then every second.
    "TCP_KEEPIDLE": 1,
    "TCP_KEEPALIVE": 1,  # macOS's name of TCP_KEEPIDLE
    "TCP_KEEPINTVL": 1,
    "TCP_KEEPCNT": 4,
    # The kernel retries at least every second: otherwise its last retry could be too early for a cut of three seconds.
    # Linux 6.15 and later.
    "TCP_RTO_MAX_MS": 1000,
}
_DATA_OPTIONS = {
    # Firewalls forget links that are idle for hours; kernels answer this also for a peer that computes.
    "TCP_KEEPIDLE": 60,
    "TCP_KEEPALIVE": 60,
    "TCP_KEEPINTVL": 15,
    "TCP_KEEPCNT": 8,
    "TCP_USER_TIMEOUT": 0,  # none, once ranks have joined: a busy peer does not read
}
LOST_PACKETS = (
    "large packets get lost on the way, although short ones arrived (path MTU), or the network was cut. Set the same "
    "MTU on all interfaces of the path (ip link set dev eth0 mtu 1400), or allow ICMP's 'fragmentation needed'"
)
_NEAR_SEND_BYTES = 1 << 19
"""Bytes in flight on the same machine, so that they stay in a cache."""
_NEW_OPTIONS = {"TCP_RTO_MAX_MS": 44} if sys.platform == "linux" else {}
"""Option numbers that Python does not define yet."""


class LinkBroken(Exception):  # noqa: N818 - an event inside the ring, never shown as an error
    """The connection to a peer has ended; the catcher finds out why."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"rank {rank}: {reason}")
        self.rank = rank
        self.reason = reason


class Deadline:
    """A deadline `seconds` from now; time for which this process was stopped does not count."""

    __slots__ = ("_at", "seconds")

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._at = time.monotonic() + seconds

    def left(self) -> float:
        """Return the remaining seconds; at least 0."""
        return max(self._at - time.monotonic(), 0.0)

    def passed(self) -> bool:
        """Return whether it has passed."""
        return time.monotonic() >= self._at

    def poll_until(self, condition: Callable[[], object]) -> bool:
        """Wait until a condition holds; return False if it does not by the deadline."""
        pauses = backoff()
        while not condition():
            if self.passed():
                return False
            time.sleep(min(next(pauses), self.left()))
        return True

    def extend_if_suspended(self, late_seconds: float) -> None:
        """Extend the deadline if a wait ended so late that the process was stopped."""
        if late_seconds > _STOPPED_SECONDS:
            self._at += late_seconds


def backoff() -> Iterator[float]:
    """Yield how many seconds to wait before each next check: 1 ms, doubled up to `POLL_SECONDS`."""
    seconds = _SHORTEST_POLL_SECONDS
    while True:
        yield seconds
        seconds = min(2 * seconds, POLL_SECONDS)


def watch_over(sock: socket.socket) -> None:
    """Make the kernel notice a cut network; for control connections, as data may wait for minutes."""
    _set_options(sock, _CONTROL_OPTIONS)


def is_tcp(sock: socket.socket) -> bool:
    """Return whether a socket's bytes travel over TCP, and not over a Unix socket."""
    return sock.family in (socket.AF_INET, socket.AF_INET6)


def _set_options(sock: socket.socket, options: dict[str, int]) -> None:
    """Set the options that this system has; a closed connection takes none."""
    if not is_tcp(sock):
        return
    options = {"TCP_NODELAY": 1, **options}
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in options.items():
        option = vars(socket).get(name, _NEW_OPTIONS.get(name))
        if option is not None:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, option, value)


def _stay_in_cache(sock: socket.socket) -> None:
    """Limit a local connection's send buffer so that it stays in a cache: 1.5 times as fast from 4 MiB on."""
    if not is_tcp(sock):
        return
    # The connection may have ended already.
    with contextlib.suppress(OSError):
        if sock.getsockname()[0] == sock.getpeername()[0]:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _NEAR_SEND_BYTES)


class Link:
    """A connected, non-blocking stream to the peer with the global `rank`; the maker of the socket closes it."""

    def __init__(self, sock: socket.socket, rank: int, checksums: Checksums | None = None) -> None:
        sock.setblocking(False)
        _set_options(sock, _DATA_OPTIONS)
        _stay_in_cache(sock)
        self.rank = rank
        self.checksums = checksums
        self._sock = sock
        self._fileno = sock.fileno()

    def fileno(self) -> int:
        """Return the descriptor, for `select`."""
        return self._fileno

    @property
    def transport(self) -> str:
        """The kind of the socket: "tcp" or "unix"."""
        return "tcp" if is_tcp(self._sock) else "unix"

    def send(self, data: memoryview | bytes) -> int:
        """Send what the kernel takes now; return its bytes, or raise `LinkBroken`."""
        try:
            return self._sock.send(data)
        except OSError as error:
            return self._nothing(error)

    def send_both(self, first: memoryview | bytes, second: memoryview) -> int:
        """Send what the kernel takes of two pieces, in one packet."""
        # Python has no sendmsg on Windows.
        if sys.platform == "win32":
            return self.send(first)
        try:
            return self._sock.sendmsg((first, second))
        except OSError as error:
            return self._nothing(error)

    def receive(self, into: memoryview) -> int:
        """Receive what has arrived, at most `len(into)` bytes; return its bytes, or raise `LinkBroken`."""
        try:
            return self._sock.recv_into(into) or self._raise_closed()
        except OSError as error:
            return self._nothing(error)

    def receive_both(self, first: memoryview, second: memoryview) -> int:
        """Receive what has arrived into two pieces."""
        # Python has no recvmsg_into on Windows.
        if sys.platform == "win32":
            return self.receive(first)
        try:
            return self._sock.recvmsg_into((first, second))[0] or self._raise_closed()
        except OSError as error:
            return self._nothing(error)

    def send_descriptor(self, descriptor: int) -> bool:
        """Send a file descriptor over a Unix socket, with one byte; return whether the kernel took it."""
        try:
            return socket.send_fds(self._sock, [b"!"], [descriptor]) > 0
        except OSError as error:
            return self._nothing(error) > 0

    def receive_descriptor(self) -> tuple[bool, int]:
        """Return whether the byte of a file descriptor has arrived, and the descriptor; negative: it was lost."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self._sock, 1, 1, socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            return self._nothing(error) > 0, -1
        if not data:
            self._raise_closed()
        return True, descriptors[0] if descriptors else -1

    def peek(self, size: int) -> bytes:
        """Return at most `size` bytes that have arrived, without taking them; empty after the end."""
        with contextlib.suppress(OSError):  # nothing has arrived, or the connection is broken
            return self._sock.recv(size, socket.MSG_PEEK)
        return b""

    def _nothing(self, error: OSError) -> int:
        """Return 0 if a call would block; raise if it failed."""
        if isinstance(error, BlockingIOError):
            return 0
        raise LinkBroken(self.rank, reason_of(error)) from None

    def _raise_closed(self) -> NoReturn:
        raise LinkBroken(self.rank, "the connection was closed")

    def stop(self) -> None:
        """End both directions, so that all waiting threads wake; data that has arrived can still be read."""
        # The connection may have ended already.
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)


Pollable = Link | socket.socket
"""What the kernel can wait for."""


class Poller:
    """A waiter on links: it keeps a kernel object for each set of links, and serves one thread at a time."""

    def __init__(self) -> None:
        self._polls: dict[tuple[tuple[int, ...], tuple[int, ...]], select.poll] = {}

    def wait(
        self,
        readers: Sequence[Pollable],
        writers: Sequence[Pollable],
        deadline: Deadline,
        longest_seconds: float = _LONGEST_POLL_SECONDS,
    ) -> bool:
        """Wait for readers, writers or time, at most half a second; return whether a link can move."""
        seconds = min(deadline.left(), longest_seconds, _LONGEST_POLL_SECONDS)
        until = time.monotonic() + seconds
        # Windows has no poll.
        if sys.platform == "win32":
            happened = any(select.select(readers, writers, writers, seconds))
        else:
            happened = bool(self._poll(readers, writers).poll(math.ceil(seconds * 1000)))
        deadline.extend_if_suspended(time.monotonic() - until)
        return happened

    def _poll(self, readers: Sequence[Pollable], writers: Sequence[Pollable]) -> select.poll:
        key = (tuple(link.fileno() for link in readers), tuple(link.fileno() for link in writers))
        poll = self._polls.get(key)
        if poll is None:
            if len(self._polls) >= _MAX_POLLS:
                self._polls.clear()
            poll = _new_poll(*key)
            self._polls[key] = poll
        return poll


def _new_poll(readers: tuple[int, ...], writers: tuple[int, ...]) -> select.poll:
    poll = select.poll()
    for fileno in {*readers, *writers}:
        events = 0
        if fileno in readers:
            events |= select.POLLIN
        if fileno in writers:
            events |= select.POLLOUT
        poll.register(fileno, events)
    return poll
