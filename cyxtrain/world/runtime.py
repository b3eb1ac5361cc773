"""From init to finalize: thin functions over the default torch process group.

That group is the only state: whoever made it, all of these see it. One process is a world too: it has a group
of one, binds no port and starts no thread.
"""

from __future__ import annotations

import atexit
import dataclasses
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from cyxtrain.config import BackendType, DistributedConfig, complete_config
from cyxtrain.config.settings import require
from cyxtrain.config.world import with_disagreement
from cyxtrain.environment import process_env, standard_streams, torch_compat
from cyxtrain.errors import (
    CollectiveMismatchError,
    ConfigError,
    CyxtrainError,
    DistributedTrainingError,
    NotInitializedError,
    PeerLostError,
    PeerSilentError,
    RendezvousError,
    error_from_facts,
    warn,
)
from cyxtrain.ring import RingProcessGroup
from cyxtrain.world import consensus, devices
from cyxtrain.world.aborting import AbortOnFailure
from cyxtrain.world.join import Joined, forget_parent, forget_store, join

_joined: Joined | None = None
"""How this process joined; of no meaning once the default group is another."""


class _SideRing(NamedTuple):
    """A ring beside a default group such as NCCL's.

    `aborting`: ends the default group when the ring fails; `carries_cpu`: whether CPU tensors go over the ring.
    """

    group: Any
    ring: Any
    aborting: AbortOnFailure
    carries_cpu: bool


_beside: _SideRing | None = None
"""The ring beside the default group, if there is one."""
_asked: DistributedConfig | None = None
"""With what `init` was called last, until `finalize`: to join anew is to do it again."""
_inherited: Any = None
"""The default group of this process's parent, if this is a forked child of a rank."""
_parent: DistributedConfig | None = None
"""Who that parent is, if `init` has made its group."""
_OF_CPUS = {"ring", "gloo"}
"""Backends that carry CPU tensors best."""
_ABORT_SECONDS = 10.0
"""How long leaving waits for the abort of an accelerator's groups."""
_CAUSE_SECONDS = 1.0
"""How long an error of an accelerator's group waits for its cause, which the ring hears."""
_leave_first: list[Callable[[], None]] = []
"""What ends with the world, such as worker processes."""


class World:
    """What `init` returns: `with cyxtrain.init(): ...` leaves at the end."""

    def __enter__(self) -> World:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        cause = None
        if error is not None:
            cause = cause_of(error)
            tell(error)
        _leave(calls_roll=error is None)
        if cause is not None:
            raise cause from error

    def __repr__(self) -> str:
        if not is_initialized():
            return "World(left)"
        return f"World(rank={get_rank()}, world_size={get_world_size()}, backend={dist.get_backend()!r})"


def init(config: DistributedConfig | None = None) -> World:
    """Joins the world: from `config`, else from the environment, else a world of one.

    Twice with the same config is harmless. A default `torch.distributed` group that is there already is adopted,
    and left alone by `finalize`; if NCCL, say, is part of it, all ranks make a ring beside it.

    Args:
        config: Who this process is; None: the environment says.

    Returns:
        A context manager that finalizes.

    Raises:
        ConfigError: A setting is wrong, or the world has been joined with another config; the environment describes
            another world than the one that was joined; or this is a forked child of a rank, and no rank itself.
        RendezvousError: The ranks did not find each other within `timeout_ms`.
        BackendUnavailableError: The backend that was asked for is not on this machine.
    """
    global _asked
    right = config is None or isinstance(config, DistributedConfig)
    require(right, f"config must be a DistributedConfig, got {type(config).__name__}.")
    if dist.is_initialized():
        _leave_what_is_not_true(config)
    if dist.is_initialized():
        if config is not None:
            _check_same(complete_config(config))
        _adopt(config)
        return World()
    _asked = dataclasses.replace(config or DistributedConfig())
    _join()
    return World()


def _join() -> None:
    """Joins with what `init` was asked for last."""
    global _joined, _beside
    standard_streams.open_absent()  # the program may have closed one since the import
    _joined = None  # whoever destroyed that group did not know of its store, which holds the port
    config = complete_config(_asked or DistributedConfig())
    try:
        with torch_compat.noting_excepthook():
            _joined = join(config)
    except RendezvousError as error:
        raise with_disagreement(error, config) from error.__cause__
    group, beside = _joined.group, _joined.cpu_group
    _beside = None if beside is group else _add_side_ring(group, beside)
    atexit.unregister(_at_exit)
    atexit.register(_at_exit)  # anew, so that it runs before what was registered earlier


