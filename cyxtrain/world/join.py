"""Join the world: choose a backend, open or reach the store, and make the default process group.

Below: whether the world that this process has joined is still its own, after a fork, or with other settings.
"""

from __future__ import annotations

import functools
import os
from collections import Counter
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from cyxtrain.config import BackendType, DistributedConfig, RingOptions, complete_config
from cyxtrain.environment import process_env, schedulers, torch_compat
from cyxtrain.environment.cpu import cgroup_quota
from cyxtrain.errors import BackendUnavailableError, ConfigError, RendezvousError, exhausted, warn
from cyxtrain.ring import (
    WORLD_GROUPS,
    Deadline,
    KeyValueStore,
    RingProcessGroup,
    StoreLostError,
    await_all_ranks,
    is_ring,
    reach_store,
    reach_tcp_store,
    serve_store,
    share_tcp_store,
)
from cyxtrain.world import devices
from cyxtrain.world.consensus import backends_of
from cyxtrain.world.devices import Seen

_joins: Counter[tuple[str, int]] = Counter()
"""How often this process has joined at each address: each time has its own keys, in a store that may outlive the group.

A world of one has no store, and does not count: other ranks may be new processes."""
_store: KeyValueStore | None = None
"""The store that this process serves, as rank 0, or has reached. C++, which uses it, keeps no Python object alive."""


@dataclass
class Joined:
    """How this process joined."""

    group: Any
    config: DistributedConfig
    """Complete, except for the backend if the ranks chose it."""
    cpu_group: Any
    """The group for CPU tensors and small agreements."""
    seen: list[Seen]
    """By rank; over Gloo this rank alone."""
    backend: BackendType | None
    """The requested one; None: the ranks chose."""
    why_ring: str
    store: dist.Store
    """Kept open for later groups; on rank 0 it holds the port."""


def join(config: DistributedConfig) -> Joined:
    """Make the default torch process group; raise RendezvousError if this process cannot open more files, say."""
    try:
        return _join(config)
    except OSError as error:
        if not exhausted(error):
            raise
        raise RendezvousError(f"rank {config.rank} cannot join: {exhausted(error)}.", rank=config.rank) from None


def _join(config: DistributedConfig) -> Joined:
    deadline = Deadline(config.timeout_ms / 1000)
    _warn_of_untested_torch(config.rank or 0)
    if config.backend is not None:
        _require_backend(BackendType.parse(config.backend), config)
    seen = devices.look(config)
    # Refuse wrong settings before anything starts.
    options = replace(RingOptions.from_environment(), devices=seen.to_text(), group_name=_key_prefix(config))
    while True:
        store = _store_for_joining(config, options, deadline)
        try:
            if config.backend is BackendType.GLOO:
                store = _make_gloo(store, config, options, deadline)
                joined = Joined(dist.group.WORLD, config, dist.group.WORLD, [seen], BackendType.GLOO, "", store)
            else:
                joined = _make_groups(store, config, options, deadline)
        except StoreLostError:
            # The previous process of rank 0 has just ended; the next one opens the store again.
            if config.rank == 0 or deadline.passed():
                raise
            continue
        break
    if config.world_size != 1:  # not after a failure: a rank that retries must use the same keys as the others
        _joins[config.master_addr, config.master_port] += 1
    # Later groups use this store: with NCCL at their first collective, which a rank may reach late.
    is_nccl = joined.cpu_group is not joined.group
    joined.store.set_timeout(timedelta(milliseconds=config.collective_timeout_ms if is_nccl else config.timeout_ms))
    if not process_env.ENVIRON.get("OMP_NUM_THREADS"):
        _share_cores(process_env.ranks_that_share_cores(), schedulers.cores_left(process_env.ENVIRON))
    return joined


def open_world_store(config: DistributedConfig, secret: bytes | None, seconds: float) -> dist.Store:
    """Open the store as rank 0, or reach it; torchrun's agent keeps one for all."""
    global _store
    rank, world_size = config.rank or 0, config.world_size or 1
    address, port = config.master_addr, config.master_port
    prefix = process_env.agent_store_prefix(address, port)
    if prefix is not None:
        return dist.PrefixStore(prefix, reach_tcp_store(rank, address, port, world_size, seconds))
    held = process_env.held_port(port)
    if rank == 0:
        _store = serve_store(address, held or port, world_size, secret, seconds, is_held=held is not None)
    else:
        _store = reach_store(rank, address, held or port, world_size, secret, seconds)
    return _store


