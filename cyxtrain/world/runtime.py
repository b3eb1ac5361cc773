"""From init to finalize, over the default process group of PyTorch.

That group is the only state: all functions here see it, also if the program made it. One process is a world too: it
has a group of one, binds no port and starts no thread.
"""

from __future__ import annotations

import atexit
import dataclasses
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from cyxtrain.config import BackendType, DistributedConfig, complete_config
from cyxtrain.config.distributed_config import with_disagreement
from cyxtrain.config.settings import names_checked, require
from cyxtrain.environment import process_env, standard_streams, torch_compat, uncaught
from cyxtrain.errors import (
    CollectiveMismatchError,
    ConfigError,
    CyxtrainError,
    DistributedTrainingError,
    NotInitializedError,
    PeerLostError,
    PeerSilentError,
    RendezvousError,
    before_raising,
    counted,
    error_from_facts,
    is_on_all_ranks,
    warn_together_if,
)
from cyxtrain.ring import fail, failure_of, is_ring, members_of, raised_failure_of
from cyxtrain.world import consensus, devices
from cyxtrain.world.join import (
    Joined,
    check_same,
    environment_has_changed,
    forget_parent,
    forget_store,
    is_rank_of_another_world,
    join,
)
from cyxtrain.world.side_ring import SideRing
from cyxtrain.world.world import SAME_CALL, World

_joined: Joined | None = None
"""How this process joined; ignored once another group is the default one."""
_side_ring: SideRing | None = None
"""The ring next to the default group of another backend."""
_requested: DistributedConfig | None = None
"""The config of the last `init`, until `finalize`: joining again repeats it."""
_inherited: Any = None
"""The default group of this process's parent, if this is a forked child of a rank."""
_parent: DistributedConfig | None = None
"""The config of that parent, if `init` made its group."""
_current: JoinedWorld | None = None
"""The latest world as a value; ignored once another group is the default one."""
_generation = -1
"""How many worlds this process has joined before the present one."""
# Backends that carry CPU tensors best.
_OF_CPUS = {"ring", "gloo"}
_before_leaving: list[Callable[[], None]] = []
"""Called before the world ends, for example to end worker processes."""


class JoinedWorld(World):
    """The result of `init`: `with cyxtrain.init(): ...` finalizes at the end."""

    def __enter__(self) -> JoinedWorld:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        cause = None
        if error is not None:
            cause = cause_of(error)
            end_group(error)
        _leave(checks_call=error is None)
        if cause is not None:
            raise cause from error

    def __repr__(self) -> str:
        if not is_initialized():
            return "World(left)"
        return f"World(rank={self.rank}, world_size={self.size}, backend={dist.get_backend()!r})"


def current(function: str = "this call") -> JoinedWorld:
    """Return the world that this process has joined; `function` names the call in the error if it has not."""
    global _current
    require_world(function)
    group: Any = dist.group.WORLD
    members = members_of(group)
    agreements = group
    cpu_tensors = group
    side_ring = _current_side_ring()
    if side_ring is not None:
        agreements = side_ring.ring
        if side_ring.carries_cpu:
            cpu_tensors = agreements
    found = (group, agreements, members)
    if _current is not None and (_current.group, _current.cpu_group, _current.members) == found:
        return _current
    _current = JoinedWorld(
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        group=group,
        cpu_group=agreements,
        cpu_tensors=cpu_tensors,
        local_rank=get_local_rank(),
        members=members,
        generation=_generation,
    )
    return _current


@names_checked
def init(config: DistributedConfig | None = None) -> JoinedWorld:
    """Join the world: from `config`, otherwise from the environment, otherwise a world of one.

    Twice with the same config is harmless. A default `torch.distributed` group that is there already is adopted,
    and left alone by `finalize`; if it uses NCCL, for example, all ranks make a ring next to it.

    Args:
        config: Who this process is; None: the environment says.

    Returns:
        A context manager that finalizes.

    Raises:
        ConfigError: A setting is wrong, or the world has been joined with another config; the environment describes
            another world than the one that was joined; or this is a forked child of a rank, and not a rank itself.
        RendezvousError: The ranks did not find each other within `timeout_ms`.
        BackendUnavailableError: This machine does not have the requested backend.
    """
    global _requested
    right = config is None or isinstance(config, DistributedConfig)
    require(right, f"config must be a DistributedConfig, got {type(config).__name__}.")
    if dist.is_initialized():
        _leave_stale_world(config)
    if dist.is_initialized():
        if config is not None:
            joined = _own_join()
            check_same(complete_config(config), None if joined is None else joined.config)
        _adopt(config)
        return current()
    # A copy: the program may change its config later.
    _requested = dataclasses.replace(config or DistributedConfig())
    _join()
    return current()


