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
from cyxtrain.world.devices import DeviceReport

_joins: Counter[tuple[str, int]] = Counter()
"""How often this process has joined at each address: each time has its own keys, in a store that may outlive the group.

A world of one has no store and is not counted: other ranks may be new processes."""
_store: KeyValueStore | None = None
"""The store that this process serves, as rank 0, or has reached. C++, which uses it, keeps no Python object alive."""


@dataclass
class Joined:
    """The groups that this process made when it joined, and how they were chosen."""

    group: Any
    config: DistributedConfig
    """Complete, except for the backend if the ranks chose it."""
    cpu_group: Any
    """The group for CPU tensors and small agreements."""
    reports: list[DeviceReport]
    """By rank; over Gloo this rank alone."""
    backend: BackendType | None
    """The requested one; None: the ranks chose."""
    why_ring: str
    store: dist.Store
    """Kept open for later groups; on rank 0 it holds the port."""


def join(config: DistributedConfig) -> Joined:
    """Make the default process group; raise RendezvousError if the process runs out of files or memory."""
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
    report = devices.report_devices(config)
    # Refuse wrong settings before anything starts.
    options = replace(RingOptions.from_environment(), devices=report.to_text(), group_name=_key_prefix(config))
    joined = _make_world(config, report, options, deadline)
    # Not after a failure: a rank that retries must use the same keys as the others.
    if config.world_size != 1:
        _joins[config.master_addr, config.master_port] += 1
    # Later groups use this store: with NCCL at their first collective, which a rank may reach late.
    is_nccl = joined.cpu_group is not joined.group
    timeout_ms = config.collective_timeout_ms if is_nccl else config.timeout_ms
    joined.store.set_timeout(timedelta(milliseconds=timeout_ms))
    if not process_env.ENVIRON.get("OMP_NUM_THREADS"):
        _share_cores(process_env.ranks_that_share_cores(), schedulers.cores_left(process_env.ENVIRON))
    return joined


def _make_world(config: DistributedConfig, report: DeviceReport, options: RingOptions, deadline: Deadline) -> Joined:
    """Make the default group; begin again where the process of rank 0 ended before all ranks had joined."""
    while True:
        store = _store_for_joining(config, options, deadline)
        try:
            if config.backend is BackendType.GLOO:
                return _make_gloo(store, config, report, options, deadline)
            return _make_groups(store, config, options, deadline)
        except StoreLostError:
            # The previous process of rank 0 has just ended; the next one opens the store again.
            if config.rank == 0 or deadline.passed():
                raise


def _identity(config: DistributedConfig) -> tuple[int, int]:
    return config.rank or 0, config.world_size or 1


def open_world_store(config: DistributedConfig, secret: bytes | None, seconds: float) -> dist.Store:
    """Open the store as rank 0, or reach it; torchrun's agent keeps one for all."""
    global _store
    rank, world_size = _identity(config)
    address = config.master_addr
    port = config.master_port
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
    """Close the store that was used last: on rank 0 this frees its port, and tells the other ranks."""
    global _store
    if _store is not None:
        _store.close()
    _store = None


def forget_parent() -> None:
    """Release the parent's store in a forked child, which joins as a new process does."""
    if _store is not None:
        _store.source.abandon()
    forget_store()
    _joins.clear()


def _make_groups(store: dist.Store, config: DistributedConfig, options: RingOptions, deadline: Deadline) -> Joined:
    """Make a ring, over which ranks exchange their device reports; then an NCCL group if each has a GPU.

    Joining has one deadline, collectives another.
    """
    rank, world_size = _identity(config)
    timeout = timedelta(milliseconds=config.collective_timeout_ms)
    # Made before PyTorch knows of it, which counts failed groups too: a rank that retries would use other keys.
    ring = RingProcessGroup(
        store, rank, world_size, timeout, join_timeout=_left(deadline), options=options, registry=WORLD_GROUPS
    )
    try:
        records = ring.group.directory.records
        reports = [DeviceReport.from_text(record.devices) for record in records]
        backend = devices.common_backend(reports)
        why_ring = ""
        if backend is None:
            why_ring = devices.why_ring(reports, [record.machine for record in records])
        arguments: dict[str, Any] = {"store": store, "rank": rank, "world_size": world_size}
        if backend is BackendType.CPU or why_ring:
            dist.init_process_group("ring", **arguments, timeout=timeout, pg_options=ring)
            return Joined(dist.group.WORLD, config, dist.group.WORLD, reports, backend, why_ring, store)
        devices.check_nccl(reports)
        store = share_tcp_store(store, rank, world_size, deadline)
        _make_nccl({**arguments, "store": store}, config, deadline)
        side_ring = dist.new_group(backend="ring", timeout=timeout, pg_options=ring)
        return Joined(dist.group.WORLD, config, side_ring, reports, backend, "", store)
    except BaseException as error:
        # The other ranks would wait for this one until the deadline.
        ring.fail(f"{type(error).__name__}: {error}")
        ring.shutdown()
        raise


