"""Accept connections of members and refuse all others, during rendezvous and while the ranks work.

An unauthenticated connection costs at most a descriptor, 4 KiB and five seconds; all together one log line a second.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cyxtrain.errors import brief, exhausted
from cyxtrain.ring.rendezvous.handshake import (
    MAX_BYTES,
    HandshakeError,
    HandshakeServer,
    Hello,
    NoProofError,
    place_of,
    take_message,
)

_log = logging.getLogger("cyxtrain.ring")
_HANDSHAKE_SECONDS = 5.0
_MAX_STRANGERS = 256
"""Unauthenticated connections at a time; beyond that the oldest is closed."""
_MAX_COUNTED = 1024
"""Ranks for which failed proofs are counted: a client can name any of 2^32."""
_ACCEPT_AT_ONCE = 32
_LOGGED_CHARACTERS = 400
_PAUSE_SECONDS = 1.0
"""Pause after this process ran out of descriptors or memory."""
_TOO_SLOW = "it did not authenticate in time"


class SparseLog:
    """Warnings that strangers can cause: at most one a second; the others are counted."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._count = 0
        self._last = ""
        self._next = 0.0

    def note(self, text: str, now: float) -> None:
        """Write a line now, or count it for the next one."""
        self._count += 1
        self._last = brief(text, _LOGGED_CHARACTERS)
        self.flush(now)

    def flush(self, now: float) -> None:
        """Write what was counted, unless the last line is less than a second old."""
        if not self._count or now < self._next:
            return
        others = ""
        if self._count > 1:
            others = f" ({self._count} since the last such line)"
        self._count = 0
        self._next = now + 1.0
        _log.warning("%s %s%s", self._prefix, self._last, others)


@dataclass
class _Stranger:
    """An unauthenticated connection."""

    address: str
    expires_at: float
    handshake: HandshakeServer
    received: bytearray = field(default_factory=bytearray)
    received_bytes: int = 0
    is_early: bool = False
    """It is a member of a later generation, and waits for the verdict until this process begins that generation."""


