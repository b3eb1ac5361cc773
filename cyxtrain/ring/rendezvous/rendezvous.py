"""Ranks find each other through the store, and connect; see `mesh.py`.

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
    """Connect this rank with all others; ranks may do so repeatedly through the same store. Errors use `global_ranks`.

    Raises:
        RendezvousError: Ranks are missing at the deadline (it lists them), a duplicate rank, a rank has ended, ranks
            are incompatible, have different secrets, or cannot reach each other.
        PeerLostError, PeerSilentError: Another group of this world has lost a rank.
    """
    deadline = Deadline(timeout.total_seconds())
    membership = Membership(store, rank, global_ranks, deadline, options, peer_failure, generation)
    listeners: Listeners | None = None
    try:
        with membership.joining():
            listeners = listen(global_ranks[rank], store, options.transport)
            membership.register(own_record(rank, len(global_ranks), listeners, options))
            table = membership.await_all()
            if rank == 0:
                _warn_of(options)
            secret = _secret(options, table[0])
            directory = Directory(tuple(table), tuple(global_ranks), generation, table[0].run, secret)
            return connect(directory, rank, listeners, options, deadline, membership)
    except RankTakenError as taken:
        if taken.holder is not None and taken.first is not None:
            run, checksums = taken.first.run, options.checksums
            hello = Hello(run, generation, Role.CONTROL, rank, len(global_ranks), checksums, to_rank=rank)
            notify_duplicate(taken.holder, hello, _secret(options, taken.first))
        raise RendezvousError(str(taken), rank=taken.rank) from None
    except BaseException:
        if listeners is not None:
            listeners.close()
        raise


def _warn_of(options: RingOptions) -> None:
    """Warn explicitly: this is not attributable to user code, and shown once per process."""
    if options.secret is None:
        warnings.warn_explicit(_NO_SECRET, UserWarning, "cyxtrain", 1, registry=_warned)
    if options.transport == "cma":
        warnings.warn_explicit(_NO_READING, FutureWarning, "cyxtrain", 1, registry=_warned)


def _secret(options: RingOptions, first: RankRecord) -> bytes:
    """Return the secret of the run: CYXTRAIN_SECRET, or the one that rank 0 made."""
    return bytes.fromhex(first.key) if options.secret_bytes is None else options.secret_bytes


def own_record(rank: int, world_size: int, listeners: Listeners, options: RingOptions) -> RankRecord:
    """Return the record of this rank."""
    host, port = listeners.tcp.getsockname()[:2]
    cores = count_usable_cores()
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
        run=secrets.token_hex(16) if rank == 0 else "",
        key=secrets.token_hex(32) if rank == 0 and options.secret is None else "",
    )
