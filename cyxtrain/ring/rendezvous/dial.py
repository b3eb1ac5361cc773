"""Calls a rank that listens: connects, proves who we are, and hears whether we may come in."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from cyxtrain.errors import RendezvousError
from cyxtrain.ring.rendezvous.handshake import (
    MAX_BYTES,
    Caller,
    Claim,
    HandshakeError,
    RefusedError,
    place_of,
    take_message,
)
from cyxtrain.ring.rendezvous.membership import LOOK_SECONDS, Membership
from cyxtrain.ring.rendezvous.record import RankRecord
from cyxtrain.ring.wire.link import Deadline, Poller

_EXPLAIN_SECONDS = 0.1
"""How long a rank that was sent away waits for the cause, which comes by way of the store."""
_PROOFS = 3
"""How often it proves in vain that it knows the secret."""
_KNOCK_SECONDS = 1.0


class ClosedError(Exception):
    """The other side closed the connection.

    Attributes:
        proven: Whether it had our proof by then.
    """

    def __init__(self, proven: bool) -> None:
        super().__init__("it closed the connection")
        self.proven = proven


def call(
    entry: RankRecord, peer: int, who: str, claim: Claim, key: bytes, roll: Membership, *, near: bool = False
) -> socket.socket:
    """Connects to a rank.

    Args:
        entry: Where it listens.
        peer: How errors call it.
        who: How errors call us: "rank 3".
        claim: What we say of ourselves.
        key: The run's secret.
        roll: Says why the meeting failed, and when to give up.
        near: Whether to try its Unix socket first.

    Raises:
        RendezvousError: It cannot be reached, or does not let us in.
    """
    disbelieved = 0
    while True:
        where = f"rank {peer} at {entry.unix if near else f'{entry.host}:{entry.port}'}"
        try:
            return call_once(socket_address(entry, near=near), claim, key, roll.deadline, roll.look)
        except RefusedError as refused:
            raise RendezvousError(f"{where} refused {who}: {refused}.", rank=peer) from None
        except ClosedError as closed:
            _hear_why(roll)
            # Who was sent away before it could prove itself, or when its proof came late, had bad luck: it tries again.
            disbelieved += closed.proven
            if disbelieved == _PROOFS:
                raise RendezvousError(
                    f"{where} did not believe {who}: they were most likely started with different secrets. Set "
                    f"CYXTRAIN_SECRET to the same value on every rank; else look at the output of rank {peer}.",
                    rank=peer,
                ) from None
            if roll.deadline.passed():
                raise RendezvousError(f"{where} closes every connection of {who}.", rank=peer) from None
        except HandshakeError as error:
            raise RendezvousError(
                f"{where}: what answers there is not rank {peer} of this run ({error}). Does another program, or an "
                "old process of this job, use that port?",
                rank=peer,
            ) from None
        except OSError as error:
            if near and entry.transport == "auto":
                near = False  # they share a kernel, and not a network: two containers, say
                continue
            _hear_why(roll)
            raise RendezvousError(
                f"{who} cannot reach {where} ({_reason(error)}). Has rank {peer} ended? Across machines, firewalls "
                "must allow TCP between all ranks.",
                rank=peer,
            ) from None


def knock(entry: RankRecord, claim: Claim, key: bytes) -> None:
    """Lets a rank know that somebody came as it: it refuses us, and its log says so. Harmless where it has gone."""
    with contextlib.suppress(OSError, HandshakeError, RefusedError, ClosedError):
        call_once(socket_address(entry, near=False), claim, key, Deadline(_KNOCK_SECONDS), lambda: None).close()


def socket_address(entry: RankRecord, *, near: bool) -> tuple[int, Any]:
    """Returns the family and the address of the socket at which a rank listens."""
    if near:
        return socket.AF_UNIX, unix_address(entry.unix)
    return socket.AF_INET6 if ":" in entry.host else socket.AF_INET, (entry.host, entry.port)


def unix_address(name: str) -> str:
    """Returns the address of an abstract Unix socket, whose name people write with "@": it has no file."""
    return "\0" + name.removeprefix("@")


def call_once(
    address: tuple[int, Any], claim: Claim, key: bytes, deadline: Deadline, look: Callable[[], None]
) -> socket.socket:
    """Connects, and proves who we are.

    Args:
        address: As `socket_address` gives it.
        claim: What we say of ourselves.
        key: The run's secret.
        deadline: When to give up.
        look: Called again and again while it waits.

    Raises:
        RefusedError: It knows the secret, and does not let us in.
        ClosedError: It closed the connection.
        HandshakeError: What answers there is no rank.
        OSError: It cannot be reached.
    """
    sock = socket.socket(address[0], socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        code = sock.connect_ex(address[1])
        if code not in (0, errno.EINPROGRESS, errno.EWOULDBLOCK):
            raise OSError(code, os.strerror(code))
        _wait(sock, deadline, look, writing=True)
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
        introduce(sock, replace(claim, to_place=place_of(address[1])), key, deadline, look)
    except BaseException:
        sock.close()
        raise
    return sock


def introduce(sock: socket.socket, claim: Claim, key: bytes, deadline: Deadline, look: Callable[[], None]) -> None:
    """Proves on a new connection who we are, and that the other side knows the secret.

    Args and errors are those of `call_once`; `sock` is connected and non-blocking, and stays open where it fails.
    """
    caller = Caller(claim, key)
    received = bytearray()
    _send(sock, caller.hello(), proven=False)
    answer = _hear(sock, received, deadline, look, proven=False)
    _send(sock, caller.prove(answer), proven=True)
    caller.conclude(_hear(sock, received, deadline, look, proven=True))


def _send(sock: socket.socket, data: bytes, *, proven: bool) -> None:
    """Sends a short message into an empty buffer, where it cannot block."""
    try:
        sock.sendall(data)
    except (BrokenPipeError, ConnectionResetError):
        raise ClosedError(proven) from None


def _hear(
    sock: socket.socket, received: bytearray, deadline: Deadline, look: Callable[[], None], *, proven: bool
) -> bytes:
    """Returns the body of the next message."""
    while (body := take_message(received)) is None:
        _wait(sock, deadline, look)
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


def _wait(sock: socket.socket, deadline: Deadline, look: Callable[[], None], *, writing: bool = False) -> None:
    """Waits until a socket is ready; looks meanwhile whether the meeting has failed."""
    poller = Poller()
    readers, writers = ([], [sock]) if writing else ([sock], [])
    while not poller.wait(readers, writers, deadline, LOOK_SECONDS):
        look()
        if deadline.passed():
            raise TimeoutError(errno.ETIMEDOUT, "timed out: no answer before the deadline")


def _hear_why(roll: Membership) -> None:
    """Gives whoever knows why the meeting fails a moment to say so."""
    patience = Deadline(min(_EXPLAIN_SECONDS, roll.deadline.left()))
    while not patience.passed():
        roll.look()
        time.sleep(LOOK_SECONDS)


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