def _join() -> None:
    """Join with the config of the last `init`."""
    global _joined, _side_ring, _generation
    standard_streams.open_absent()  # the program may have closed one since the import
    _joined = None  # a program that destroyed that group itself did not close its store, which holds the port
    config = complete_config(_requested or DistributedConfig())
    try:
        with torch_compat.noting_excepthook():
            _joined = join(config)
    except RendezvousError as error:
        raise with_disagreement(error, config) from error.__cause__
    if config.world_size == 1 or process_env.launched_run()[0]:
        torch_compat.put_back_excepthook()  # there is one rank, or the launcher prints it before each line
    _generation += 1
    _side_ring = None
    if _joined.cpu_group is not _joined.group:
        _side_ring = SideRing(_joined.group, _joined.cpu_group)
    # Registered again, so that it runs before functions that were registered earlier.
    atexit.unregister(_at_exit)
    atexit.register(_at_exit)


def _adopt(config: DistributedConfig | None) -> None:
    """Make a ring next to a default group of PyTorch that uses accelerators. All ranks call it."""
    global _side_ring
    world = dist.group.WORLD
    if _own_join() is not None or world is _inherited or cpu_group() is not world:
        return
    backends = consensus.backends_of()
    if "cpu" in backends and len({*backends.values()}) == 1:
        return  # it carries small agreements itself
    timeout = timedelta(milliseconds=(config or DistributedConfig()).collective_timeout_ms)
    _side_ring = SideRing(world, dist.new_group(backend="ring", timeout=timeout))


def join_if_nobody_has() -> World:
    """Join from the environment unless this process has joined: training is never silently unsynchronised."""
    if is_initialized():
        _adopt(None)
    else:
        _join()
    return current()


def join_for_all(*, works_alone: bool = False) -> World:
    """Join before a call that all ranks make, also if the world has failed or is a parent process's."""
    if dist.is_initialized():
        _leave_stale_world(None, refuses=not works_alone)
    join_if_nobody_has()
    rejoin_after_failure()
    return current()


def rejoin_after_failure() -> None:
    """Begin a new world, as every rank does in its next call, after an error that the program has seen.

    Raises the error of a rank that was lost or silent again: all ranks must be started again.
    """
    if torch.compiler.is_compiling():
        return  # torch.compile cannot look into a group
    group: Any = dist.group.WORLD  # not `cpu_group`, which takes longer: small collectives take microseconds
    if _side_ring is not None:
        group = cpu_group()
    failure = raised_failure_of(group)
    if failure is None:
        return
    is_ours = _joined is not None and _joined.cpu_group is _joined.group is group
    if not is_ours or isinstance(failure, (PeerLostError, PeerSilentError)):
        again = "start all ranks again" if is_ours else "make a new default process group on every rank"
        text = f"this world has ended with an earlier error. To continue, {again}. The error was: {failure}"
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
    """Let a function be called whenever this process is about to leave its world, or ends."""
    _before_leaving.append(function)
    atexit.register(function)


def finalize() -> None:
    """Leave the world, when all ranks do. Idempotent; it also happens at interpreter exit.

    Worker processes that this one has started (`num_processes`) end, too.

    Raises:
        CollectiveMismatchError: Other ranks made another call that needs all; this one has left nevertheless.
    """
    _leave(checks_call=True)


def _leave(*, checks_call: bool) -> None:
    global _joined, _side_ring, _requested, _current
    _requested = None
    _current = None
    torch_compat.put_back_excepthook()
    for function in _before_leaving:
        function()
    joined = _own_join()
    _joined = None
    if joined is None:
        return
    is_host = joined.config.rank == 0
    try:
        # Over other backends, ranks that make different calls would hang.
        if checks_call and dist.get_world_size() > 1 and is_ring(joined.cpu_group):
            current().check_same_call("finalize")
    except RuntimeError as error:
        # Otherwise the world has failed, and every rank knows why; or others have left in another way.
        if isinstance(error, CollectiveMismatchError) and error.during == SAME_CALL:
            raise
    finally:
        if _side_ring is None:
            dist.destroy_process_group()
        else:
            _side_ring.destroy_groups()
        # Nothing may hold the store any more when rank 0 closes it.
        joined = None
        _side_ring = None
        if is_host:
            forget_store()  # tells the others that they may look for the next store