def _make_nccl(arguments: dict[str, Any], config: DistributedConfig, deadline: Deadline) -> None:
    """Make NCCL's group the default one, connected, on the GPU of this rank."""
    device = torch.device("cuda", (config.local_rank or 0) % torch.cuda.device_count())
    # Programs take the device from torch.cuda.current_device() after init.
    torch.cuda.set_device(device)
    try:
        dist.init_process_group("nccl", **arguments, timeout=_left(deadline), device_id=device)
    except RuntimeError as error:
        raise _not_joined("nccl", config, error) from error
    # The timeout so far was that of joining.
    torch_compat.set_timeout(timedelta(milliseconds=config.collective_timeout_ms))


def _make_gloo(
    store: dist.Store, config: DistributedConfig, report: DeviceReport, options: RingOptions, deadline: Deadline
) -> Joined:
    """Make Gloo's group the default one."""
    rank, world_size = _identity(config)
    # Gloo's own errors do not name the ranks that are missing, and its C++ threads need a store of PyTorch.
    await_all_ranks(dist.PrefixStore("roll", store), rank, world_size, deadline, options)
    store = share_tcp_store(store, rank, world_size, deadline)
    try:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=_left(deadline))
    except RuntimeError as error:
        raise _not_joined("gloo", config, error) from error
    # The timeout so far was that of joining.
    torch_compat.set_timeout(timedelta(milliseconds=config.collective_timeout_ms))
    return Joined(dist.group.WORLD, config, dist.group.WORLD, [report], BackendType.GLOO, "", store)


def _not_joined(backend: str, config: DistributedConfig, error: RuntimeError) -> RendezvousError:
    hint = "Look at the output of the other ranks."
    if "Duplicate GPU" in str(error):
        hint = (
            "Two ranks use one GPU, which NCCL refuses: start at most one rank per GPU, or set DISTRIBUTED_BACKEND=cpu "
            "and device='cuda' to share it over the ring."
        )
    return RendezvousError(f"rank {config.rank} could not make a {backend} group: {error}. {hint}")


def _left(deadline: Deadline) -> timedelta:
    return timedelta(seconds=max(deadline.left(), 0.001))  # a process group takes 0 for "not set"


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
    count = torch.cuda.device_count()
    local_rank = config.local_rank or 0
    if count > 1 and local_rank >= count:
        raise ConfigError(
            f"LOCAL_RANK {local_rank} has no GPU: {count} are visible. Start at most {count} ranks per machine."
        )


def _share_cores(ranks: int, own_cores: int | None = None) -> None:
    """Limit PyTorch's threads to this rank's share of the cores, as our launcher does.

    If nothing binds ranks to cores, each would start as many threads as the machine has cores, also in a container
    with the time of two cores: they wait for each other, and training takes tens of times as long.
    """
    # All cores of the machine: whether other ranks may use this rank's cores is unknown.
    cores = min(os.cpu_count() or 1, cgroup_quota())
    share = min(cores // ranks, own_cores or cores)
    threads = max(int(share), 1)
    if torch.get_num_threads() > threads:
        torch.set_num_threads(threads)


def _warn_of_untested_torch(rank: int) -> None:
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
    """Return whether a forked child is a rank of another world; refuse a child that is not a rank.

    `parent` is the config with which the parent joined, if `init` made its group. A child that is not a rank is refused
    if `refuses`; one that cannot leave its parent's group is always refused.
    """
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    own = complete_config(config or DistributedConfig())
    is_other = (own.rank, own.world_size) != (rank, world_size)
    if parent is not None and world_size > 1:
        is_other |= (own.master_addr, own.master_port) != (parent.master_addr, parent.master_port)
    is_alone = config is not None and config.rank is not None and config.world_size == 1
    forked = f"this process was forked from rank {rank} of {world_size} and is not a rank"
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
    """Return whether RANK and WORLD_SIZE describe another world; refuse to leave one of several ranks."""
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
    if joined is None:
        _check_identity(config)
    elif config != joined:
        raise ConfigError(f"the world was joined with another config: {joined} is not {config}. Call finalize() first.")
    others = {*backends_of().values()} - {"ring"}
    if config.require_secret and config.world_size != 1 and others:
        raise ConfigError(
            f"require_secret=True, and the default group goes over {' and '.join(sorted(others))}, which lets in "
            "every process that reaches its port: make it with torch.distributed.init_process_group('ring'), or leave "
            "it to init()."
        )


def _check_identity(config: DistributedConfig) -> None:
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    if (config.rank, config.world_size) != (rank, world_size):
        raise ConfigError(
            f"torch.distributed is initialized already, as rank {rank} of {world_size}, and the config says rank "
            f"{config.rank} of {config.world_size}. Call init() without a config to adopt what is there."
        )
