"""Connect to a listening rank and authenticate."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from cyxtrain.ring.rendezvous.handshake import (
    MAX_BYTES,
    HandshakeClient,
    HandshakeError,
    Hello,
    RefusedError,
    place_of,
    take_message,
)
from cyxtrain.ring.rendezvous.record import RankRecord
from cyxtrain.ring.wire.link import POLL_SECONDS, Deadline, Poller

_NOTIFY_SECONDS = 1.0


class ClosedError(Exception):
    """The other side closed the connection; `proven`: it had our proof by then."""

    def __init__(self, proven: bool) -> None:
        super().__init__("it closed the connection")
        self.proven = proven


def notify_duplicate(record: RankRecord, hello: Hello, key: bytes) -> None:
    """Connect to the process that already is this rank, so that its log reports a duplicate."""
    with contextlib.suppress(OSError, HandshakeError, RefusedError, ClosedError):
        dial_once(socket_address(record, unix=False), hello, key, Deadline(_NOTIFY_SECONDS), lambda: None).close()


def socket_address(record: RankRecord, *, unix: bool) -> tuple[int, Any]:
    """Return the family and the address of the socket at which a rank listens."""
    if unix:
        return socket.AF_UNIX, unix_address(record.unix)
    return socket.AF_INET6 if ":" in record.host else socket.AF_INET, (record.host, record.port)


def unix_address(name: str) -> str:
    """Return the address of an abstract Unix socket written as "@name"."""
    return "\0" + name.removeprefix("@")


def dial_once(
    address: tuple[int, Any], hello: Hello, key: bytes, deadline: Deadline, poll: Callable[[], None]
) -> socket.socket:
    """Connect and authenticate, in one try, at an address of `socket_address`; call `poll` again and again meanwhile.

    Raises:
        RefusedError: The other side knows the secret and refuses us.
        ClosedError: It closed the connection.
        HandshakeError: It is no rank.
        OSError: It cannot be reached.
    """
    sock = socket.socket(address[0], socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        code = sock.connect_ex(address[1])
        if code not in (0, errno.EINPROGRESS, errno.EWOULDBLOCK):
            raise OSError(code, os.strerror(code))
        _wait(sock, deadline, poll, writing=True)
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
        authenticate(sock, replace(hello, to_place=place_of(address[1])), key, deadline, poll)
    except BaseException:
        sock.close()
        raise
    return sock


def authenticate(sock: socket.socket, hello: Hello, key: bytes, deadline: Deadline, poll: Callable[[], None]) -> None:
    """Do the client's part of a handshake on a connected, non-blocking socket, which stays open on errors.

    Args and errors are those of `dial_once`.
    """
    client = HandshakeClient(hello, key)
    received = bytearray()
    _send(sock, client.hello(), proven=False)
    answer = _receive(sock, received, deadline, poll, proven=False)
    _send(sock, client.prove(answer), proven=True)
    client.conclude(_receive(sock, received, deadline, poll, proven=True))


def _send(sock: socket.socket, data: bytes, *, proven: bool) -> None:
    """Send a short message into an empty buffer, where it cannot block."""
    try:
        sock.sendall(data)
    except (BrokenPipeError, ConnectionResetError):
        raise ClosedError(proven) from None


def _receive(
    sock: socket.socket, received: bytearray, deadline: Deadline, poll: Callable[[], None], *, proven: bool
) -> bytes:
    while (body := take_message(received)) is None:
        _wait(sock, deadline, poll)
        try:
            part = sock.recv(MAX_BYTES)
        except BlockingIOError:
            continue
        except ConnectionResetError:
            part = b""
        if not part:
            raise ClosedError(proven)
        received += part
    return body


def _wait(sock: socket.socket, deadline: Deadline, poll: Callable[[], None], *, writing: bool = False) -> None:
    poller = Poller()
    readers, writers = ([], [sock]) if writing else ([sock], [])
    while not poller.wait(readers, writers, deadline, POLL_SECONDS):
        poll()
        if deadline.passed():
            raise TimeoutError(errno.ETIMEDOUT, "timed out: no answer before the deadline")
