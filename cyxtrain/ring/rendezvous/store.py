"""The store of a run, opened by rank 0; errors name the true cause, within the deadline.

PyTorch's TCPStore is for backends that need one (NCCL, Gloo) and for torchrun, whose agent keeps it. Its client hides
why it cannot connect, and waits for ever if another program answers on the port. Its server trusts everybody, so it is
closed once all ranks are connected.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import logging
import os
import socket
import struct
import time
from datetime import timedelta

from torch.distributed import Store, TCPStore

from cyxtrain.errors import RendezvousError, exhausted, reason_of
from cyxtrain.ring.rendezvous.dial import ClosedError, authenticate, family_of
from cyxtrain.ring.rendezvous.handshake import HandshakeError, Hello, RefusedError, Role
from cyxtrain.ring.rendezvous.key_values import Connection, KeyValueServer, KeyValueStore
from cyxtrain.ring.rendezvous.listen import own_address
from cyxtrain.ring.rendezvous.record import check_not_exited
from cyxtrain.ring.rendezvous.store_client import attempt_in_thread, root_of
from cyxtrain.ring.wire.link import Deadline

_log = logging.getLogger("cyxtrain.ring")
_RETRY_SECONDS = 0.1
_SHORTEST_NAP_SECONDS = 0.002
_LONGEST_TRY_SECONDS = 2.0
_WARN_AFTER_PROOFS = 3
"""Rejected proofs after which a rank warns: a proof that only arrived late is accepted at the next try."""
_NO_SECRET = b"cyxtrain without a secret"
"""Known to everybody: it keeps out only other programs."""
_SO_ATTACH_FILTER = 26
_BPF_RETURN = 0x06  # "return 0 bytes of the packet": drop it
_TCP_STORE_KEY = "pytorch/store"
"""Where rank 0 writes the address of PyTorch's store."""


def serve_store(
    address: str, port: int, world_size: int, secret: bytes | None, seconds: float, *, is_held: bool = False
) -> KeyValueStore:
    """Open the store of a run, as rank 0; without a secret it accepts everybody who speaks the protocol.

    `is_held`: the launcher holds the port for this user.

    Raises RendezvousError if the port is in use, or the address leads elsewhere.
    """
    try:
        listener = _listen(address, port, is_held=is_held)
    except OSError as error:
        if exhausted(error):
            raise
        raise _cannot_listen_error(address, port, error) from error
    deadline = Deadline(seconds)
    try:
        failure = await_listener(address, port, deadline.left())
        if failure is not None:
            raise _leads_elsewhere_error(address, port, failure)
        server = KeyValueServer(listener, secret or _NO_SECRET, world_size)
    except BaseException:
        listener.close()
        raise
    try:
        # Rank 0 of another machine may be what listens there. At most half of the time: at its end, the other ranks
        # would report guesses instead of the cause.
        reach_store(0, address, port, world_size, secret, deadline.left() / 2, server.name).close()
    except BaseException as error:
        reason = server.refusal()
        server.close()
        if isinstance(error, RendezvousError) and reason:  # such as too few open files: nobody else is there
            raise RendezvousError(reason, rank=0) from None
        raise
    return KeyValueStore(server, address, timedelta(seconds=seconds))


def _cannot_listen_error(address: str, port: int, error: OSError) -> RendezvousError:
    message = f"rank 0 cannot wait at {address}:{port}: {_cause(error)}. Choose another MASTER_PORT."
    if error.errno == errno.EADDRINUSE:
        message = (
            f"rank 0 cannot wait for the others: port {port} is in use on this machine. "
            "Was rank 0 started twice, or is one of an earlier run still alive? If another training runs here, "
            "choose another port with MASTER_PORT (or master_port), on every rank."
        )
    return RendezvousError(message, rank=0)


def _leads_elsewhere_error(address: str, port: int, failure: str) -> RendezvousError:
    return RendezvousError(
        f"rank 0 listens on port {port}, and {address}:{port} does not lead there: {failure}. "
        "MASTER_ADDR (or master_addr) must be the host name or an address of rank 0's machine.",
        rank=0,
    )


