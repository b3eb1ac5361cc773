"""Rendezvous: ranks find each other through the store, and connect, as `mesh.py` describes.

Each rank listens on its own port, writes its address to the store, and waits until all have. A rank that fails writes
the cause to the store, which all others poll: they fail with the same cause.

Cost per rank: the connections of `mesh.py`; one store write, and one read per rank.
"""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Sequence
from datetime import timedelta

import torch
from torch.distributed import Store

from cyxtrain.config import RingOptions
from cyxtrain.environment.cpu import count_usable_cores
from cyxtrain.environment.processes import this_process
from cyxtrain.errors import RendezvousError
from cyxtrain.ring.rendezvous.dial import notify_duplicate
from cyxtrain.ring.rendezvous.directory import Directory
from cyxtrain.ring.rendezvous.handshake import Hello, Role
from cyxtrain.ring.rendezvous.listen import Listeners, listen
from cyxtrain.ring.rendezvous.membership import Membership, PeerFailure, RankTakenError
from cyxtrain.ring.rendezvous.mesh import Mesh, connect
from cyxtrain.ring.rendezvous.record import RankRecord
from cyxtrain.ring.wire.link import Deadline

_warned: dict[str | tuple[str, type[Warning], int], int] = {}
_NO_SECRET = (
    "CYXTRAIN_SECRET is not set: every process that reaches rank 0's port and speaks this protocol can join this run "
    "or end it. Set CYXTRAIN_SECRET to the same long random text on every rank (python -c 'import secrets; "
    "print(secrets.token_hex(32))'); require_secret=True in DistributedConfig refuses to start without."
)
_NO_READING = (
    "CYXTRAIN_TRANSPORT=cma: ranks do not read each other's memory any more; they share memory, which is faster and "
    "needs no permission. Unset CYXTRAIN_TRANSPORT."
)


def rendezvous(
    store: Store,
    rank: int,
    global_ranks: Sequence[int],
    timeout: timedelta,
    options: RingOptions,
    generation: int,
    peer_failure: PeerFailure,
) -> Mesh:
    """Connect this rank with all others; ranks may do so repeatedly through the same store.

    Errors name ranks by `global_ranks`, the launcher's numbers.

    Raises:
        RendezvousError: Ranks are missing at the deadline (it lists them), two processes have the same rank, a rank
            has ended, ranks are incompatible, have different secrets, or cannot reach each other.
        PeerLostError, PeerSilentError: Another group of this world has lost a rank.
    """
    deadline = Deadline(timeout.total_seconds())
    membership = Membership(store, rank, global_ranks, deadline, options, peer_failure, generation)
    listeners: Listeners | None = None
    try:
        with membership.joining():
            # Before registering: the others connect as soon as they have read this rank's record.
            listeners = listen(global_ranks[rank], store, options.transport)
            membership.register(own_record(rank, len(global_ranks), listeners, options))
            records = membership.await_all()
            if rank == 0:
                _warn_about(options)
            first = records[0]
            secret = _secret(options, first)
            directory = Directory(tuple(records), tuple(global_ranks), generation, first.run, secret)
            return connect(directory, rank, listeners, options, deadline, membership)
    except RankTakenError as taken:
        _notify_holder(taken, rank, len(global_ranks), generation, options)
        raise RendezvousError(str(taken), rank=taken.rank) from None
    except BaseException:
        if listeners is not None:
            listeners.close()
        raise


def _notify_holder(taken: RankTakenError, rank: int, world_size: int, generation: int, options: RingOptions) -> None:
    """Let the process that has this rank report the duplicate in its log, if it can be reached."""
    if taken.holder is None or taken.first is None:
        return
    checksums = options.checksums
    hello = Hello(taken.first.run, generation, Role.CONTROL, rank, world_size, checksums, to_rank=rank)
    notify_duplicate(taken.holder, hello, _secret(options, taken.first))


def _warn_about(options: RingOptions) -> None:
    """Warn about a missing secret and a removed transport, once per process."""
    # Explicitly, because no line of the user's code is the cause.
    if options.secret is None:
        warnings.warn_explicit(_NO_SECRET, UserWarning, "cyxtrain", 1, registry=_warned)
    if options.transport == "cma":
        warnings.warn_explicit(_NO_READING, FutureWarning, "cyxtrain", 1, registry=_warned)


def _secret(options: RingOptions, first: RankRecord) -> bytes:
    """Return the secret of the run: CYXTRAIN_SECRET, or the secret that rank 0 has created."""
    return bytes.fromhex(first.key) if options.secret_bytes is None else options.secret_bytes


def own_record(rank: int, world_size: int, listeners: Listeners, options: RingOptions) -> RankRecord:
    """Return the record of this rank."""
    host, port = listeners.tcp.getsockname()[:2]
    cores = count_usable_cores()
    run = ""
    key = ""
    if rank == 0:
        run = secrets.token_hex(16)
        if options.secret is None:
            key = secrets.token_hex(32)
    return RankRecord(
        world_size=world_size,
        process=this_process(str(host)),
        host=str(host),
        port=int(port),
        unix=listeners.unix_name,
        transport=options.transport,
        room=cores // (torch.get_num_threads() + 1),
        cores=cores,
        has_secret=options.secret is not None,
        checksums=options.checksums,
        heartbeat_timeout_seconds=options.heartbeat_timeout_seconds,
        devices=options.devices,
        run=run,
        key=key,
    )
