"""Messages between two ranks: send and recv, on connections of their own.

Nothing here waits for its own message only: whoever waits moves all messages of the group, in both directions,
so that two ranks that both send first, or both receive first, come through.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field

from cyxtrain.errors import CollectiveMismatchError, CollectiveTimeoutError, CyxtrainError
from cyxtrain.ring.frames import HEADER_BYTES, FrameError, Operation, decode_header, header
from cyxtrain.ring.link import Link, LinkBroken, Poller
from cyxtrain.ring.watch import Watch

ANY_SOURCE = -1


@dataclass(eq=False)
class Message:
    """One send or recv on its way.

    Attributes:
        operation: What it is; `root` is the tag.
        peer: The other rank, or `ANY_SOURCE`.
        data: What is sent, or where it goes.
        done: All of it has moved.
        moved: Bytes that have moved, the header of a send included.
    """

    operation: Operation
    peer: int
    data: memoryview
    done: bool = False
    moved: int = 0

    @property
    def tag(self) -> int:
        """What send and recv must have in common."""
        return self.operation.root


@dataclass
class _Inbox:
    """What arrives from one rank: the header in parts, then a payload, for a recv or (not asked for yet) kept."""

    head: bytearray = field(default_factory=lambda: bytearray(HEADER_BYTES))
    have: int = 0
    current: Message | None = None
    early: list[Message] = field(default_factory=list)


class Mailbox:
    """The messages of one rank.

    Args:
        links: To each other rank, for messages.
        watch: Knows why a link broke.
    """

    def __init__(self, links: dict[int, Link], watch: Watch) -> None:
        self._links = links
        self._watch = watch
        self._outboxes: dict[int, deque[Message]] = {peer: deque() for peer in links}
        self._inboxes = {peer: _Inbox() for peer in links}
        self._wanted: list[Message] = []
        self._lock = threading.RLock()
        self._pollers = threading.local()

    @property
    def busy(self) -> bool:
        """Whether any message is on its way."""
        return bool(self._wanted) or any(self._outboxes.values())

    def post_send(self, message: Message) -> None:
        """Begins a send: as much as the kernel takes leaves at once."""
        with self._lock:
            self._outboxes[message.peer].append(message)
            self.progress()

    def post_receive(self, message: Message) -> None:
        """Begins a recv; what has arrived early is taken first."""
        with self._lock:
            self._wanted.append(message)
            for peer in self._inboxes if message.peer == ANY_SOURCE else (message.peer,):
                if not message.done:
                    self._hand_out(peer)
            self.progress()

    def wait(self, message: Message, deadline: float) -> None:
        """Moves all messages until this one is done.

        Raises:
            PeerLostError, CollectiveMismatchError, CollectiveTimeoutError: And the group has failed.
        """
        poller = self._poller()
        while True:
            with self._lock:
                self.progress()
                if message.done:
                    return
                readers, writers = self.waiting()
            if poller.wait(readers, writers, deadline):
                continue
            whom = "any rank" if message.peer == ANY_SOURCE else f"rank {message.peer}"
            error = CollectiveTimeoutError(
                f"waited for {whom} in {message.operation.describe()} until the deadline. "
                "Is there a matching call with the same tag? collective_timeout_ms sets the deadline.",
                rank=None if message.peer == ANY_SOURCE else message.peer,
                during=message.operation.describe(),
            )
            raise self._watch.fail(error).again()

    def progress(self) -> None:
        """Moves what can move now, and never waits.

        Raises:
            PeerLostError, CollectiveMismatchError: And the group has failed.
        """
        with self._lock:
            try:
                for peer, outbox in self._outboxes.items():
                    while outbox and self._send(self._links[peer], outbox[0]):
                        outbox.popleft()
                for peer in self._inboxes:
                    while self._listens_to(peer) and self._receive(peer):
                        pass
            except LinkBroken as broken:
                raise self._watch.fail(self._watch.explain(broken.rank, broken.reason)).again() from None

    def waiting(self) -> tuple[list[Link], list[Link]]:
        """Returns the links that messages wait to (receive from, send to)."""
        with self._lock:
            readers = [self._links[peer] for peer in self._inboxes if self._listens_to(peer)]
            return readers, [self._links[peer] for peer, outbox in self._outboxes.items() if outbox]

    def _poller(self) -> Poller:
        # A poll object serves one thread at a time.
        if "poller" not in self._pollers.__dict__:
            self._pollers.poller = Poller()
        poller: Poller = self._pollers.poller
        return poller

    def _listens_to(self, peer: int) -> bool:
        if self._inboxes[peer].current is not None:
            return True
        return any(message.peer in (peer, ANY_SOURCE) for message in self._wanted)

    def _send(self, link: Link, message: Message) -> bool:
        """Sends on; returns whether the message has left."""
        if message.moved < HEADER_BYTES:
            head = header(message.operation.identity(), len(message.data))
            message.moved += link.send(head[message.moved :])
        if message.moved >= HEADER_BYTES:
            start = message.moved - HEADER_BYTES
            if start < len(message.data):
                message.moved += link.send(message.data[start:])
            message.done = message.moved == HEADER_BYTES + len(message.data)
        return message.done

    def _receive(self, peer: int) -> bool:
        """Receives on from one rank; returns whether anything moved."""
        inbox, link = self._inboxes[peer], self._links[peer]
        if inbox.current is None:
            count = link.receive(memoryview(inbox.head)[inbox.have :])
            inbox.have += count
            if inbox.have == HEADER_BYTES:
                inbox.have = 0
                self._begin(peer, inbox)
            return count > 0
        message = inbox.current
        count = link.receive(message.data[message.moved :])
        message.moved += count
        self._finish(peer, inbox, message)
        return count > 0

    def _begin(self, peer: int, inbox: _Inbox) -> None:
        """Finds who wants what a header announces; what nobody wants yet is kept."""
        try:
            operation, payload_bytes = decode_header(inbox.head)
        except FrameError as error:
            raise LinkBroken(peer, str(error)) from None
        message = self._claim(operation, peer)
        if message is None:
            message = Message(operation, peer, memoryview(bytearray(payload_bytes)))
            inbox.early.append(message)
        inbox.current = message
        self._finish(peer, inbox, message)

    def _finish(self, peer: int, inbox: _Inbox, message: Message) -> None:
        if message.moved == len(message.data):
            message.done = True
            inbox.current = None
            if inbox.early:
                self._hand_out(peer)

    def _claim(self, operation: Operation, peer: int) -> Message | None:
        """Returns the oldest recv that wants this, no longer waiting; None: nobody does."""
        for message in self._wanted:
            if message.peer in (peer, ANY_SOURCE) and message.tag == operation.root:
                self._check(message, operation, peer)
                self._wanted.remove(message)
                message.peer = peer
                return message
        return None

    def _hand_out(self, peer: int) -> None:
        """Gives what came early, and is whole, to who wants it by now."""
        inbox = self._inboxes[peer]
        for kept in [kept for kept in inbox.early if kept.done]:
            message = self._claim(kept.operation, peer)
            if message is not None:
                inbox.early.remove(kept)
                message.data[:] = kept.data
                message.done = True

    def _check(self, message: Message, found: Operation, peer: int) -> None:
        ours = message.operation
        if (ours.kind, ours.dtype, ours.shape, ours.generation) == (
            found.kind,
            found.dtype,
            found.shape,
            found.generation,
        ):
            return
        error: CyxtrainError = CollectiveMismatchError(
            f"rank {peer} sends {found.describe()}, which does not fit our recv: {ours.describe()}. "
            "send and recv must agree on the number of elements and the dtype.",
            rank=peer,
            during=ours.describe(),
        )
        raise self._watch.fail(error).again()