class Acceptor:
    """Authenticates connections at listening sockets, and hands over the members.

    `name` is for the log: "rank 3". `authorize` gets the hello of a client that knows the secret, and returns why the
    client is refused, "" to accept it, or None to let it wait for the next `judge_by`. `accept` gets the hello and the
    socket of each member. The data of each socket in `selector` is the function to call.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        name: str,
        key: bytes,
        authorize: Callable[[Hello], str | None],
        accept: Callable[[Hello, socket.socket], None],
        selector: selectors.BaseSelector,
    ) -> None:
        self._listeners = list(listeners)
        self._key = key
        self._authorize = authorize
        self._accept = accept
        self._selector = selector
        self._log = SparseLog(name)
        self._strangers: dict[socket.socket, _Stranger] = {}
        self._reopens_at: float | None = None
        self._paused_by: OSError | None = None
        self.failure: OSError | None = None
        """Why it could not accept a connection twice in a row, a second apart."""
        self.unauthenticated: Counter[int] = Counter()
        """By rank, how many clients claimed to be it without knowing the secret."""
        self._register_listeners()

    def judge_by(
        self, authorize: Callable[[Hello], str | None], accept: Callable[[Hello, socket.socket], None]
    ) -> None:
        """Replace both functions, and judge the members that have waited for the new ones."""
        self._authorize = authorize
        self._accept = accept
        for sock, stranger in list(self._strangers.items()):
            if stranger.is_early:
                self._judge(sock, stranger)

    def remove(self, listener: socket.socket) -> None:
        """Stop accepting at a listening socket."""
        self._listeners.remove(listener)
        if self._reopens_at is None:  # `_pause` has unregistered all listeners otherwise
            self._selector.unregister(listener)

    def serve(self, seconds: float) -> None:
        """Wait up to `seconds`, call the functions of sockets that are ready, and expire the others."""
        for key, _ in self._selector.select(seconds):
            key.data()
        self.expire(time.monotonic())

    def expire(self, now: float) -> None:
        """Close connections that did not authenticate in time; call it about once a second."""
        expired = [sock for sock, stranger in self._strangers.items() if stranger.expires_at <= now]
        for sock in expired:
            self._reject(sock, _TOO_SLOW)
        if self._reopens_at is not None and self._reopens_at <= now:
            self._reopens_at = None
            self._register_listeners()
        self._log.flush(now)

    def close(self) -> None:
        """Close all connections that were not accepted."""
        for sock in list(self._strangers):
            stranger = self._forget(sock)
            if stranger.is_early:
                _send(sock, stranger.handshake.verdict("it has left and does not begin the next generation"))
            sock.close()

    def abandon(self) -> None:
        """Close them in a forked child, without touching the selector, which it shares with the parent."""
        for sock in self._strangers:
            sock.close()

    def _register_listeners(self) -> None:
        for listener in self._listeners:
            self._selector.register(listener, selectors.EVENT_READ, functools.partial(self._on_connect, listener))

    def _on_connect(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPT_AT_ONCE):
            try:
                sock, address = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if exhausted(error):
                    self._pause(error)
                    return
                continue  # the client has disconnected already
            self.failure = None
            self._paused_by = None
            self._begin_handshake(sock, address)

    def _begin_handshake(self, sock: socket.socket, address: Any) -> None:
        """Wait for the hello of a new connection, in place of the oldest one if there are too many."""
        if len(self._strangers) >= _MAX_STRANGERS:
            self._reject(self._oldest(), "too many others connected")
        sock.setblocking(False)
        source = str(address[0]) if address else "this machine"  # a Unix socket has no address
        expires_at = time.monotonic() + _HANDSHAKE_SECONDS
        self._strangers[sock] = _Stranger(source, expires_at, HandshakeServer(self._key))
        self._selector.register(sock, selectors.EVENT_READ, functools.partial(self._on_data, sock))

    def _oldest(self) -> socket.socket:
        """Return the oldest connection without a valid hello; if all have one, the oldest of all."""
        for sock, stranger in self._strangers.items():
            if stranger.handshake.hello is None:
                return sock
        return next(iter(self._strangers))

    def _pause(self, error: OSError) -> None:
        """Stop accepting for a second."""
        if self._reopens_at is not None:
            return
        # A listener that cannot accept stays ready, and would keep this thread busy.
        for listener in self._listeners:
            self._selector.unregister(listener)
        self._reopens_at = time.monotonic() + _PAUSE_SECONDS
        self.failure = self._paused_by
        self._paused_by = error
        self._log.note(f"cannot take connections for now: {error.strerror}", time.monotonic())

    def _on_data(self, sock: socket.socket) -> None:
        stranger = self._strangers.get(sock)
        if stranger is None:
            return  # it was rejected since it became ready
        try:
            part = sock.recv(MAX_BYTES - stranger.received_bytes)
        except BlockingIOError:
            return
        except OSError as error:
            self._reject(sock, error.strerror or "the connection broke")
            return
        stranger.received_bytes += len(part)
        stranger.received += part
        is_complete = self._read_messages(sock, stranger)
        if is_complete:
            return
        # After reading: a proof that arrived in time counts, even if this process was too busy to read it then.
        if not stranger.received_bytes:
            self._forget(sock)  # a client that only checks whether the port is open
            sock.close()
        elif not part:
            self._reject(sock, "it left")
        elif stranger.received_bytes >= MAX_BYTES:
            self._reject(sock, "it sent too much")
        elif time.monotonic() >= stranger.expires_at:
            self._reject(sock, _TOO_SLOW)

    def _read_messages(self, sock: socket.socket, stranger: _Stranger) -> bool:
        """Process all complete messages; return whether the handshake is complete or has failed."""
        try:
            while (body := take_message(stranger.received)) is not None:
                if self._advance(sock, stranger, body):
                    return True
        except HandshakeError as error:
            hello = stranger.handshake.hello
            if isinstance(error, NoProofError) and hello is not None:
                self._count_unauthenticated(hello)
            self._reject(sock, str(error))
            return True
        return False

    def _count_unauthenticated(self, hello: Hello) -> None:
        if hello.rank in self.unauthenticated or len(self.unauthenticated) < _MAX_COUNTED:
            self.unauthenticated[hello.rank] += 1

    def _advance(self, sock: socket.socket, stranger: _Stranger, body: bytes) -> bool:
        """Take the next step of a handshake; return whether it is complete."""
        if stranger.handshake.hello is None:
            _send(sock, stranger.handshake.answer(body))
            return False
        stranger.handshake.check(body)
        self._judge(sock, stranger)
        return True

    def _judge(self, sock: socket.socket, stranger: _Stranger) -> None:
        """Accept or refuse a client that knows the secret, or let it wait."""
        hello = stranger.handshake.hello
        assert hello is not None
        refused = _why_relayed(hello, place_of(sock.getsockname())) or self._authorize(hello)
        stranger.is_early = refused is None
        if refused is None:
            stranger.expires_at = math.inf
            return
        _send(sock, stranger.handshake.verdict(refused))
        if refused:
            self._reject(sock, refused)
            return
        self._forget(sock)
        self._accept(hello, sock)

    def _reject(self, sock: socket.socket, reason: str) -> None:
        stranger = self._forget(sock)
        sock.close()
        self._log.note(f"turned away a connection from {stranger.address}: {reason}", time.monotonic())

    def _forget(self, sock: socket.socket) -> _Stranger:
        self._selector.unregister(sock)
        return self._strangers.pop(sock)


def _why_relayed(hello: Hello, place: str) -> str:
    """Return why a client has not reached the address that it connected to; "" if it has."""
    if hello.to_place in ("", place):
        return ""
    return (
        f"it connected to {hello.to_place} and reached {place}: something relays the connection, or addresses are "
        "translated on the way"
    )


def _send(sock: socket.socket, data: bytes) -> None:
    """Send a short message into an empty buffer, where it cannot block."""
    with contextlib.suppress(OSError):  # the next `recv` reports a closed connection
        sock.send(data)