def _store_for_joining(config: DistributedConfig, options: RingOptions, deadline: Deadline) -> dist.Store:
    if config.world_size == 1:
        return dist.HashStore()  # inside this process: no port
    if _store is not None and _store.host == config.master_addr and not _store.await_end(deadline.left()):
        raise RendezvousError(
            f"rank 0 has not left the world that this process has left, and still uses its port at "
            f"{config.master_addr}. To begin a new world, every rank must leave the old one (cyxtrain.finalize()).",
            rank=0,
        )
    forget_store()
    store = open_world_store(config, options.secret_bytes, _left(deadline).total_seconds())
    return dist.PrefixStore(_key_prefix(config), store)


def _key_prefix(config: DistributedConfig) -> str:
    return f"/cyxtrain/{_joins[config.master_addr, config.master_port] + 1}"


def forget_store() -> None:
    """Close the store that was used last: that of rank 0 frees its port, and its end tells the other ranks."""
    global _store
    if _store is not None:
        _store.close()
    _store = None


def forget_parent() -> None:
    """Let go, in a forked child, of what its parent has joined: the child joins as a new process does."""
    if _store is not None:
        _store.source.abandon()
    forget_store()
    _joins.clear()


def _make_groups(store: dist.Store, config: DistributedConfig, options: RingOptions, deadline: Deadline) -> Joined:
    """Make a ring, over which the ranks exchange what they see; then a group of NCCL if each has its own GPU.

    Joining has one deadline, collectives another.
    """
    rank, world_size = config.rank or 0, config.world_size or 1
    timeout = timedelta(milliseconds=config.collective_timeout_ms)
    # Made before PyTorch knows of it, which counts failed groups too: a rank that retries would use other keys.
    ring = RingProcessGroup(
        store, rank, world_size, timeout, join_timeout=_left(deadline), options=options, registry=WORLD_GROUPS
    )
    try:
        records = ring.group.directory.records
        seen = [Seen.from_text(record.devices) for record in records]
        backend = devices.common_backend(seen)
        why_ring = "" if backend else devices.why_ring(seen, [record.machine for record in records])
        group: dict[str, Any] = {"store": store, "rank": rank, "world_size": world_size}
        if backend is BackendType.CPU or why_ring:
            dist.init_process_group("ring", **group, timeout=timeout, pg_options=ring)
            return Joined(dist.group.WORLD, config, dist.group.WORLD, seen, backend, why_ring, store)
        devices.check_nccl(seen)
        group["store"] = store = share_tcp_store(store, rank, world_size, deadline)
        _make_nccl(group, config, deadline)
        side_ring = dist.new_group(backend="ring", timeout=timeout, pg_options=ring)
        return Joined(dist.group.WORLD, config, side_ring, seen, backend, "", store)
    except BaseException as error:
        ring.fail(f"{type(error).__name__}: {error}")
        ring.shutdown()
        raise


def _make_nccl(group: dict[str, Any], config: DistributedConfig, deadline: Deadline) -> None:
    """Make NCCL's group the default one, connected, on the GPU of this rank."""
    device = torch.device("cuda", (config.local_rank or 0) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    try:
        dist.init_process_group("nccl", **group, timeout=_left(deadline), device_id=device)
    except RuntimeError as error:
        raise _not_joined("nccl", config, error) from error
    torch_compat.set_timeout(timedelta(milliseconds=config.collective_timeout_ms))


def _make_gloo(store: dist.Store, config: DistributedConfig, options: RingOptions, deadline: Deadline) -> dist.Store:
    """Make Gloo's group the default one; return its store."""
    rank, world_size = config.rank or 0, config.world_size or 1
    await_all_ranks(dist.PrefixStore("roll", store), rank, world_size, deadline, options)
    store = share_tcp_store(store, rank, world_size, deadline)
    try:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=_left(deadline))
    except RuntimeError as error:
        raise _not_joined("gloo", config, error) from error
    torch_compat.set_timeout(timedelta(milliseconds=config.collective_timeout_ms))
    return store


def _not_joined(backend: str, config: DistributedConfig, error: RuntimeError) -> RendezvousError:
    """Return the error for a group that PyTorch could not make."""
    hint = "Look at the output of the other ranks."
    if "Duplicate GPU" in str(error):
        hint = (
            "Two ranks use one GPU, which NCCL refuses: start at most one rank per GPU, or set DISTRIBUTED_BACKEND=cpu "
            "and device='cuda' to share it over the ring."
        )
    return RendezvousError(f"rank {config.rank} could not make a {backend} group: {error}. {hint}")


def _left(deadline: Deadline) -> timedelta:
    """Return the time left, above 0, which a process group would take for "not given"."""
    return timedelta(seconds=max(deadline.left(), 0.001))


