"""Connect to a listening rank and authenticate."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from cyxtrain.errors import RendezvousError, exhausted, reason_of
from cyxtrain.ring.rendezvous.handshake import (
    MAX_BYTES,
    HandshakeClient,
    HandshakeError,
    Hello,
    RefusedError,
    place_of,
    take_message,
)
from cyxtrain.ring.rendezvous.membership import Membership
from cyxtrain.ring.rendezvous.record import RankRecord
from cyxtrain.ring.wire.link import POLL_SECONDS, Deadline, Poller

_EXPLAIN_SECONDS = 0.1
"""How long a rank that was rejected waits for the cause, which arrives at the store."""
_PROOFS = 3
"""Rejected proofs after which a rank reports that the secrets differ."""
_NOTIFY_SECONDS = 1.0


class ClosedError(Exception):
    """The other side closed the connection; `proven`: it had our proof by then."""

    def __init__(self, proven: bool) -> None:
        super().__init__("it closed the connection")
        self.proven = proven


def dial(
    record: RankRecord, peer: int, who: str, hello: Hello, key: bytes, membership: Membership, *, unix: bool = False
) -> socket.socket:
    """Connect to a rank, first at its Unix socket if `unix`; `peer` and `who` are for errors.

    Raises RendezvousError if it cannot be reached, or refuses us.
    """
    rejected = 0
    while True:
        where = f"rank {peer} at {record.unix if unix else f'{record.host}:{record.port}'}"
        try:
            return dial_once(socket_address(record, unix=unix), hello, key, membership.deadline, membership.check)
        except RefusedError as refused:
            raise RendezvousError(f"{where} refused {who}: {refused}.", rank=peer) from None
        except ClosedError as closed:
            _await_cause(membership)
            # Closed before it had our proof, or when the proof was late: bad luck, try again.
            rejected += closed.proven
            if rejected == _PROOFS:
                raise RendezvousError(
                    f"{where} rejected the proof of {who}: the two were most likely started with different secrets. "
                    f"Set CYXTRAIN_SECRET to the same value on every rank, or look at the output of rank {peer}.",
                    rank=peer,
                ) from None
            if membership.deadline.passed():
                raise RendezvousError(f"{where} closes every connection of {who}.", rank=peer) from None
        except HandshakeError as error:
            raise RendezvousError(
                f"{where}: what answers there is not rank {peer} of this run ({error}). Does another program, or an "
                "old process of this job, use that port?",
                rank=peer,
            ) from None
        except OSError as error:
            if exhausted(error):
                raise
            if unix and record.transport != "unix":
                unix = False  # they share a kernel but not a network namespace: two containers, say
                continue
            _await_cause(membership)
            raise RendezvousError(
                f"{who} cannot reach {where} ({reason_of(error)}). Has rank {peer} ended? Across machines, firewalls "
                "must allow TCP between all ranks.",
                rank=peer,
            ) from None


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


def _await_cause(membership: Membership) -> None:
    """Give the rank that knows why the rendezvous fails a moment to report it."""
    Deadline(min(_EXPLAIN_SECONDS, membership.deadline.left())).poll_until(membership.check)
    membership.check_processes()
