"""Messages between two ranks: send and recv, on their own connections.

A waiting thread moves all messages of the group in both directions, so that two ranks that both send first, or both
receive first, do not deadlock.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from cyxtrain.errors import CollectiveMismatchError, CollectiveTimeoutError, CyxtrainError, PeerLostError
from cyxtrain.ring.monitoring.monitor import PeerMonitor
from cyxtrain.ring.wire.frames import (
    HEADER_BYTES,
    FrameError,
    Operation,
    damaged_error,
    decode_header,
    expected_header,
    header,
    is_damaged,
    payload_sum,
)
from cyxtrain.ring.wire.link import Deadline, Link, LinkBroken, Pollable, Poller

ANY_SOURCE = -1
_CLOSE_SECONDS = 5.0
_LONG_SECONDS = 1.0
"""After this wait a rank tells all ranks which one it waits for."""


@dataclass(eq=False)
class Message:
    """One send or recv."""

    operation: Operation
    peer: int
    data: memoryview
    done: bool = False
    moved: int = 0  # bytes sent or received, including the header of a send
    head: bytes = b""  # the header of a send

    @property
    def tag(self) -> int:
        """The tag that send and recv must share."""
        return self.operation.root


@dataclass
class _Inbox:
    """Data arriving from one rank: a header in parts, then a payload, for a recv or kept for a later one."""

    head: bytearray = field(default_factory=lambda: bytearray(HEADER_BYTES))
    have: int = 0
    current: Message | None = None
    sum: bytes = b""
    unclaimed: list[Message] = field(default_factory=list)
    ended: bool = False
    """Whether the rank has left with a goodbye."""


class _Sleeper:
    """Where one thread at a time waits: for links, or for another thread that moved its message."""

    def __init__(self) -> None:
        self._poller = Poller()
        self._receiver, self._sender = socket.socketpair()  # a poll of links cannot wait for a condition, too
        self._woken = False

    def sleep(self, readers: list[Pollable], writers: list[Pollable], deadline: Deadline) -> None:
        self._poller.wait([*readers, self._receiver], writers, deadline)

    def wake(self) -> None:
        # One byte only: `clear` takes no more.
        if not self._woken:
            self._woken = True
            self._sender.send(b"!")

    def clear(self) -> None:
        if self._woken:
            self._woken = False
            self._receiver.recv(1)

    def close(self) -> None:
        self._receiver.close()
        self._sender.close()


class Mailbox:
    """The messages of one rank; thread-safe."""

    def __init__(self, links: dict[int, Link], monitor: PeerMonitor) -> None:
        self._links = links
        self._monitor = monitor
        self._outboxes: dict[int, deque[Message]] = {peer: deque() for peer in links}
        self._inboxes = {peer: _Inbox() for peer in links}
        self._receives: list[Message] = []
        self._lock = threading.RLock()
        self._awake = threading.Condition(self._lock)
        self._asleep: list[_Sleeper] = []
        self._idle: list[_Sleeper] = []

    @property
    def busy(self) -> bool:
        """Whether any message is pending: a recv that waits, a send, or a message that has begun to arrive."""
        if self._receives or any(self._outboxes.values()):
            return True
        return any(inbox.current is not None for inbox in self._inboxes.values())

    def post_send(self, message: Message) -> None:
        """Start a send: as much as the kernel takes is sent at once."""
        begin = expected_header(message.operation.identity(), len(message.data))
        message.head = header(begin, message.data, checksums=self._links[message.peer].checksums)
        with self._lock:
            self._outboxes[message.peer].append(message)
            self._wake_all()
            self.progress()

    def post_receive(self, message: Message) -> None:
        """Start a recv; what arrived early is taken first."""
        with self._lock:
            self._receives.append(message)
            self._wake_all()
            peers = [*self._inboxes] if message.peer == ANY_SOURCE else [message.peer]
            for peer in peers:
                if not message.done:
                    self._deliver(peer)
            self.progress()

    def wait(self, message: Message, deadline: Deadline) -> None:
        """Move all messages until this one is done; any error ends the group."""
        since = time.monotonic()
        try:
            while not self._finish_or_sleep(message, deadline):
                has_waited_long = time.monotonic() - since >= _LONG_SECONDS
                if has_waited_long and message.peer != ANY_SOURCE:
                    self._wait_and_report(message, deadline, since)
                    return
        except CyxtrainError:
            raise self._monitor.failure.call_error(message.operation.describe()) from None

    def _wait_and_report(self, message: Message, deadline: Deadline, since: float) -> None:
        """Continue to wait, and tell all ranks which one this rank has been waiting for."""
        with self._monitor.waiting(message.operation, self._links[message.peer].rank, since):
            while not self._finish_or_sleep(message, deadline):
                pass

    def _finish_or_sleep(self, message: Message, deadline: Deadline) -> bool:
        """Return whether a message is done; if it is not, sleep until any message can move."""
        with self._lock:
            self.progress()
            if message.done:
                return True
            if deadline.passed():
                raise self._fail(self._timeout_error(message, deadline))
            sleeper = self._idle.pop() if self._idle else _Sleeper()  # kept: a new one costs a few system calls
            self._asleep.append(sleeper)
            readers, writers = self.waiting()
        try:
            sleeper.sleep(readers, writers, deadline)
        finally:
            with self._awake:
                sleeper.clear()
                self._asleep.remove(sleeper)
                self._idle.append(sleeper)
                self._awake.notify_all()
        return False

    def _timeout_error(self, message: Message, deadline: Deadline) -> CyxtrainError:
        peer: int | None = None
        awaited = "any rank"
        if message.peer != ANY_SOURCE:
            peer = self._links[message.peer].rank
            awaited = f"rank {peer}"
        during = message.operation.describe()
        return CollectiveTimeoutError(
            f"rank {self._monitor.rank} timed out in {during}: it waited for {awaited} until its timeout of "
            f"{deadline.seconds:g} s was over. Is there a matching call with the same tag? collective_timeout_ms sets "
            "the timeout.",
            rank=peer,
            during=during,
        )

    def progress(self) -> None:
        """Move what can move now, without waiting; any error ends the group."""
        with self._lock:
            try:
                for peer, outbox in self._outboxes.items():
                    while outbox and self._send(self._links[peer], outbox[0]):
                        outbox.popleft()
                for peer in self._inboxes:
                    self._receive_all(peer)
            except LinkBroken as broken:
                raise self._fail(self._monitor.broken_link_error(broken.rank, broken.reason)) from None
            except CyxtrainError:
                raise
            except BaseException as error:
                # Ctrl-C, say, may come between a system call and the count of its bytes.
                rank = self._monitor.rank
                reason = f"rank {rank} was interrupted in a message by {error!r}: start all ranks again."
                self._monitor.fail(PeerLostError(reason, rank=rank))
                raise

    def waiting(self) -> tuple[list[Pollable], list[Pollable]]:
        """Return the links that messages wait to (receive from, send to)."""
        with self._lock:
            readers: list[Pollable] = [self._links[peer] for peer in self._inboxes if self._expects_from(peer)]
            writers: list[Pollable] = [self._links[peer] for peer, outbox in self._outboxes.items() if outbox]
            return readers, writers

    def close(self) -> None:
        """Wait until no thread waits on a link; stopped links wake them."""
        with self._awake:
            self._awake.wait_for(lambda: not self._asleep, _CLOSE_SECONDS)
            for sleeper in self._idle:
                sleeper.close()
            self._idle.clear()

    def _expects_from(self, peer: int) -> bool:
        if self._awaits(peer):
            return True
        accepts_any = any(message.peer == ANY_SOURCE for message in self._receives)
        return accepts_any and (not self._inboxes[peer].ended or self._all_ended())

    def _awaits(self, peer: int) -> bool:
        """Return whether a message must come from this rank: it has begun, or a recv names the rank."""
        has_begun = self._inboxes[peer].current is not None
        return has_begun or any(message.peer == peer for message in self._receives)

    def _all_ended(self) -> bool:
        return all(inbox.ended for inbox in self._inboxes.values())

    def _send(self, link: Link, message: Message) -> bool:
        if message.moved < HEADER_BYTES:
            message.moved += link.send(message.head[message.moved :])
        if message.moved >= HEADER_BYTES:
            start = message.moved - HEADER_BYTES
            if start < len(message.data):
                message.moved += link.send(message.data[start:])
            if message.moved == HEADER_BYTES + len(message.data):
                self._complete(message)
        return message.done

    def _receive_all(self, peer: int) -> None:
        try:
            while self._expects_from(peer) and self._receive(peer):
                pass
        except LinkBroken as broken:
            if self._awaits(peer) or not self._monitor.await_goodbye(broken.rank):
                raise
            # The other ranks may still serve a recv from any source.
            self._inboxes[peer].ended = True
            if self._all_ended():
                raise

    def _receive(self, peer: int) -> bool:
        inbox = self._inboxes[peer]
        link = self._links[peer]
        message = inbox.current
        if message is None:
            count = link.receive(memoryview(inbox.head)[inbox.have :])
            inbox.have += count
            if inbox.have == HEADER_BYTES:
                inbox.have = 0
                self._begin(peer, inbox)
            return count > 0
        count = link.receive(message.data[message.moved :])
        message.moved += count
        self._finish(peer, inbox, message)
        return count > 0

    def _begin(self, peer: int, inbox: _Inbox) -> None:
        """Find the recv for a header; keep the payload if no recv matches yet."""
        rank = self._links[peer].rank
        try:
            if is_damaged(inbox.head, self._links[peer].checksums):
                raise self._fail(damaged_error(rank, self._monitor.rank, "a message"))
            operation, payload_bytes = decode_header(inbox.head)
            if payload_bytes != operation.payload_bytes():
                raise FrameError(f"the frame announces {payload_bytes} bytes for {operation.describe()}")
            message = self._claim(operation, peer)
            if message is None:
                message = Message(operation, peer, _allocate(payload_bytes))
                inbox.unclaimed.append(message)
        except FrameError as error:
            failure = PeerLostError(f"rank {rank} sent bytes that are not a message: {error}.", rank=rank)
            raise self._fail(failure) from None
        inbox.current = message
        inbox.sum = payload_sum(inbox.head)
        self._finish(peer, inbox, message)

    def _finish(self, peer: int, inbox: _Inbox, message: Message) -> None:
        """Check and complete a message whose payload has arrived."""
        if message.moved < len(message.data):
            return
        checksums = self._links[peer].checksums
        if checksums is not None and checksums.of(message.data) != inbox.sum:
            rank = self._links[peer].rank
            raise self._fail(damaged_error(rank, self._monitor.rank, message.operation.describe()))
        inbox.current = None
        self._complete(message)
        if inbox.unclaimed:
            self._deliver(peer)

    def _fail(self, error: CyxtrainError) -> CyxtrainError:
        """End the group because of `error`; return a copy of the group's error, to raise."""
        return self._monitor.fail(error).again()

    def _complete(self, message: Message) -> None:
        message.done = True
        self._wake_all()

    def _wake_all(self) -> None:
        """Wake the waiting threads: messages or links have changed."""
        for sleeper in self._asleep:
            sleeper.wake()

    def _claim(self, operation: Operation, peer: int) -> Message | None:
        """Return the oldest recv that matches, and remove it from the waiting ones; None if no recv matches."""
        for message in self._receives:
            if message.peer in (peer, ANY_SOURCE) and message.tag == operation.root:
                self._check(message, operation, self._links[peer].rank)
                self._receives.remove(message)
                message.peer = peer  # a recv from ANY_SOURCE is this rank's from now on
                return message
        return None

    def _deliver(self, peer: int) -> None:
        """Give complete early messages to the recvs that match."""
        inbox = self._inboxes[peer]
        complete = [kept for kept in inbox.unclaimed if kept.done]
        for kept in complete:
            message = self._claim(kept.operation, peer)
            if message is not None:
                inbox.unclaimed.remove(kept)
                message.data[:] = kept.data
                self._complete(message)

    def _check(self, message: Message, found: Operation, rank: int) -> None:
        ours = message.operation
        if ours == found:
            return
        error = CollectiveMismatchError(
            f"rank {rank} sends {found.describe()}, which does not match the recv of rank {self._monitor.rank}: "
            f"{ours.describe()}. send and recv must agree on the number of elements and the dtype.",
            rank=rank,
            during=ours.describe(),
        )
        raise self._fail(error)


def _allocate(payload_bytes: int) -> memoryview:
    """Return memory of this size; the kernel provides its pages only as they fill."""
    try:
        return np.empty(payload_bytes, np.uint8).data
    except (MemoryError, ValueError):
        raise FrameError(f"{payload_bytes} bytes that no recv asked for, and no memory to keep them") from None