def _adopt(config: DistributedConfig | None) -> None:
    """Makes a ring beside a default group of PyTorch's in which not all goes over CPUs. All ranks call it.

    Args:
        config: Says how long its collectives may take; None: the default.
    """
    global _beside
    world = dist.group.WORLD
    is_ours = _joined is not None and _joined.group is world
    if is_ours or world is _inherited or cpu_group() is not world:
        return
    backends = consensus.backends_of()
    if "cpu" in backends and len({*backends.values()}) == 1:
        return
    milliseconds = (config or DistributedConfig()).collective_timeout_ms
    _beside = _add_side_ring(world, dist.new_group(backend="ring", timeout=timedelta(milliseconds=milliseconds)))


def _add_side_ring(group: Any, ring: Any) -> _SideRing:
    return _SideRing(group, ring, AbortOnFailure(ring), "cpu" not in consensus.backends_of())


def join_if_nobody_has() -> None:
    """Joins from the environment where nobody has: training is never silently unsynchronised."""
    if is_initialized():
        _adopt(None)
    else:
        _join()


def join_for_all(*, works_alone: bool = False) -> None:
    """Joins before a call that all ranks make: also where what this process has joined is no longer true, or broken.

    After an error that this rank's program has seen, the world begins anew, as all ranks do so in their next call.

    Args:
        works_alone: Whether the call harms nobody in a forked child of a world of one.

    Raises:
        ConfigError: As `init`.
        RendezvousError: A rank does not begin anew within `timeout_ms`.
        CyxtrainError: The world has ended, and only the program can begin another one.
    """
    if dist.is_initialized():
        _leave_what_is_not_true(None, refuses=not works_alone)
    join_if_nobody_has()
    group = cpu_group()
    failure = group.raised_failure if isinstance(group, RingProcessGroup) else None
    if failure is None:
        return
    is_ours = _joined is not None and _joined.cpu_group is _joined.group is group
    if not is_ours or isinstance(failure, (PeerLostError, PeerSilentError)):
        again = "start all ranks again" if is_ours else "make the default process group anew on every rank"
        text = f"this world has ended with an earlier error. To go on, {again}. The error was: {failure}"
        raise error_from_facts({**failure.to_facts(), "message": text})
    dist.destroy_process_group()
    try:
        _join()
    except RendezvousError as error:
        raise RendezvousError(
            f"a new world could not begin after an earlier error: {error} The earlier error was: {failure}",
            rank=error.rank,
        ) from error


def before_leaving(function: Callable[[], None]) -> None:
    """Lets a function be called whenever this process is about to leave its world, or ends."""
    _leave_first.append(function)
    atexit.register(function)


def finalize() -> None:
    """Leaves the world, when all ranks do. Idempotent; it also happens at interpreter exit.

    Worker processes that this one has started (`num_processes`) end, too.

    Raises:
        CollectiveMismatchError: Other ranks still want something that needs all; this one has left all the same.
    """
    _leave(calls_roll=True)


def _leave(*, calls_roll: bool) -> None:
    global _joined, _beside, _asked
    _asked = None
    torch_compat.put_back_excepthook()
    for function in _leave_first:
        function()
    joined, _joined = _joined, None
    if joined is None or not _is_default(joined):
        return
    try:
        # Over other backends ranks that call different things would hang.
        if calls_roll and dist.get_world_size() > 1 and isinstance(joined.cpu_group, RingProcessGroup):
            consensus.roll_call("finalize", joined.cpu_group)
    except RuntimeError as error:
        # Else the world has failed, and everybody has heard why; or others have left in another way.
        if isinstance(error, CollectiveMismatchError) and error.during == consensus.ROLL_CALL:
            raise
    finally:
        _destroy_groups()
        is_host, joined, _beside = joined.config.rank == 0, None, None  # nobody holds the store any more
        if is_host:
            forget_store()  # tells the others that they may look for the next one


