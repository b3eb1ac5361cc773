"""Joining the world: a backend that is here, a store that all ranks reach, and the group over it."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from cyxtrain import environment, torch_compat
from cyxtrain.config import BackendType, DistributedConfig, RingOptions
from cyxtrain.cores import cgroup_quota
from cyxtrain.errors import BackendUnavailableError, ConfigError, RendezvousError, warn
from cyxtrain.ring import RingProcessGroup
from cyxtrain.ring.backend import TORCHS_WORLD
from cyxtrain.ring.link import Deadline
from cyxtrain.ring.meeting.board import Board, StoreLostError, root_of
from cyxtrain.ring.meeting.entry import Entry
from cyxtrain.ring.meeting.rollcall import RollCall
from cyxtrain.ring.meeting.store import StoreEnd, StoreWatch, host_store, reach_store

_lives: Counter[tuple[str, int]] = Counter()
"""How often this process has joined at each address: each time has its own keys, in a store that may outlive the group.

A world of one has no store, and does not count: other ranks may be new processes."""
_ends: list[StoreEnd | StoreWatch] = []
"""At most one: tells when the store that this process used last has closed, from rank 0 to the others."""
_END_PORT, _END_PORT_SECONDS = "cyxtrain/end", 1.0
"""The key at which rank 0 tells the port, and for how long the others look for it."""


@dataclass
class Joined:
    """How this process joined.

    Attributes:
        group: The default group that was made.
        config: Complete.
        cpu_group: For small agreements.
        store: Kept open for groups that are made later; on rank 0 it holds the port.
    """

    group: Any
    config: DistributedConfig
    cpu_group: Any
    store: dist.Store


def join(config: DistributedConfig) -> Joined:
    """Makes the default torch process group.

    Args:
        config: Complete.

    Raises:
        ConfigError: A local rank without a GPU.
        RendezvousError: The ranks did not find each other within `timeout_ms`.
        BackendUnavailableError: The backend is not on this machine.
    """
    deadline = Deadline(config.timeout_ms / 1000)
    backend = BackendType.parse(config.backend or BackendType.CPU)
    _warn_of_untested_torch(config.rank or 0)
    _require_backend(backend, config)
    options = environment.ring_options()  # what cannot be is refused before anything starts
    while True:
        store = _store_of_this_life(config, deadline)
        try:
            _watch_store(store, config, deadline)
            _make_group(backend, store, config, options, deadline)
        except StoreLostError:
            # Rank 0 of the life before went away just now; its next life opens the store again.
            if config.rank == 0 or deadline.passed():
                raise
            continue
        break
    if config.world_size != 1:  # not when it failed: a rank that tries again must look where the others are
        _lives[config.master_addr, config.master_port] += 1
    store.set_timeout(timedelta(milliseconds=config.timeout_ms))
    if not environment.sets_threads():
        _share_cores(environment.ranks_that_share_cores(), environment.cores_left())
    group = dist.group.WORLD
    small = group if backend is not BackendType.NCCL else dist.new_group(backend="ring")
    return Joined(group, config, small, store)


def open_store(config: DistributedConfig, seconds: float) -> dist.Store:
    """Opens the store as rank 0, or reaches it; torchrun's agent keeps one for all.

    Args:
        config: Complete, of a world of several.
        seconds: Until it gives up.

    Raises:
        RendezvousError: The port is in use, or rank 0 cannot be reached; with the true cause.
    """
    rank, world_size = config.rank or 0, config.world_size or 1
    prefix = environment.agent_store_prefix(config)
    if rank == 0 and prefix is None:
        return host_store(config.master_addr, config.master_port, world_size, seconds)
    store = reach_store(rank, config.master_addr, config.master_port, world_size, seconds)
    return store if prefix is None else dist.PrefixStore(prefix, store)


def _store_of_this_life(config: DistributedConfig, deadline: Deadline) -> dist.Store:
    if config.world_size == 1:
        return dist.HashStore()  # inside this process: no port
    place = (config.master_addr, config.master_port)
    for end in _ends:
        if isinstance(end, StoreWatch):
            end.await_end(config.master_addr, deadline)
    forget_store()
    store = open_store(config, _left(deadline).total_seconds())
    if config.rank == 0 and isinstance(store, dist.TCPStore):
        end = StoreEnd(config.master_addr)
        _ends.append(end)
        store.set(_END_PORT, str(end.port))
    return dist.PrefixStore(f"/cyxtrain/{_lives[place] + 1}", store)


def _watch_store(store: dist.Store, config: DistributedConfig, deadline: Deadline) -> None:
    """Connects to what will tell when the store of rank 0 has closed; torchrun's agent keeps its own open."""
    if config.world_size == 1 or config.rank == 0 or environment.agent_store_prefix(config) is not None:
        return
    patience = Deadline(_END_PORT_SECONDS)
    with contextlib.closing(Board(root_of(store), f"rank {config.rank}", deadline)) as board:
        while not board.has(_END_PORT) and not patience.passed():
            time.sleep(0.001)  # rank 0 has just opened the store
        if board.has(_END_PORT):
            _ends.append(StoreWatch(config.master_addr, int(board.get(_END_PORT))))