def reach_store(
    rank: int, address: str, port: int, world_size: int, secret: bytes | None, seconds: float, name: str = ""
) -> KeyValueStore:
    """Connect to the store of rank 0, which may start later; raise RendezvousError with the cause.

    `name` is the name of the store, which only rank 0 knows.
    """
    deadline = Deadline(seconds)
    place = f"{address}:{port}"
    hello = Hello(name, 0, Role.STORE, rank, world_size, checksums=False)
    rejected_proofs = 0
    while True:
        sock, failure = _connect(address, port, deadline, world_size)
        if sock is None:
            if rejected_proofs >= _WARN_AFTER_PROOFS:  # the run that rejected them has ended since
                raise _rejected_error(rank, place, seconds, secret)
            raise _not_reached_error(rank, address, port, seconds, failure)
        try:
            return KeyValueStore(_authenticated(sock, hello, secret, deadline), address, timedelta(seconds=seconds))
        except RefusedError as refused:
            raise RendezvousError(f"rank 0 at {place} refused rank {rank}: {refused}.", rank=0) from None
        except (ClosedError, HandshakeError, OSError) as error:
            failure = str(error)
            if isinstance(error, ClosedError) and error.proven:
                rejected_proofs += 1
                if rejected_proofs == _WARN_AFTER_PROOFS:
                    _warn_about_rejection(rank, place, secret, deadline)
        if deadline.left() <= _RETRY_SECONDS:
            if rejected_proofs >= _WARN_AFTER_PROOFS:
                raise _rejected_error(rank, place, seconds, secret)
            raise _foreign_service_error(rank, place, failure)
        time.sleep(_RETRY_SECONDS)  # the previous store may be closing


def _authenticated(sock: socket.socket, hello: Hello, secret: bytes | None, deadline: Deadline) -> Connection:
    """Return the connection after authentication; close the socket on errors."""
    try:
        sock.setblocking(False)
        authenticate(sock, hello, secret or _NO_SECRET, deadline, lambda: None)
        return Connection(sock)
    except BaseException:
        sock.close()
        raise


def _warn_about_rejection(rank: int, place: str, secret: bytes | None, deadline: Deadline) -> None:
    _log.warning(
        "rank %d does not know the secret of the run that has %s, and tries again for %.3g s: is that another run, or "
        "does CYXTRAIN_SECRET (it %s here) differ between your ranks?",
        rank,
        place,
        deadline.left(),
        _is_set(secret),
    )


def _foreign_service_error(rank: int, place: str, detail: str) -> RendezvousError:
    """Return the error for another program that answers at the address of rank 0."""
    if detail:
        detail = f" ({detail})"
    return RendezvousError(
        f"rank {rank} found something at {place} that is not the store of this run{detail}. Another program may use "
        "that port: choose another MASTER_PORT, the same on every rank.",
        rank=0,
    )


def _rejected_error(rank: int, place: str, seconds: float, secret: bytes | None) -> RendezvousError:
    return RendezvousError(
        f"another run has {place}, or rank {rank} and rank 0 were started with different secrets: rank 0 there "
        f"rejected the proof of rank {rank} for {seconds:.3g} s. If two runs use one port, choose another MASTER_PORT; "
        f"otherwise set CYXTRAIN_SECRET, which {_is_set(secret)} on rank {rank}, to the same value on every rank.",
        rank=0,
    )


def _is_set(secret: bytes | None) -> str:
    return "is not set" if secret is None else "is set"


def _not_reached_error(rank: int, address: str, port: int, seconds: float, failure: str) -> RendezvousError:
    """Return the error for a rank 0 that could not be reached."""
    return RendezvousError(
        f"rank {rank} could not reach rank 0 at {address}:{port} within {seconds:.3g} s: {failure}. "
        "Is rank 0 running, are MASTER_ADDR and MASTER_PORT right, does a firewall block the port? "
        "timeout_ms (DISTRIBUTED_TIMEOUT_MS) sets how long to wait.",
        rank=0,
    )


def await_listener(address: str, port: int, seconds: float) -> str | None:
    """Wait until something listens there; return None, or at the deadline why it could not be reached."""
    sock, failure = _connect(address, port, Deadline(seconds))
    if sock is None:
        return failure
    sock.close()
    return None


