"""Lets members in, and nobody else: while the ranks meet, and for as long as they work.

A stranger costs a descriptor, at most 4 KiB and five seconds, and one line in the log a second for all of them.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cyxtrain.ring.rendezvous.handshake import (
    MAX_BYTES,
    Claim,
    HandshakeError,
    Listener,
    NoProofError,
    place_of,
    take_message,
)

_log = logging.getLogger("cyxtrain.ring")
_HANDSHAKE_SECONDS = 5.0
"""How long a stranger may take to say and prove who it is."""
_MAX_STRANGERS = 256
"""How many may do so at a time; then the one that came first must go."""
_MAX_COUNTED = 1024
"""How many ranks are counted that somebody claimed to be: strangers can name four thousand million."""
_ACCEPT_AT_ONCE = 32
_PAUSE_SECONDS = 1.0
"""How long nobody is let in after this process ran out of descriptors or memory."""
_TOO_SLOW = "it was too slow to say who it is"
_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, vars(errno).get("WSAEMFILE")}


class SparseLog:
    """Warnings that strangers can cause: one a second at most, the others are counted.

    Args:
        name: Whose log it is.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._count = 0
        self._last = ""
        self._next = 0.0

    def note(self, text: str, now: float) -> None:
        """Writes a line now, or counts it for the next one."""
        self._count += 1
        self._last = text
        self.flush(now)

    def flush(self, now: float) -> None:
        """Writes what was counted, if its second is over."""
        if not self._count or now < self._next:
            return
        others = f" ({self._count} since the last such line)" if self._count > 1 else ""
        self._count, self._next = 0, now + 1.0
        _log.warning("%s %s%s", self._name, self._last, others)


@dataclass
class _Stranger:
    """Somebody who has not proved who it is.

    Attributes:
        address: From where it came, for the log.
        until: When it must go, in seconds of `time.monotonic`.
        listener: Our side of the handshake.
        heard: What it said and was not yet understood.
        count: Bytes that it has sent.
    """

    address: str
    until: float
    listener: Listener
    received: bytearray = field(default_factory=bytearray)
    count: int = 0