def _destroy_groups() -> None:
    """Destroy all groups; after an error abort those of an accelerator, whose kernels may wait for ever."""
    if _beside is None or _beside.ring.failure("finalize") is None:
        dist.destroy_process_group()
        return
    _beside.ring.shutdown()
    if _beside.aborting.is_done(_ABORT_SECONDS):
        torch_compat.abort_process_groups()
    else:
        warn(
            f"{dist.get_backend()} could not be aborted within {_ABORT_SECONDS:.0f} s after an error, so this process "
            "may not end by itself. End it with SIGKILL, and look at the GPU with nvidia-smi."
        )


def init_process_group(
    backend: BackendType | str | None = None,
    init_method: str | None = None,
    timeout: timedelta | None = None,
    world_size: int | None = None,
    rank: int | None = None,
) -> World:
    """Does `init` under PyTorch's name; what is absent comes from the environment or the defaults.

    Args:
        backend: "cpu" (or "ring"), "nccl", "gloo".
        init_method: None, "env://" or "tcp://host:port".
        timeout: Of joining and of every collective.
        world_size: How many ranks there are.
        rank: This rank.

    Returns:
        As `init`.

    Raises:
        ConfigError, RendezvousError, BackendUnavailableError: As `init`.
    """
    config = DistributedConfig(rank=rank, world_size=world_size)
    if backend is not None:
        config.backend = BackendType.parse(backend)
    if timeout is not None:
        require(isinstance(timeout, timedelta), f"timeout must be a datetime.timedelta, got {timeout!r}.")
        config.timeout_ms = config.collective_timeout_ms = max(1, int(timeout.total_seconds() * 1000))
    if init_method is not None and init_method != "env://":
        config.master_addr, config.master_port = _parse_tcp(init_method)
    return init(None if config == DistributedConfig() else config)


def destroy_process_group() -> None:
    """Does `finalize` under PyTorch's name.

    Raises:
        CollectiveMismatchError: As `finalize`.
    """
    finalize()


def is_initialized() -> bool:
    """Returns whether there is a default process group, whoever made it."""
    return dist.is_initialized()


def get_rank() -> int:
    """Returns this process's rank, from 0.

    Raises:
        NotInitializedError: Before `init`.
    """
    require_world("get_rank")
    return dist.get_rank()


def get_world_size() -> int:
    """Returns how many ranks there are.

    Raises:
        NotInitializedError: Before `init`.
    """
    require_world("get_world_size")
    return dist.get_world_size()


def get_local_rank() -> int:
    """Returns this process's rank among those of its machine.

    Raises:
        NotInitializedError: Before `init`.
    """
    require_world("get_local_rank")
    if _joined is not None and _is_default(_joined) and _joined.config.local_rank is not None:
        return _joined.config.local_rank
    found = process_env.number("LOCAL_RANK")
    return dist.get_rank() if found is None else found


def is_master() -> bool:
    """Returns whether this is rank 0.

    Raises:
        NotInitializedError: Before `init`.
    """
    require_world("is_master")
    return dist.get_rank() == 0


def cpu_group() -> Any:
    """Returns the group over which small agreements go: the default one, or a ring beside NCCL."""
    require_world("cpu_group")
    world = dist.group.WORLD
    return _beside.ring if _beside is not None and _beside.group is world else world


def group_for(device: torch.device) -> Any:
    """Returns the group of all ranks that carries tensors of a device: a ring beside NCCL those of the CPU."""
    if _beside is None or device.type != "cpu" or not _beside.carries_cpu:
        return dist.group.WORLD
    return cpu_group()


def has_side_ring() -> bool:
    """Return whether a ring beside the default group may carry the tensors of the CPU."""
    return _beside is not None


def why_cpus() -> str:
    """Returns why a model that is on no accelerator, and for which no device was asked, stays on CPUs; "": it does not.

    Users who ask for a backend of CPUs want to train on them.
    """
    require_world("why_cpus")
    if _joined is None or not _is_default(_joined):
        found = consensus.backends_of()
        of_cpus = "cpu" in found and set(found.values()) <= _OF_CPUS
        return f"the process group is {found['cpu']}'s" if of_cpus else ""
    if _joined.backend in (BackendType.CPU, BackendType.GLOO):
        by_program = _asked is not None and _asked.backend is not None
        return f"{'backend' if by_program else 'DISTRIBUTED_BACKEND'}={_joined.backend.value}"
    return devices.why_cpus(_joined.seen)


