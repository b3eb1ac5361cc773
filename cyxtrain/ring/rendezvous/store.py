"""The store of one run, at rank 0: opened and reached so that every error has the true cause, within the deadline."""

from __future__ import annotations

import errno
import logging
import os
import socket
import time

from cyxtrain.errors import RendezvousError
from cyxtrain.ring.rendezvous.dial import ClosedError, introduce
from cyxtrain.ring.rendezvous.handshake import Claim, HandshakeError, RefusedError, Role
from cyxtrain.ring.rendezvous.key_values import Connection, KeyValueServer
from cyxtrain.ring.wire.link import Deadline

_log = logging.getLogger("cyxtrain.ring")
RETRY_SECONDS = 0.1
_SHORTEST_NAP_SECONDS = 0.002
_LONGEST_TRY_SECONDS = 2.0
_DISBELIEVED = 3
"""So often a rank proves in vain that it knows the secret before it says so."""
_NO_SECRET = b"cyxtrain without a secret"
"""What everybody knows: it keeps out other programs, and nobody else."""


def serve_store(
    address: str, port: int, world_size: int, secret: bytes | None, timeout_seconds: float
) -> KeyValueServer:
    """Opens the store on this machine, for all ranks.

    Args:
        address: Where the other ranks look for it.
        port: TCP port; it must be free.
        world_size: How many ranks will come.
        secret: Of the run; None: everybody who speaks this protocol is let in.
        timeout_seconds: How long to try whether the address leads here.

    Raises:
        RendezvousError: The port is in use, or must not be used; the address does not lead here.
    """
    try:
        listener = _listen(address, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            message = (
                f"rank 0 cannot wait for the others: port {port} is in use on this machine. "
                "Was rank 0 started twice, or does one of an earlier run still live? Where another training runs here, "
                "choose another port with MASTER_PORT (or master_port), on every rank."
            )
        else:
            message = f"rank 0 cannot wait at {address}:{port}: {_cause(error)}. Choose another MASTER_PORT."
        raise RendezvousError(message, rank=0) from error
    try:
        failure = await_listener(address, port, timeout_seconds)
    except BaseException:
        listener.close()
        raise
    if failure is not None:
        listener.close()
        raise RendezvousError(
            f"rank 0 listens on port {port}, and {address}:{port} does not lead there: {failure}. "
            "MASTER_ADDR (or master_addr) must be the host name or an address of rank 0's machine.",
            rank=0,
        )
    return KeyValueServer(listener, secret or _NO_SECRET, world_size)


def reach_store(
    rank: int, address: str, port: int, world_size: int, secret: bytes | None, seconds: float
) -> Connection:
    """Connects to the store of rank 0, which may start later.

    Args:
        rank: This rank.
        address: Host name or address of rank 0.
        port: Its port.
        world_size: How many ranks there are.
        secret: Of the run; None: there is none.
        seconds: Until it gives up.

    Raises:
        RendezvousError: The true cause, and how often it was tried.
    """
    deadline, place = Deadline(seconds), f"{address}:{port}"
    claim = Claim("", 0, Role.STORE, rank, world_size, checksums=False)
    disbelieved = 0
    while True:
        sock, failure = _connect(address, port, deadline)
        if sock is None and disbelieved < _DISBELIEVED:
            raise not_reached(rank, address, port, seconds, failure)
        if sock is None:
            raise _not_believed(rank, place, seconds, secret)  # and that run has ended since
        try:
            sock.setblocking(False)
            introduce(sock, claim, secret or _NO_SECRET, deadline, lambda: None)
            return Connection(sock, seconds)
        except RefusedError as refused:
            sock.close()
            raise RendezvousError(f"rank 0 at {place} refused rank {rank}: {refused}.", rank=0) from None
        except (ClosedError, HandshakeError, OSError) as error:
            sock.close()
            failure = str(error)
            if isinstance(error, ClosedError) and error.proven:
                disbelieved += 1  # a proof that came late is believed at the next try
                _warn_of_disbelief(disbelieved, rank, place, deadline.left(), secret)
        except BaseException:
            sock.close()
            raise
        if deadline.left() <= RETRY_SECONDS:
            if disbelieved >= _DISBELIEVED:
                raise _not_believed(rank, place, seconds, secret)
            raise not_ours(rank, place, failure)
        time.sleep(RETRY_SECONDS)  # the store of a life before may be closing


def not_ours(rank: int, place: str, detail: str) -> RendezvousError:
    """Returns the error for what answers at the address of rank 0, and is something else."""
    return RendezvousError(
        f"rank {rank} found something at {place} that is not the meeting point of this run"
        f"{f' ({detail})' if detail else ''}. Another program may use that port: choose another MASTER_PORT, the same "
        "on every rank.",
        rank=0,
    )


def _not_believed(rank: int, place: str, seconds: float, secret: bytes | None) -> RendezvousError:
    return RendezvousError(
        f"another run has {place}, or rank {rank} and rank 0 were started with different secrets: rank 0 there did not "
        f"believe rank {rank} for {seconds:.3g} s. Where two runs use one port, choose another MASTER_PORT; else set "
        f"CYXTRAIN_SECRET, which {_is_set(secret)} on rank {rank}, to the same value on every rank.",
        rank=0,
    )


def _is_set(secret: bytes | None) -> str:
    return "is not set" if secret is None else "is set"


def _warn_of_disbelief(times: int, rank: int, place: str, seconds: float, secret: bytes | None) -> None:
    """Warns once: whoever waits for a port that another run has should know it at once."""
    if times == _DISBELIEVED:
        _log.warning(
            "rank %d does not know the secret of the run that has %s, and tries again for %.3g s: is that another run, "
            "or does CYXTRAIN_SECRET (it %s here) differ between your ranks?",
            rank,
            place,
            seconds,
            _is_set(secret),
        )


def not_reached(rank: int, address: str, port: int, seconds: float, failure: str) -> RendezvousError:
    """Returns the error for a rank 0 that could not be reached."""
    return RendezvousError(
        f"rank {rank} could not reach rank 0 at {address}:{port} within {seconds:.3g} s: {failure}. "
        "Is rank 0 running, are MASTER_ADDR and MASTER_PORT right, does a firewall stand between? "
        "timeout_ms (DISTRIBUTED_TIMEOUT_MS) sets how long to wait.",
        rank=0,
    )


def await_listener(address: str, port: int, timeout_seconds: float) -> str | None:
    """Waits until something listens there; returns None, or at the deadline why it could not be reached."""
    sock, failure = _connect(address, port, Deadline(timeout_seconds))
    if sock is None:
        return failure
    sock.close()
    return None


def _listen(address: str, port: int) -> socket.socket:
    if address == "localhost" or address.startswith("127."):  # a run on one machine stays inside it
        return socket.create_server(("127.0.0.1" if address == "localhost" else address, port), backlog=1024)
    if address == "::1":
        return socket.create_server((address, port), family=socket.AF_INET6, backlog=1024)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=1024)


def _connect(address: str, port: int, deadline: Deadline) -> tuple[socket.socket | None, str]:
    """Returns a connection, and ""; or at the deadline None, and why there is none."""
    tries, nap_seconds = 0, _SHORTEST_NAP_SECONDS
    while True:
        tries += 1
        seconds = max(min(deadline.left(), _LONGEST_TRY_SECONDS), 0.01)
        try:
            sock = socket.create_connection((address, port), timeout=seconds)
            if sock.getsockname() != sock.getpeername():
                return sock, ""
            sock.close()
            cause = "connection refused"  # by chance the kernel gave us that very port, and we met ourselves
        except OSError as error:
            cause = _cause(error)
        if deadline.passed():
            return None, f"{cause} ({tries} tries)"
        time.sleep(min(deadline.left(), nap_seconds))  # rank 0 may not listen yet
        nap_seconds = min(2 * nap_seconds, RETRY_SECONDS)


def _cause(error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return f"the name cannot be resolved ({error.strerror})"
    if isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT:
        return "no answer (timed out)"
    if not error.errno or error.errno < 0:  # a name that cannot be resolved has a number of its own kind
        return error.strerror or str(error)
    return os.strerror(error.errno).lower()