@names_checked
def init_process_group(
    backend: BackendType | str | None = None,
    init_method: str | None = None,
    timeout: timedelta | None = None,
    world_size: int | None = None,
    rank: int | None = None,
) -> JoinedWorld:
    """Do `init` under PyTorch's name; arguments that are None come from the environment or the defaults.

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
        milliseconds = max(1, int(timeout.total_seconds() * 1000))
        config.timeout_ms = milliseconds
        config.collective_timeout_ms = milliseconds
    if init_method is not None and init_method != "env://":
        config.master_addr, config.master_port = _parse_tcp(init_method)
    if config == DistributedConfig():
        return init()
    return init(config)


destroy_process_group = finalize
"""The same under PyTorch's name."""


def is_initialized() -> bool:
    """Return whether there is a default process group, even if the program made it."""
    return dist.is_initialized()


def get_rank() -> int:
    """Return this process's rank, from 0.

    Raises:
        NotInitializedError: Before `init`.
    """
    require_world("get_rank")
    return dist.get_rank()


def get_world_size() -> int:
    """Return how many ranks there are.

    Raises:
        NotInitializedError: Before `init`.
    """
    require_world("get_world_size")
    return dist.get_world_size()


def get_local_rank() -> int:
    """Return this process's rank among the processes of its machine.

    Raises:
        NotInitializedError: Before `init`.
    """
    require_world("get_local_rank")
    joined = _own_join()
    if joined is not None and joined.config.local_rank is not None:
        return joined.config.local_rank
    local_rank = process_env.number("LOCAL_RANK")
    return dist.get_rank() if local_rank is None else local_rank


def is_master() -> bool:
    """Return whether this is rank 0.

    Raises:
        NotInitializedError: Before `init`.
    """
    require_world("is_master")
    return dist.get_rank() == 0


def cpu_group() -> Any:
    """Return the group for small agreements: the default one, or a ring next to NCCL."""
    require_world("cpu_group")
    side_ring = _current_side_ring()
    return dist.group.WORLD if side_ring is None else side_ring.ring


def group_for(device: torch.device) -> Any:
    """Return the group of all ranks that carries a device's tensors: for the CPU a ring next to NCCL."""
    if _side_ring is None or device.type != "cpu" or not _side_ring.carries_cpu:
        return dist.group.WORLD
    return cpu_group()


def has_side_ring() -> bool:
    """Return whether a ring next to the default group may carry the tensors of the CPU."""
    return _side_ring is not None


def why_cpus() -> str:
    """Return why a model stays on CPUs if the program chose no device; "": it does not.

    Users who ask for a backend of CPUs want to train on them.
    """
    require_world("why_cpus")
    joined = _own_join()
    if joined is None:
        backends = consensus.backends_of()
        if "cpu" in backends and set(backends.values()) <= _OF_CPUS:
            return f"the process group is {backends['cpu']}'s"
        return ""
    if joined.backend in (BackendType.CPU, BackendType.GLOO):
        is_by_program = _requested is not None and _requested.backend is not None
        setting = "backend" if is_by_program else "DISTRIBUTED_BACKEND"
        return f"{setting}={joined.backend.value}"
    return devices.why_cpus(joined.reports)


def why_ring() -> str:
    """Return why the ranks decided against NCCL if the program chose no backend; "": they have not."""
    joined = _own_join()
    return "" if joined is None else joined.why_ring


def following(world: World) -> World:
    """Return a world, or the one of the same size that the program has joined since then."""
    if dist.group.WORLD is world.group:
        return world
    found = current()
    if found.size != world.size:
        raise ConfigError(
            f"the model was wrapped in a world of {counted(world.size, 'rank')}, and this is one of {found.size}: wrap "
            "it again, so that gradients are averaged over all ranks."
        )
    return found


def require_world(function: str) -> None:
    """Refuse a call before this process has joined."""
    if not dist.is_initialized():
        raise NotInitializedError(
            f"{function}() needs the world: call cyxtrain.init() first (alone it is a world of one)."
        )


def require_rank(function: str) -> None:
    """Refuse a call before this process has joined, and in a forked child of a world of one.

    A child is not a rank. In a world of several ranks its group refuses every call.
    """
    require_world(function)
    if _inherited is not None and _inherited is dist.group.WORLD and dist.get_world_size() == 1:
        raise NotInitializedError(
            f"{function}() needs the world, and this process was forked from rank 0 of 1 and is not a rank: call "
            "cyxtrain.init() in it, once RANK and WORLD_SIZE say who it is."
        )


