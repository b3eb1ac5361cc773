"""One connection to one peer: it sends and receives what it can now, and never waits.

Waiting is in one place, `Poller.wait`, always with a deadline.
"""

from __future__ import annotations

import contextlib
import select
import socket
import sys
import time
from collections.abc import Sequence
from typing import Protocol

_LONGEST_POLL_MS = 2**31 - 1
_MAX_POLLS = 64


class Pollable(Protocol):
    """Something that the kernel can wait for: a link or a socket."""

    def fileno(self) -> int:
        """Returns the descriptor."""


class LinkBroken(Exception):  # noqa: N818 - an event inside the ring, never shown as an error
    """The connection to a peer has ended; whoever catches it finds out why.

    Attributes:
        rank: The peer.
        reason: What the operating system said.
    """

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"rank {rank}: {reason}")
        self.rank = rank
        self.reason = reason


class Link:
    """A connected, non-blocking stream to one peer.

    Args:
        sock: The connected socket; the link owns it from now on.
        rank: The peer.
    """

    def __init__(self, sock: socket.socket, rank: int) -> None:
        sock.setblocking(False)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.rank = rank
        self._sock = sock
        self._fileno = sock.fileno()

    def fileno(self) -> int:
        """Returns the descriptor, for `select`."""
        return self._fileno

    def send(self, data: memoryview | bytes) -> int:
        """Sends what the kernel takes now.

        Returns:
            How many bytes it took; 0 where it would block.

        Raises:
            LinkBroken: The connection has ended.
        """
        try:
            return self._sock.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            raise LinkBroken(self.rank, _reason(error)) from None

    def receive(self, into: memoryview) -> int:
        """Receives what has arrived, at most `len(into)` bytes.

        Returns:
            How many bytes; 0 where nothing has arrived.

        Raises:
            LinkBroken: The connection has ended.
        """
        try:
            count = self._sock.recv_into(into)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            raise LinkBroken(self.rank, _reason(error)) from None
        if count == 0:
            raise LinkBroken(self.rank, "the connection was closed")
        return count

    def stop(self) -> None:
        """Ends both directions, so that everyone who waits on this link wakes; what has arrived can still be read."""
        with contextlib.suppress(OSError):  # it has ended already
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Gives the socket back; harmless twice."""
        self._sock.close()


def _reason(error: OSError) -> str:
    return error.strerror or type(error).__name__


class Poller:
    """Waits until one of some links can go on. It keeps its kernel objects, as the same links come again and again.

    It serves one thread at a time.
    """

    def __init__(self) -> None:
        self._polls: dict[tuple[tuple[int, ...], tuple[int, ...]], select.poll] = {}

    def wait(self, readers: Sequence[Pollable], writers: Sequence[Pollable], deadline: float) -> bool:
        """Returns when a reader has something, a writer takes something, one of them has ended, or it is too late.

        Args:
            readers: To receive from.
            writers: To send to.
            deadline: In seconds of `time.monotonic`.

        Returns:
            Whether to go on: False once the deadline has passed, also for a peer that trickles.
        """
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        if sys.platform == "win32":
            select.select(readers, writers, writers, left)
        else:
            self._poll(readers, writers).poll(min(int(left * 1000) + 1, _LONGEST_POLL_MS))
        return time.monotonic() < deadline

    def _poll(self, readers: Sequence[Pollable], writers: Sequence[Pollable]) -> select.poll:
        key = (tuple(link.fileno() for link in readers), tuple(link.fileno() for link in writers))
        poll = self._polls.get(key)
        if poll is None:
            if len(self._polls) >= _MAX_POLLS:
                self._polls.clear()
            poll = self._polls[key] = _new_poll(*key)
        return poll


def _new_poll(readers: tuple[int, ...], writers: tuple[int, ...]) -> select.poll:
    poll = select.poll()
    for fileno in {*readers, *writers}:
        wanted = (select.POLLIN if fileno in readers else 0) | (select.POLLOUT if fileno in writers else 0)
        poll.register(fileno, wanted)
    return poll