class Acceptor:
    """Takes connections at a listener, and hands over those of members.

    Args:
        listeners: Non-blocking; owned by whoever made them.
        name: Of this rank, for the log: "rank 3".
        key: The run's secret.
        judge: Called with the claim of one who knows the secret; returns why it may not come in, or "".
        admit: Called with the claim and the socket of each member.
        selector: Waits for all sockets; the data of each is the function to call.

    Attributes:
        unproven: For each rank, how many claimed to be it and did not know the secret.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        name: str,
        key: bytes,
        judge: Callable[[Claim], str],
        admit: Callable[[Claim, socket.socket], None],
        selector: selectors.BaseSelector,
    ) -> None:
        self._listeners = list(listeners)
        self._key = key
        self._judge = judge
        self._admit = admit
        self._selector = selector
        self._log = SparseLog(name)
        self._strangers: dict[socket.socket, _Stranger] = {}
        self._reopens: float | None = None
        self.unproven: Counter[int] = Counter()
        self._listen()

    def leave(self, listener: socket.socket) -> None:
        """Takes nobody any more who comes to this listener."""
        self._listeners.remove(listener)
        if self._reopens is None:
            self._selector.unregister(listener)

    def expire(self, now: float) -> None:
        """Sends away whoever took too long; to be called about once a second."""
        for sock in [sock for sock, stranger in self._strangers.items() if stranger.until <= now]:
            self._turn_away(sock, _TOO_SLOW)
        if self._reopens is not None and self._reopens <= now:
            self._reopens = None
            self._listen()
        self._log.flush(now)

    def close(self) -> None:
        """Turns away whoever has not proved who it is."""
        for sock in list(self._strangers):
            self._forget(sock)
            sock.close()

    def abandon(self) -> None:
        """Closes what a forked child has of it; the parent's selector must not notice."""
        for sock in self._strangers:
            sock.close()

    def _listen(self) -> None:
        for listener in self._listeners:
            self._selector.register(listener, selectors.EVENT_READ, functools.partial(self._accept, listener))

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPT_AT_ONCE):
            try:
                sock, address = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    self._pause(error)
                    return
                continue  # it has left again
            if len(self._strangers) >= _MAX_STRANGERS:
                self._turn_away(self._least_known(), "others came")
            sock.setblocking(False)
            until = time.monotonic() + _HANDSHAKE_SECONDS
            where = str(address[0]) if address else "this machine"  # who comes by a Unix socket has no address
            self._strangers[sock] = _Stranger(where, until, Listener(self._key))
            self._selector.register(sock, selectors.EVENT_READ, lambda sock=sock: self._hear(sock))

    def _least_known(self) -> socket.socket:
        """Returns the oldest of those who have said nothing that makes sense; else the oldest of all."""
        silent = (sock for sock, stranger in self._strangers.items() if stranger.listener.claim is None)
        return next(silent, next(iter(self._strangers)))

    def _pause(self, error: OSError) -> None:
        """A listener that cannot accept stays ready: without a pause this thread would do nothing else."""
        if self._reopens is not None:
            return
        for listener in self._listeners:
            self._selector.unregister(listener)
        self._reopens = time.monotonic() + _PAUSE_SECONDS
        self._log.note(f"cannot take connections for now: {error.strerror}", time.monotonic())

    def _hear(self, sock: socket.socket) -> None:
        stranger = self._strangers.get(sock)
        if stranger is None:
            return  # it was turned away since it became ready
        try:
            part = sock.recv(MAX_BYTES - stranger.count)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._turn_away(sock, error.strerror or "it broke")
            return
        stranger.count += len(part)
        stranger.received += part
        try:
            while (body := take_message(stranger.received)) is not None:
                if self._answer(sock, stranger, body):
                    return
        except NoProofError as error:
            self._count_unproven(stranger.listener.claim)
            self._turn_away(sock, str(error))
            return
        except HandshakeError as error:
            self._turn_away(sock, str(error))
            return
        # Last: a proof that came in time counts, also where this process was too busy to read it then.
        if not stranger.count:
            self._forget(sock)  # somebody who looks whether the port is open
            sock.close()
        elif not part or stranger.count >= MAX_BYTES:
            self._turn_away(sock, "it said too much" if part else "it left")
        elif time.monotonic() >= stranger.until:
            self._turn_away(sock, _TOO_SLOW)

    def _count_unproven(self, claim: Claim | None) -> None:
        if claim is not None and (claim.rank in self.unproven or len(self.unproven) < _MAX_COUNTED):
            self.unproven[claim.rank] += 1

    def _answer(self, sock: socket.socket, stranger: _Stranger, body: bytes) -> bool:
        """Goes one step on with the handshake; returns whether it is over."""
        claim = stranger.listener.claim
        if claim is None:
            _send(sock, stranger.listener.answer(body))
            return False
        stranger.listener.check(body)
        place = place_of(sock.getsockname())
        if claim.to_place and claim.to_place != place:
            refused = (
                f"it means to call {claim.to_place}, and has reached {place}: somebody stands between, or addresses "
                "are translated on the way"
            )
        else:
            refused = self._judge(claim)
        _send(sock, stranger.listener.verdict(refused))
        if refused:
            self._turn_away(sock, refused)
            return True
        self._forget(sock)
        self._admit(claim, sock)
        return True

    def _turn_away(self, sock: socket.socket, reason: str) -> None:
        stranger = self._forget(sock)
        sock.close()
        self._log.note(f"turned away a connection from {stranger.address}: {reason}", time.monotonic())

    def _forget(self, sock: socket.socket) -> _Stranger:
        self._selector.unregister(sock)
        return self._strangers.pop(sock)


def _send(sock: socket.socket, data: bytes) -> None:
    """Sends a short message into an empty buffer, where it cannot block; if the other has gone, its end will tell."""
    with contextlib.suppress(OSError):
        sock.send(data)