def forget_store() -> None:
    """Closes what tells of the end of the store that was used last."""
    while _ends:
        _ends.pop().close()


def forget_parent() -> None:
    """Lets go, in a forked child, of what its parent has joined: the child joins as a new process does."""
    forget_store()
    _lives.clear()


def _make_group(
    backend: BackendType, store: dist.Store, config: DistributedConfig, options: RingOptions, deadline: Deadline
) -> None:
    """Makes the default group; joining has one deadline, collectives another."""
    rank, world_size = config.rank or 0, config.world_size or 1
    timeout = timedelta(milliseconds=config.collective_timeout_ms)
    if backend is BackendType.CPU:
        # Made before PyTorch hears of it, which counts the groups that it begins to make, also those that fail: then
        # a rank that tries again would look for the others in another place.
        ring = RingProcessGroup(
            store, rank, world_size, timeout, join_timeout=_left(deadline), options=options, siblings=TORCHS_WORLD
        )
        dist.init_process_group("ring", store=store, rank=rank, world_size=world_size, timeout=timeout, pg_options=ring)
        return
    waits = options.comes_again
    roll = RollCall(dist.PrefixStore("roll", store), rank, range(world_size), deadline, waits_for_next_store=waits)
    with roll.taking_part():  # says which ranks are missing; our own ring does so by itself
        roll.answer(Entry(world_size))
        roll.table()
    try:
        dist.init_process_group(backend.value, store=store, rank=rank, world_size=world_size, timeout=_left(deadline))
    except RuntimeError as error:
        raise RendezvousError(
            f"rank {rank} could not make a {backend.value} group: {error}. Look at the output of the other ranks."
        ) from error
    torch_compat.set_timeout(timeout)


def _left(deadline: Deadline) -> timedelta:
    """Returns the time until it; never none, which a process group takes for "not given"."""
    return timedelta(seconds=max(deadline.left(), 0.001))


def _require_backend(backend: BackendType, config: DistributedConfig) -> None:
    if backend is BackendType.GLOO and not dist.is_gloo_available():
        raise BackendUnavailableError("This PyTorch has no Gloo. Use backend='cpu', cyxtrain's own ring.")
    if backend is not BackendType.NCCL:
        return
    missing = why_no_nccl()
    if missing:
        raise BackendUnavailableError(
            f"NCCL library not available: {missing}. "
            "Use backend='cpu' (DISTRIBUTED_BACKEND=cpu), cyxtrain's own ring, which carries CPU tensors."
        )
    devices, local_rank = torch.cuda.device_count(), config.local_rank or 0
    if devices > 1 and local_rank >= devices:
        raise ConfigError(
            f"LOCAL_RANK {local_rank} has no GPU: {devices} are visible. Start at most {devices} ranks per machine."
        )
    torch.cuda.set_device(local_rank if devices > 1 else 0)


def _share_cores(ranks: int, own_cores: int | None = None) -> None:
    """Leaves each rank of this machine its share of the cores, as our launcher does.

    Where nobody binds ranks to cores, each would start as many threads as the machine has cores, also in a container
    that gets the time of two: they wait for each other, and training takes tens of times as long.

    Args:
        ranks: How many share the cores of this machine, as far as it is known.
        own_cores: How many a scheduler has given to this process; None: it does not say.
    """
    # All of the machine's: of those that this rank may run on nobody can tell whether the others may, too.
    cores = min(os.cpu_count() or 1, cgroup_quota())
    most = min(cores // ranks, own_cores or cores)
    if torch.get_num_threads() > max(most, 1):
        torch.set_num_threads(max(int(most), 1))


def why_no_nccl() -> str:
    """Returns why NCCL cannot be used here; "": it can."""
    reasons = []
    if not dist.is_nccl_available():
        reasons.append("this PyTorch was built without it")
    if not torch.cuda.is_available():
        reasons.append("no CUDA device is visible")
    return " and ".join(reasons)


def _warn_of_untested_torch(rank: int) -> None:
    """Warns on rank 0, once in a process."""
    if rank == 0 and not torch_compat.is_tested():
        _warn_once(
            f"PyTorch {torch.__version__} is outside the range that cyxtrain is tested with: "
            f"{torch_compat.tested_range()}."
        )


@functools.cache
def _warn_once(message: str) -> None:
    warn(message)