def _listen(address: str, port: int, *, is_held: bool = False) -> socket.socket:
    if is_held and await_listener(address, port, 0.0) is None:  # SO_REUSEPORT would let two listen
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
    create = functools.partial(socket.create_server, backlog=1024, reuse_port=is_held)
    if address == "localhost":
        address = "127.0.0.1"
    if address.startswith("127."):  # a run on one machine stays inside it
        return create((address, port))
    if address == "::1":
        return create((address, port), family=socket.AF_INET6)
    # The other ranks may resolve the name to an IPv4 or to an IPv6 address.
    if socket.has_dualstack_ipv6():
        return create(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return create(("", port))


def _connect(address: str, port: int, deadline: Deadline, world_size: int = 0) -> tuple[socket.socket | None, str]:
    """Return a connection to rank 0, and ""; or, at the deadline, None and the cause."""
    tries = 0
    nap_seconds = _SHORTEST_NAP_SECONDS
    while True:
        tries += 1
        seconds = max(min(deadline.left(), _LONGEST_TRY_SECONDS), 0.01)
        sock, cause = _try_to_connect(address, port, seconds)
        if sock is not None:
            return sock, ""
        # Without this, ranks would wait until the deadline for one that has exited without joining.
        check_not_exited(range(world_size), world_size)
        if deadline.passed():
            return None, f"{cause} ({tries} tries)"
        time.sleep(min(deadline.left(), nap_seconds))  # rank 0 may not listen yet
        nap_seconds = min(2 * nap_seconds, _RETRY_SECONDS)


def _try_to_connect(address: str, port: int, seconds: float) -> tuple[socket.socket | None, str]:
    sock: socket.socket | None = None
    try:
        sock = socket.create_connection((address, port), timeout=seconds)
        if sock.getsockname() != sock.getpeername():
            return sock, ""
        # By chance, the kernel chose that very port for this end: the socket is connected to itself.
        cause = "connection refused"
    except OSError as error:
        if exhausted(error):
            raise
        cause = _cause(error)
    if sock is not None:
        sock.close()
    return None, cause


def _cause(error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return f"the name cannot be resolved ({error.strerror})"
    if isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT:
        return "no answer (timed out)"
    return reason_of(error).lower()


def share_tcp_store(store: Store, rank: int, world_size: int, deadline: Deadline) -> Store:
    """Return a store of PyTorch's that all ranks share, for threads of C++. All ranks call it.

    It is the `store` of the run, if that is one of PyTorch's. Once all ranks are connected, nobody else can connect.
    """
    ours = root_of(store)
    if not isinstance(ours, KeyValueStore):
        return store
    seconds = max(deadline.left(), 0.001)
    ours.set_timeout(timedelta(seconds=seconds))
    if rank == 0:
        shared, listener = host_store(own_address(ours.host), seconds)
        store.set(_TCP_STORE_KEY, f"{shared.host} {shared.port}")
    else:
        host, port = store.get(_TCP_STORE_KEY).decode().split()
        shared = reach_tcp_store(rank, host, int(port), world_size, seconds)
    store.set(f"{_TCP_STORE_KEY}/{rank}", "connected")
    store.wait([f"{_TCP_STORE_KEY}/{other}" for other in range(world_size)])
    if rank == 0:
        close_to_newcomers(listener)
    return shared


def host_store(host: str, timeout_seconds: float) -> tuple[TCPStore, socket.socket]:
    """Open a store of PyTorch's at a free port of this machine; return it and its listening socket."""
    listener = socket.create_server((host, 0), family=family_of(host), backlog=1024)
    port = int(listener.getsockname()[1])
    timeout = timedelta(seconds=timeout_seconds)
    own = listener.dup()  # TCPStore takes over the other descriptor; `close_to_newcomers` needs one, too
    store = TCPStore(host, port, None, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach())
    return store, own


def close_to_newcomers(listener: socket.socket) -> None:
    """Let nobody else connect, and keep open connections.

    Linux only (SO_ATTACH_FILTER, socket(7)); elsewhere the port stays open.
    """
    with listener, contextlib.suppress(OSError, AttributeError):
        # The kernel drops each packet that reaches the listening socket.
        nothing = ctypes.create_string_buffer(struct.pack("HBBI", _BPF_RETURN, 0, 0, 0))
        program = struct.pack("HP", 1, ctypes.addressof(nothing))
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def reach_tcp_store(rank: int, address: str, port: int, world_size: int, timeout_seconds: float) -> TCPStore:
    """Connect to a store of PyTorch's, which may open later.

    Raises RendezvousError with the true cause and the number of tries.
    """
    deadline = Deadline(timeout_seconds)
    while True:
        failure = await_listener(address, port, deadline.left())
        if failure is not None:
            raise _not_reached_error(rank, address, port, timeout_seconds, failure)
        # Something listens there now: a store, or a program that never answers PyTorch's client.
        left = timedelta(seconds=max(deadline.left(), 0.1))
        connect = functools.partial(TCPStore, address, port, world_size, False, left, wait_for_workers=False)
        opened = attempt_in_thread(connect, left.total_seconds() + 0.2)
        if isinstance(opened, TCPStore):
            return opened
        if deadline.left() <= _RETRY_SECONDS:
            detail = "" if isinstance(opened, TimeoutError) else reason_of(opened)
            raise _foreign_service_error(rank, f"{address}:{port}", detail)
        time.sleep(_RETRY_SECONDS)  # the previous store may be closing
