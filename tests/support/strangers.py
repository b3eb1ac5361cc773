"""Connections that no rank makes, as data: what strangers say to a port, and what they hear."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace

from cyxtrain.ring.rendezvous.handshake import (
    HandshakeClient,
    HandshakeError,
    Hello,
    Role,
    message,
    place_of,
    take_message,
)

Address = tuple[str, int]
SECONDS = 10.0
KEY = b"the secret of this run"
CLAIM = Hello(run="00" * 16, generation=0, role=Role.CONTROL, rank=1, world_size=2, checksums=False)
HELLO = HandshakeClient(CLAIM, b"").hello()

WORDS = {
    "garbage": bytes(range(256)) * 16,
    "HTTP": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "TLS": bytes.fromhex("16030100c8010000c40303") + bytes(200),
    "zeros": bytes(5000),
    "a huge length": struct.pack(">4sI", b"CYXT", 2**32 - 1) + bytes(5000),
    "a length that is just too long": struct.pack(">4sI", b"CYXT", 2041) + bytes(5000),
    "an empty message": struct.pack(">4sI", b"CYXT", 0),
    "brackets": struct.pack(">4sI", b"CYXT", 2040) + b"[" * 2040,
    "nested objects": struct.pack(">4sI", b"CYXT", 2040) + b'{"a":' * 408,
    "a number of a thousand digits": struct.pack(">4sI", b"CYXT", 1000) + b"9" * 1000,
    "JSON that is no object": message({})[:4] + struct.pack(">I", 4) + b"null",
    "an object without facts": message({}),
    "facts of wrong types": message({name: [1] for name in ("run", "generation", "role", "rank", "nonce")}),
    "a rank below zero": HELLO.replace(b'"rank": 1', b'"rank":-1'),
}
"""What is no hello, by name."""
UNFINISHED = {"nothing": b"", "half a prefix": HELLO[:3], "half a hello": HELLO[:-20]}
"""What may become a hello, by name."""


def body(data: bytes) -> bytes:
    """The body of the one message that was said."""
    received = bytearray(data)
    found = take_message(received)
    assert found is not None
    assert not received
    return found


def connect(address: Address, seconds: float = SECONDS) -> socket.socket:
    return socket.create_connection(address, timeout=seconds)


def say(sock: socket.socket, data: bytes) -> None:
    """Says it, or finds that nobody listens any more."""
    with contextlib.suppress(OSError):
        sock.sendall(data)


def hear_all(sock: socket.socket) -> bytes:
    """Returns all that is heard until the other side closes."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while part := sock.recv(65536):
            received += part
    return received


def shake_hands(sock: socket.socket, claim: Hello, key: bytes) -> None:
    """Does a caller's part of the handshake.

    Raises:
        HandshakeError: As `Caller`; also where the other side closes the connection.
        RefusedError: The other side says why.
    """
    caller, received = HandshakeClient(replace(claim, to_place=place_of(sock.getpeername())), key), bytearray()
    say(sock, caller.hello())
    say(sock, caller.prove(_hear(sock, received)))
    caller.conclude(_hear(sock, received))


def _hear(sock: socket.socket, received: bytearray) -> bytes:
    while (body := take_message(received)) is None:
        part = b""
        with contextlib.suppress(ConnectionResetError):
            part = sock.recv(4096)
        if not part:
            raise HandshakeError("it closed the connection")
        received += part
    return body


# --- many of them ---------------------------------------------------------------------------------------------------


class Crowd:
    """Strangers at one port, all at once: some stay and say nothing, some speak one byte at a time, some leave.

    Args:
        address: Of the port.
        recorded: What a member said when it was let in.
        keep: How many stay connected at most: each costs this process a descriptor.
    """

    def __init__(self, address: Address, recorded: bytes = b"", keep: int = 300) -> None:
        self.address = address
        self.count = 0
        self._keep = keep
        self._there: list[socket.socket] = []
        self._slow: list[tuple[socket.socket, Iterator[int]]] = []
        self._kinds: list[Callable[[], socket.socket]] = [
            *(lambda words=words: self._speak(words) for words in (*WORDS.values(), *UNFINISHED.values())),
            *(lambda: self._speak(recorded), lambda: self._speak(recorded + bytes(8000))),
            *(self._half_open, self._reset, self._slowly, self._with_a_wrong_secret),
        ]

    def come(self, count: int) -> None:
        """So many more connect, one kind after the other; those who speak slowly say a byte each meanwhile."""
        for _ in range(count):
            sock = self._kinds[self.count % len(self._kinds)]()
            self.count += 1
            self._there.append(sock)
            if len(self._there) > self._keep:
                self._there.pop(0).close()
            for slow, rest in self._slow:
                with contextlib.suppress(OSError, StopIteration):
                    slow.send(bytes([next(rest)]))

    def leave(self) -> None:
        for sock in self._there:
            sock.close()
        self._there.clear()
        self._slow.clear()

    def _speak(self, words: bytes) -> socket.socket:
        sock = connect(self.address)
        say(sock, words)
        return sock

    def _half_open(self) -> socket.socket:
        sock = self._speak(HELLO[:40])
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_WR)
        return sock

    def _reset(self) -> socket.socket:
        sock = self._speak(HELLO)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()
        return sock

    def _slowly(self) -> socket.socket:
        sock = connect(self.address)
        sock.setblocking(False)
        self._slow.append((sock, iter(HELLO)))
        return sock

    def _with_a_wrong_secret(self) -> socket.socket:
        """Answers the challenge as soon as it comes; nobody waits for it where no door is open yet."""
        sock = self._speak(HELLO)
        sock.settimeout(0.02)
        with contextlib.suppress(OSError):
            sock.recv(4096)
            sock.sendall(message({"proof": "00" * 32}))
        return sock