def _require_backend(backend: BackendType, config: DistributedConfig) -> None:
    if backend is BackendType.GLOO and not dist.is_gloo_available():
        raise BackendUnavailableError("This PyTorch has no Gloo. Use backend='cpu', cyxtrain's own ring.")
    if backend is not BackendType.NCCL:
        return
    missing = devices.why_no_nccl()
    if missing:
        raise BackendUnavailableError(
            f"NCCL library not available: {missing}. "
            "Use backend='cpu' (DISTRIBUTED_BACKEND=cpu), cyxtrain's own ring, which carries CPU tensors."
        )
    count, local_rank = torch.cuda.device_count(), config.local_rank or 0
    if count > 1 and local_rank >= count:
        raise ConfigError(
            f"LOCAL_RANK {local_rank} has no GPU: {count} are visible. Start at most {count} ranks per machine."
        )


def _share_cores(ranks: int, own_cores: int | None = None) -> None:
    """Limit PyTorch's threads to this rank's share of the cores, as our launcher does.

    Where nobody binds ranks to cores, each would start as many threads as the machine has cores, also in a container
    that gets the time of two: they wait for each other, and training takes tens of times as long.
    """
    # All cores of the machine: whether the other ranks may use those of this rank is unknown.
    cores = min(os.cpu_count() or 1, cgroup_quota())
    most = min(cores // ranks, own_cores or cores)
    if torch.get_num_threads() > max(most, 1):
        torch.set_num_threads(max(int(most), 1))


def _warn_of_untested_torch(rank: int) -> None:
    """Warn on rank 0, once in a process."""
    if rank == 0 and not torch_compat.is_tested():
        _warn_once(
            f"PyTorch {torch.__version__} is outside the range that cyxtrain is tested with: "
            f"{torch_compat.tested_range()}."
        )


@functools.cache
def _warn_once(message: str) -> None:
    warn(message)


def is_rank_of_another_world(
    config: DistributedConfig | None, parent: DistributedConfig | None, *, refuses: bool
) -> bool:
    """Return whether a forked child is a rank of another world than its parent; refuse one that is no rank.

    `parent` is the config with which the parent joined, if `init` made its group. A child that is no rank is refused if
    `refuses`, and always one that cannot leave the group of its parent.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    own = complete_config(config or DistributedConfig())
    is_other = (own.rank, own.world_size) != (rank, world_size)
    if parent is not None and world_size > 1:
        is_other |= (own.master_addr, own.master_port) != (parent.master_addr, parent.master_port)
    is_alone = config is not None and config.rank is not None and config.world_size == 1
    forked = f"this process was forked from rank {rank} of {world_size} and is no rank itself"
    if not (is_other or is_alone):
        if not refuses:
            return False
        raise ConfigError(
            f"{forked}: set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT to make it a rank of another world; or, to "
            "train alone, call cyxtrain.init(cyxtrain.DistributedConfig(rank=0, world_size=1)) in it."
        )
    if not is_ring(dist.group.WORLD):
        raise ConfigError(
            f"{forked}, and its parent's {dist.get_backend()} group cannot be left in a child. Start it by "
            "multiprocessing's 'spawn', or before its parent joins."
        )
    return True


def environment_has_changed(joined: DistributedConfig) -> bool:
    """Return whether RANK and WORLD_SIZE describe another world than the one joined; refuse it if that has several."""
    described = process_env.own_identity()
    if described.items() <= {"RANK": joined.rank, "WORLD_SIZE": joined.world_size}.items():
        return False
    if joined.world_size != 1:
        found = " and ".join(f"{name}={value}" for name, value in described.items())
        raise ConfigError(
            f"this process has joined as rank {joined.rank} of {joined.world_size}, and the environment has {found} "
            "now. Call cyxtrain.finalize() on every rank before it joins another world, or set the variables back."
        )
    return True


def check_same(config: DistributedConfig, joined: DistributedConfig | None) -> None:
    """Refuse to join again with other settings; `joined` is None if `init` did not make the group."""
    if joined is not None:
        if config != joined:
            raise ConfigError(
                f"the world was joined with another config: {joined} is not {config}. Call finalize() first."
            )
    elif (config.rank, config.world_size) != (dist.get_rank(), dist.get_world_size()):
        raise ConfigError(
            f"torch.distributed is initialized already, as rank {dist.get_rank()} of {dist.get_world_size()}, and "
            f"the config says rank {config.rank} of {config.world_size}. Call init() without a config to adopt what "
            "is there."
        )
    others = {*backends_of().values()} - {"ring"}
    if config.require_secret and config.world_size != 1 and others:
        raise ConfigError(
            f"require_secret=True, and the default group goes over {' and '.join(sorted(others))}, which lets in "
            "every process that reaches its port: make it with torch.distributed.init_process_group('ring'), or leave "
            "it to init()."
        )
