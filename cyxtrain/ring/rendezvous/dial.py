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
    """The other side closed the connection; `proven`: we had sent our proof by then."""

    def __init__(self, proven: bool) -> None:
        super().__init__("it closed the connection")
        self.proven = proven


def notify_duplicate(record: RankRecord, hello: Hello, key: bytes) -> None:
    """Connect to the process that already has this rank, so that its log reports the duplicate."""
    with contextlib.suppress(OSError, HandshakeError, RefusedError, ClosedError):
        dial_once(socket_address(record, unix=False), hello, key, Deadline(_NOTIFY_SECONDS), lambda: None).close()


def socket_address(record: RankRecord, *, unix: bool) -> tuple[int, Any]:
    """Return the family and the address of the socket at which a rank listens."""
    if unix:
        return socket.AF_UNIX, unix_address(record.unix)
    return family_of(record.host), (record.host, record.port)


def family_of(host: str) -> socket.AddressFamily:
    """Return the family of an IP address."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def unix_address(name: str) -> str:
    """Return the address of an abstract Unix socket written as "@name"."""
    return "\0" + name.removeprefix("@")


def dial_once(
    address: tuple[int, Any], hello: Hello, key: bytes, deadline: Deadline, poll: Callable[[], None]
) -> socket.socket:
    """Connect and authenticate at an address of `socket_address`; call `poll` while waiting.

    Raises:
        RefusedError: The other side knows the secret and refuses us.
        ClosedError: The other side closed the connection.
        HandshakeError: The other side is not a rank of this run.
        OSError: The address cannot be reached.
    """
    family, target = address
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)  # a blocking connect can take minutes, without `poll`
        _raise_code(sock.connect_ex(target), allowed=(errno.EINPROGRESS, errno.EWOULDBLOCK))
        _wait([], [sock], deadline, poll)
        _raise_code(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))  # writable: it has connected or failed
        authenticate(sock, replace(hello, to_place=place_of(target)), key, deadline, poll)
    except BaseException:
        sock.close()
        raise
    return sock


def _raise_code(code: int, allowed: tuple[int, ...] = ()) -> None:
    """Raise the error of the operating system with this code; 0: it succeeded."""
    if code != 0 and code not in allowed:
        raise OSError(code, os.strerror(code))


def authenticate(sock: socket.socket, hello: Hello, key: bytes, deadline: Deadline, poll: Callable[[], None]) -> None:
    """Do the client's part of a handshake on a connected, non-blocking socket, which stays open on errors.

    Arguments and errors are the same as in `dial_once`.
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
        _wait([sock], [], deadline, poll)
        try:
            part = sock.recv(MAX_BYTES)
        except BlockingIOError:
            continue
        except ConnectionResetError:
            part = b""  # a close with unread data arrives as a reset
        if not part:
            raise ClosedError(proven)
        received += part
    return body


def _wait(
    readers: list[socket.socket], writers: list[socket.socket], deadline: Deadline, poll: Callable[[], None]
) -> None:
    poller = Poller()
    while not poller.wait(readers, writers, deadline, POLL_SECONDS):
        poll()
        if deadline.passed():
            raise TimeoutError(errno.ETIMEDOUT, "timed out: no answer before the deadline")
