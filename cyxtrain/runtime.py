"""From init to finalize: thin functions over the default torch process group.

That group is the only state: whoever made it, all of these see it. One process is a world too: it has a group
of one, binds no port and starts no thread.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch.distributed as dist

from cyxtrain import environment, talking
from cyxtrain.config import BackendType, DistributedConfig
from cyxtrain.errors import CollectiveMismatchError, ConfigError, DistributedTrainingError, NotInitializedError
from cyxtrain.joining import Joined, forget_store, join
from cyxtrain.ring import RingProcessGroup
from cyxtrain.settings import require

_joined: Joined | None = None
"""How this process joined; of no meaning once the default group is another."""
_leave_first: list[Callable[[], None]] = []
"""What ends with the world, such as worker processes."""


class World:
    """What `init` returns: `with cyxtrain.init(): ...` leaves at the end."""

    def __enter__(self) -> World:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            tell(error)
        _leave(calls_roll=error is None)

    def __repr__(self) -> str:
        if not is_initialized():
            return "World(left)"
        return f"World(rank={get_rank()}, world_size={get_world_size()}, backend={dist.get_backend()!r})"


def init(config: DistributedConfig | None = None) -> World:
    """Joins the world: from `config`, else from the environment, else a world of one.

    Twice with the same config is harmless. A default `torch.distributed` group that is there already is adopted,
    and left alone by `finalize`.

    Args:
        config: Who this process is; None: the environment says.

    Returns:
        A context manager that finalizes.

    Raises:
        ConfigError: A setting is wrong, or the world has been joined with another config.
        RendezvousError: The ranks did not find each other within `timeout_ms`.
        BackendUnavailableError: The backend that was asked for is not on this machine.
    """
    global _joined
    right = config is None or isinstance(config, DistributedConfig)
    require(right, f"config must be a DistributedConfig, got {type(config).__name__}.")
    if dist.is_initialized():
        if config is not None:
            _check_same(environment.complete(config))
        return World()
    _joined = None  # whoever destroyed that group did not know of its store, which holds the port
    _joined = join(environment.complete(config or DistributedConfig()))
    atexit.unregister(_at_exit)
    atexit.register(_at_exit)  # anew, so that it runs before what was registered earlier
    return World()


def join_if_nobody_has() -> None:
    """Joins from the environment where nobody has: training is never silently unsynchronised."""
    if not is_initialized():
        init()


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
    global _joined
    for function in _leave_first:
        function()
    joined, _joined = _joined, None
    if joined is None or not _is_default(joined):
        return
    try:
        # Over other backends ranks that call different things would hang.
        if calls_roll and dist.get_world_size() > 1 and isinstance(joined.cpu_group, RingProcessGroup):
            talking.roll_call("finalize", joined.cpu_group)
    except RuntimeError as error:
        # Else the world has failed, and everybody has heard why; or others have left in another way.
        if isinstance(error, CollectiveMismatchError) and error.during == talking.ROLL_CALL:
            raise
    finally:
        dist.destroy_process_group()
        is_host, joined = joined.config.rank == 0, None  # nobody holds the store any more
        if is_host:
            forget_store()  # tells the others that they may look for the next one


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
    return environment.local_rank(default=dist.get_rank())


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
    if _joined is not None and _is_default(_joined):
        return _joined.cpu_group
    return dist.group.WORLD


def gather_texts(text: str, group: Any = None) -> list[str]:
    """Returns the text of every rank, by rank. See `cyxtrain.talking.gather_texts`."""
    return talking.gather_texts(text, group or cpu_group())


def roll_call(call: str, *, works_alone: bool = False) -> bool:
    """Opens a call that all ranks make together. See `cyxtrain.talking.roll_call`."""
    return talking.roll_call(call, cpu_group(), works_alone=works_alone)


def require_world(function: str) -> None:
    """Refuses to call a function before anybody has joined."""
    if not dist.is_initialized():
        raise NotInitializedError(
            f"{function}() needs the world: call cyxtrain.init() first (alone it is a world of one)."
        )


def _is_default(joined: Joined) -> bool:
    return dist.is_initialized() and dist.group.WORLD is joined.group


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


def _parse_tcp(init_method: str) -> tuple[str, int]:
    host, _, port = init_method.removeprefix("tcp://").rpartition(":")
    if not init_method.startswith("tcp://") or not host or not port.isdigit():
        raise ConfigError(f"init_method must be 'env://' or 'tcp://host:port', got {init_method!r}.")
    return host.strip("[]"), int(port)


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
    """Lets a forked child end without leaving in its parent's name."""
    global _joined
    _joined = None
    forget_store()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_forget)


def is_interactive() -> bool:
    """Returns whether this is a prompt or a notebook: the last error may be long past, and the user waits."""
    return bool(sys.flags.interactive) or "ps1" in vars(sys)