def why_ring() -> str:
    """Returns why the ranks, which were asked for no backend, have decided against NCCL; "": they have not."""
    return _joined.why_ring if _joined is not None and _is_default(_joined) else ""


def gather_texts(text: str, group: Any = None) -> list[str]:
    """Returns the text of every rank, by rank. See `cyxtrain.world.consensus.gather_texts`."""
    return consensus.gather_texts(text, group or cpu_group())


def roll_call(call: str, *, works_alone: bool = False) -> bool:
    """Opens a call that all ranks make together. See `cyxtrain.world.consensus.roll_call`."""
    return consensus.roll_call(call, cpu_group(), works_alone=works_alone)


def require_world(function: str) -> None:
    """Refuses to call a function before anybody has joined."""
    if not dist.is_initialized():
        raise NotInitializedError(
            f"{function}() needs the world: call cyxtrain.init() first (alone it is a world of one)."
        )


def require_rank(function: str) -> None:
    """Refuses to call a function before anybody has joined, and in a forked child of a world of one, which is no rank.

    A child of several ranks gets the same error from its group, however it calls it.
    """
    require_world(function)
    if _inherited is not None and _inherited is dist.group.WORLD and dist.get_world_size() == 1:
        raise NotInitializedError(
            f"{function}() needs the world, and this process was forked from rank 0 of 1 and is no rank itself: call "
            "cyxtrain.init() in it, once RANK and WORLD_SIZE say who it is."
        )


def _is_default(joined: Joined) -> bool:
    return dist.is_initialized() and dist.group.WORLD is joined.group


def _leave_what_is_not_true(config: DistributedConfig | None, *, refuses: bool = True) -> None:
    """Leaves the world that this process seems to be in, where it is its parent's, or where another one is described.

    Args:
        config: As `init`'s.
        refuses: Whether to refuse a forked child of a world of one that is no rank itself; else it stays as it is.

    Raises:
        ConfigError: It is a forked child, and no rank itself; or the environment contradicts a world of several ranks.
    """
    if _inherited is dist.group.WORLD:
        # OpenMP would wait for ever for the parent's threads, which a child does not have.
        torch.set_num_threads(1)
        if _is_rank_itself(config, refuses=refuses or dist.get_world_size() > 1):
            dist.destroy_process_group()
        return
    asked = _asked if config is None else config
    if _joined is None or not _is_default(_joined) or asked is None or asked.rank is not None:
        return  # PyTorch's own group is what is true; and so is what the program sets
    joined, described = _joined.config, process_env.own_identity()
    if described.items() <= {"RANK": joined.rank, "WORLD_SIZE": joined.world_size}.items():
        return
    if joined.world_size != 1:
        said = " and ".join(f"{name}={value}" for name, value in described.items())
        raise ConfigError(
            f"this process has joined as rank {joined.rank} of {joined.world_size}, and the environment has {said} by "
            "now. Call cyxtrain.finalize() on every rank before it joins another world, or set the variables back."
        )
    dist.destroy_process_group()  # nothing is lost with a world of one