def _own_join() -> Joined | None:
    """Return how `init` made the default group; None: it did not, or there is no group."""
    if _joined is None or _joined.group is not dist.group.WORLD:
        return None
    return _joined


def _leave_stale_world(config: DistributedConfig | None, *, refuses: bool = True) -> None:
    """Leave the world of a parent process, and a world of one if the environment describes another one."""
    if _inherited is dist.group.WORLD:
        # OpenMP would wait for ever for the threads of the parent, which a child does not have.
        torch.set_num_threads(1)
        if is_rank_of_another_world(config, _parent, refuses=refuses or dist.get_world_size() > 1):
            dist.destroy_process_group()
        return
    joined = _own_join()
    requested = config or _requested
    if joined is None or requested is None or requested.rank is not None:
        return  # a group of PyTorch and the settings of the program take precedence
    if environment_has_changed(joined.config):
        dist.destroy_process_group()  # a world of one holds nothing that could be lost


def _parse_tcp(init_method: str) -> tuple[str, int]:
    host, _, port = init_method.removeprefix("tcp://").rpartition(":")
    if not init_method.startswith("tcp://") or not host or not port.isdigit():
        raise ConfigError(f"init_method must be 'env://' or 'tcp://host:port', got {init_method!r}.")
    return host, int(port)


def end_group(error: BaseException, *, in_training: bool = False) -> None:
    """End the group because of an error of this rank, and report it to the others, which would wait."""
    # sys.exit() is not an error of this rank.
    ended_well = isinstance(error, SystemExit) and error.code in (None, 0)
    # What all ranks raise, some are about to find out, in a collective that must not end now.
    if not dist.is_initialized() or ended_well or is_on_all_ranks(error):
        return
    cause: CyxtrainError | str = ": ".join(filter(None, (type(error).__name__, str(error))))
    if in_training:
        cause = DistributedTrainingError.because_of(error, dist.get_rank())
    fail(cpu_group(), cause)


def has_failed() -> bool:
    """Return whether an error has ended the group of all ranks, such as the loss of another rank."""
    return dist.is_initialized() and failure_of(cpu_group()) is not None


def _current_side_ring() -> SideRing | None:
    """Return the ring next to the default group; None: it has no ring next to it, or there is no group."""
    if _side_ring is None or _side_ring.group is not dist.group.WORLD:
        return None
    return _side_ring


def cause_of(error: BaseException) -> CyxtrainError | None:
    """Return the error of another rank that ended the default group, if it explains a collective's error.

    NCCL names neither the rank nor its error; the ring next to it does.
    """
    side_ring = _current_side_ring()
    return None if side_ring is None else side_ring.cause_of(error)


def check_default_group() -> None:
    """Raise the error that has ended the ring next to the default group, whose results are wrong then.

    Call it after the host has waited for such results: an aborted NCCL raises nothing.
    """
    side_ring = _current_side_ring()
    if side_ring is None:
        return
    failure = side_ring.failure()
    if failure is not None:
        raise failure


def _at_exit() -> None:
    """Leave; if the program ends because of an error, report it to the other ranks."""
    if _joined is None:
        return
    error = getattr(sys, "last_value", None)  # Python sets it when an exception has ended the program
    if isinstance(error, BaseException) and not is_interactive():
        end_group(error)
        _leave(checks_call=False)
    else:
        _leave(checks_call=True)


def _forget() -> None:
    """Let a forked child end without leaving for its parent, and join by itself."""
    global _joined, _side_ring, _requested, _inherited, _parent
    if dist.is_initialized() and dist.group.WORLD is not _inherited:
        _inherited = dist.group.WORLD
        _parent = None if _joined is None else _joined.config
    _joined = None
    _side_ring = None
    _requested = None
    forget_parent()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_forget)


def _shorten_traceback() -> None:
    """Let Python print a mistake in short, and only on a machine's first rank if all ranks raise it."""
    # Not get_local_rank(), which raises an error of this package for a wrong variable: that would call this again.
    rank = 0
    joined = _own_join()
    if joined is not None and joined.config.local_rank is not None:
        rank = joined.config.local_rank
    elif dist.is_initialized():
        rank = dist.get_rank()
    uncaught.install(is_printing=rank == 0)


before_raising(_shorten_traceback)
warn_together_if(lambda: not dist.is_initialized() or dist.get_rank() == 0)


def is_interactive() -> bool:
    """Return whether this is a prompt or a notebook: the last error may be long past, and the user waits."""
    return bool(sys.flags.interactive) or "ps1" in vars(sys)