def _is_rank_itself(config: DistributedConfig | None, *, refuses: bool) -> bool:
    """Returns whether a forked child is a rank of another world than its parent; or refuses it."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    own = complete_config(config or DistributedConfig())
    is_other = (own.rank, own.world_size) != (rank, world_size)
    if _parent is not None and world_size > 1:
        is_other |= (own.master_addr, own.master_port) != (_parent.master_addr, _parent.master_port)
    is_meant = config is not None and config.rank is not None and config.world_size == 1
    forked = f"this process was forked from rank {rank} of {world_size} and is no rank itself"
    if not (is_other or is_meant):
        if not refuses:
            return False
        raise ConfigError(
            f"{forked}: set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT to make it a rank of another world; or, to "
            "train alone, call cyxtrain.init(cyxtrain.DistributedConfig(rank=0, world_size=1)) in it."
        )
    if not isinstance(dist.group.WORLD, RingProcessGroup):
        raise ConfigError(
            f"{forked}, and its parent's {dist.get_backend()} group cannot be left in a child. Start it by "
            "multiprocessing's 'spawn', or before its parent joins."
        )
    return True


def _check_same(config: DistributedConfig) -> None:
    """Refuses to join twice as somebody else."""
    if _joined is not None and _is_default(_joined):
        if config != _joined.config:
            raise ConfigError(
                f"the world was joined with another config: {_joined.config} is not {config}. Call finalize() first."
            )
    elif (config.rank, config.world_size) != (dist.get_rank(), dist.get_world_size()):
        raise ConfigError(
            f"torch.distributed is initialised already, as rank {dist.get_rank()} of {dist.get_world_size()}, and "
            f"the config says rank {config.rank} of {config.world_size}. Call init() without a config to adopt what "
            "is there."
        )
    others = {*consensus.backends_of().values()} - {"ring"}
    if config.require_secret and config.world_size != 1 and others:
        raise ConfigError(
            f"require_secret=True, and the default group goes over {' and '.join(sorted(others))}, which lets in "
            "whoever reaches its port: make it with torch.distributed.init_process_group('ring'), or leave it to "
            "init()."
        )


def _parse_tcp(init_method: str) -> tuple[str, int]:
    host, _, port = init_method.removeprefix("tcp://").rpartition(":")
    if not init_method.startswith("tcp://") or not host or not port.isdigit():
        raise ConfigError(f"init_method must be 'env://' or 'tcp://host:port', got {init_method!r}.")
    return host, int(port)


def tell(error: BaseException, *, in_training: bool = False) -> None:
    """Ends the group because of an error of this rank's own, and tells the others, who would wait for it.

    Args:
        error: What has gone wrong.
        in_training: Whether the others shall raise an error of training, with the traceback of this one.
    """
    ended_well = isinstance(error, SystemExit) and error.code in (None, 0)
    group = cpu_group() if dist.is_initialized() else None
    if isinstance(group, RingProcessGroup) and not ended_well:
        text = ": ".join(filter(None, (type(error).__name__, str(error))))
        group.fail(DistributedTrainingError.because_of(error, dist.get_rank()) if in_training else text)


def _ring_beside() -> RingProcessGroup | None:
    """Return the ring beside the default group; None: that is a ring itself, or there is none."""
    group = cpu_group() if dist.is_initialized() else None
    return group if isinstance(group, RingProcessGroup) and group is not dist.group.WORLD else None


def cause_of(error: BaseException) -> CyxtrainError | None:
    """Return the error of another rank that has ended the default group, if it explains an error of a collective.

    NCCL names neither the rank nor what happened there; the ring beside it does.

    Args:
        error: What was raised on this rank.

    Returns:
        What to raise instead; None: the error has another cause.
    """
    ring = _ring_beside()
    if ring is None or not isinstance(error, RuntimeError) or isinstance(error, CyxtrainError):
        return None
    # The backend may have noticed first.
    seconds = _CAUSE_SECONDS if isinstance(error, dist.DistError) else 0.0
    failure = ring.failure(_default_call(), seconds)
    return None if failure is None or failure.rank == dist.get_rank() else failure


def check_default_group() -> None:
    """Refuse to go on with results of the default group if it was aborted: they are wrong, and NCCL does not tell.

    To call after the host has waited for such results.

    Raises:
        CyxtrainError: What has ended the ring beside it.
    """
    ring = _ring_beside()
    failure = None if ring is None else ring.failure(_default_call())
    if failure is not None:
        raise failure


def _default_call() -> str:
    return f"a collective of {dist.get_backend()}"


def _at_exit() -> None:
    """Leaves; where the program ends because of an error, the others hear of it."""
    if _joined is None:
        return
    error = getattr(sys, "last_value", None)
    if isinstance(error, BaseException) and not is_interactive():
        tell(error)
        _leave(calls_roll=False)
    else:
        _leave(calls_roll=True)


def _forget() -> None:
    """Lets a forked child end without leaving in its parent's name, and join by itself."""
    global _joined, _beside, _asked, _inherited, _parent
    if dist.is_initialized() and dist.group.WORLD is not _inherited:
        _inherited, _parent = dist.group.WORLD, None if _joined is None else _joined.config
    _joined = _beside = _asked = None
    forget_parent()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_forget)


def is_interactive() -> bool:
    """Returns whether this is a prompt or a notebook: the last error may be long past, and the user waits."""
    return bool(sys.flags.interactive) or "ps1" in vars(sys)
