"""From init to finalize, and the collectives between: thin functions over the default torch process group.

That group is the only state: whoever made it, all of these see it. One process is a world too: it has a group
of one, binds no port and starts no thread.
"""

from __future__ import annotations

import atexit
import dataclasses
import sys
import time
import warnings
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from cyxtrain import environment
from cyxtrain.config import BackendType, DistributedConfig
from cyxtrain.errors import BackendUnavailableError, ConfigError, NotInitializedError, RendezvousError
from cyxtrain.ring import RingProcessGroup
from cyxtrain.ring.rendezvous import StoreLostError
from cyxtrain.ring.store import host_store, reach_store

TESTED_TORCH = ((2, 11), (2, 14))
"""From, and up to but not including."""


@dataclasses.dataclass
class _Joined:
    """How this process joined; of no meaning once the default group is another."""

    group: Any
    config: DistributedConfig
    cpu_group: Any
    store: dist.Store


_joined: _Joined | None = None
_lives = 0
"""How often this process joined: each life has its own keys in a store that may outlive the group."""


class World:
    """What `init` returns: `with cyxtrain.init(): ...` leaves at the end."""

    def __enter__(self) -> World:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            _tell(error)
        finalize()

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
    resolved = _resolve(config)
    if dist.is_initialized():
        _check_same(resolved, explicit=config is not None)
        return World()
    _warn_of_untested_torch()
    _joined = _join(resolved)
    return World()


def finalize() -> None:
    """Leaves the world, with a goodbye to the others. Idempotent; it also happens at interpreter exit."""
    global _joined
    joined, _joined = _joined, None
    if joined is not None and dist.is_initialized() and dist.group.WORLD is joined.group:
        dist.destroy_process_group()


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

    Raises:
        As `init`.
    """
    config = DistributedConfig(rank=rank, world_size=world_size) if rank is not None or world_size is not None else None
    found = environment.read_config() if config is None else config
    if backend is not None:
        found.backend = BackendType.parse(backend)
    if timeout is not None:
        found.timeout_ms = found.collective_timeout_ms = max(1, int(timeout.total_seconds() * 1000))
    if init_method is not None and init_method != "env://":
        found.master_addr, found.master_port = _parse_tcp(init_method)
    return init(found)


def destroy_process_group() -> None:
    """Does `finalize` under PyTorch's name."""
    finalize()


def is_initialized() -> bool:
    """Returns whether there is a default process group, whoever made it."""
    return dist.is_initialized()


def get_rank() -> int:
    """Returns this process's rank, from 0.

    Raises:
        NotInitializedError: Before `init`.
    """
    _require_world("get_rank")
    return dist.get_rank()


def get_world_size() -> int:
    """Returns how many ranks there are.

    Raises:
        NotInitializedError: Before `init`.
    """
    _require_world("get_world_size")
    return dist.get_world_size()


def get_local_rank() -> int:
    """Returns this process's rank among those of its machine.

    Raises:
        NotInitializedError: Before `init`.
    """
    _require_world("get_local_rank")
    if _joined is not None and dist.group.WORLD is _joined.group and _joined.config.local_rank is not None:
        return _joined.config.local_rank
    return environment.read_config().local_rank or 0


def is_master() -> bool:
    """Returns whether this is rank 0.

    Raises:
        NotInitializedError: Before `init`.
    """
    _require_world("is_master")
    return dist.get_rank() == 0


def cpu_group() -> Any:
    """Returns the group over which small agreements go: the default one, or a ring beside NCCL."""
    _require_world("cpu_group")
    if _joined is not None and dist.group.WORLD is _joined.group:
        return _joined.cpu_group
    return dist.group.WORLD


def all_reduce(tensor: Tensor, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
    """Reduces a tensor in place, on all ranks. See `torch.distributed.all_reduce`."""
    return _world("all_reduce").all_reduce(tensor, op, group, async_op)


def broadcast(tensor: Tensor, src: int | None = None, group: Any = None, async_op: bool = False) -> Any:
    """Copies the tensor of rank `src` to all, in place. See `torch.distributed.broadcast`."""
    return _world("broadcast").broadcast(tensor, 0 if src is None else src, group, async_op)


def all_gather(tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
    """Copies the tensor of every rank to all. See `torch.distributed.all_gather`."""
    return _world("all_gather").all_gather(tensor_list, tensor, group, async_op)


def reduce_scatter(
    output: Tensor, input_list: list[Tensor], op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Any:
    """Reduces a list of tensors and leaves to each rank its own. See `torch.distributed.reduce_scatter`."""
    return _world("reduce_scatter").reduce_scatter(output, input_list, op, group, async_op)


def scatter(
    tensor: Tensor,
    scatter_list: list[Tensor] | None = None,
    src: int | None = None,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Copies to each rank its tensor of a list on rank `src`. See `torch.distributed.scatter`."""
    return _world("scatter").scatter(tensor, scatter_list, 0 if src is None else src, group, async_op)


def gather(
    tensor: Tensor,
    gather_list: list[Tensor] | None = None,
    dst: int | None = None,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Copies the tensor of every rank to rank `dst`. See `torch.distributed.gather`."""
    return _world("gather").gather(tensor, gather_list, 0 if dst is None else dst, group, async_op)


def reduce(
    tensor: Tensor, dst: int | None = None, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Any:
    """Reduces a tensor in place on rank `dst`. See `torch.distributed.reduce`."""
    return _world("reduce").reduce(tensor, 0 if dst is None else dst, op, group, async_op)


def barrier(group: Any = None, async_op: bool = False) -> Any:
    """Returns when all ranks have called it. See `torch.distributed.barrier`."""
    return _world("barrier").barrier(group, async_op)


def send(tensor: Tensor, dst: int, group: Any = None, tag: int = 0) -> None:
    """Sends a tensor to one rank. See `torch.distributed.send`."""
    _world("send").send(tensor, dst, group, tag)


def recv(tensor: Tensor, src: int | None = None, group: Any = None, tag: int = 0) -> int:
    """Receives a tensor from one rank, or from any; returns which. See `torch.distributed.recv`."""
    return int(_world("recv").recv(tensor, src, group, tag))


def gather_texts(text: str, group: Any = None) -> list[str]:
    """Returns the text of every rank, by rank: how ranks compare what they know. No pickle.

    Cost: two all_gathers; 8 bytes, then the longest text, of each rank.
    """
    group = group or cpu_group()
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, torch.tensor([len(data)]), group=group)
    sizes = [int(length) for length in lengths]
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(data)] = data
    texts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(texts, padded, group=group)
    return [bytes(found[:size].tolist()).decode() for found, size in zip(texts, sizes, strict=True)]


def _world(function: str) -> Any:
    _require_world(function)
    return dist


def _require_world(function: str) -> None:
    if not dist.is_initialized():
        raise NotInitializedError(
            f"{function}() needs the world: call cyxtrain.init() first (alone it is a world of one)."
        )


def _resolve(config: DistributedConfig | None) -> DistributedConfig:
    """Returns a complete copy: fields that are None come from the environment."""
    if config is None:
        return environment.read_config()
    config.validate()
    config = dataclasses.replace(config)
    if config.rank is None or config.backend is None:
        found = environment.read_config()
        if config.rank is None:
            config.rank, config.world_size = found.rank, found.world_size
            if config.local_rank is None:
                config.local_rank = found.local_rank
        config.backend = found.backend if config.backend is None else config.backend
    if config.local_rank is None:
        config.local_rank = config.rank
    config.backend = BackendType.parse(config.backend or BackendType.CPU)
    config.validate()
    return config


def _check_same(config: DistributedConfig, *, explicit: bool) -> None:
    """Refuses to join twice as somebody else."""
    if not explicit:
        return
    if _joined is not None and dist.group.WORLD is _joined.group:
        if config != _joined.config:
            raise ConfigError(
                f"the world was joined with another config: {_joined.config} is not {config}. Call finalize() first."
            )
    elif (config.rank, config.world_size) != (dist.get_rank(), dist.get_world_size()):
        raise ConfigError(
            f"torch.distributed is initialised already, as rank {dist.get_rank()} of {dist.get_world_size()}, and the "
            f"config says rank {config.rank} of {config.world_size}. Call init() without a config to adopt what is there."
        )


def _join(config: DistributedConfig) -> _Joined:
    global _lives
    _lives += 1
    deadline = time.monotonic() + config.timeout_ms / 1000
    backend = BackendType.parse(config.backend or BackendType.CPU)
    _require_backend(backend, config)
    while True:
        store = _open_store(config, deadline)
        try:
            _make_group(backend, store, config, max(deadline - time.monotonic(), 0.001))
        except StoreLostError:
            # Rank 0 of the life before went away just now; its next life opens the store again.
            if config.rank == 0 or time.monotonic() >= deadline:
                raise
            continue
        break
    atexit.unregister(_at_exit)
    atexit.register(_at_exit)  # anew, so that it runs before what was registered earlier
    group = dist.group.WORLD
    small = group if backend is not BackendType.NCCL else dist.new_group(backend="ring")
    return _Joined(group, config, small, store)


def _open_store(config: DistributedConfig, deadline: float) -> dist.Store:
    assert config.rank is not None
    assert config.world_size is not None
    if config.world_size == 1:
        return dist.HashStore()  # inside this process: no port
    left = max(deadline - time.monotonic(), 0.001)
    prefix = environment.agent_store_prefix()
    if config.rank == 0 and prefix is None:
        store = host_store(config.master_addr, config.master_port, config.world_size, left)
    else:
        store = reach_store(config.rank, config.master_addr, config.master_port, config.world_size, left)
    return dist.PrefixStore(f"{prefix or ''}/cyxtrain/{_lives}", store)


def _make_group(backend: BackendType, store: dist.Store, config: DistributedConfig, join_seconds: float) -> None:
    """Makes the default group; joining has one deadline, collectives another."""
    name = "ring" if backend is BackendType.CPU else backend.value
    try:
        dist.init_process_group(
            name,
            store=store,
            rank=config.rank or 0,
            world_size=config.world_size or 1,
            timeout=timedelta(seconds=join_seconds),
        )
    except RendezvousError:
        raise
    except RuntimeError as error:
        raise RendezvousError(
            f"rank {config.rank} could not make a {name} group: {error}. Look at the output of the other ranks."
        ) from error
    collective = timedelta(milliseconds=config.collective_timeout_ms)
    group = dist.group.WORLD
    if isinstance(group, RingProcessGroup):
        group.set_timeout(collective)
    else:
        dist.distributed_c10d._set_pg_timeout(collective, group)


def _require_backend(backend: BackendType, config: DistributedConfig) -> None:
    if backend is BackendType.GLOO and not dist.is_gloo_available():
        raise BackendUnavailableError("This PyTorch has no Gloo. Use backend='cpu', cyxtrain's own ring.")
    if backend is not BackendType.NCCL:
        return
    missing = [
        text
        for there, text in (
            (dist.is_nccl_available(), "this PyTorch was built without it"),
            (torch.cuda.is_available(), "no CUDA device is visible"),
        )
        if not there
    ]
    if missing:
        raise BackendUnavailableError(
            f"NCCL library not available: {' and '.join(missing)}. "
            "Use backend='cpu' (DISTRIBUTED_BACKEND=cpu), cyxtrain's own ring, which carries CPU tensors."
        )
    devices, local_rank = torch.cuda.device_count(), config.local_rank or 0
    if devices > 1 and local_rank >= devices:
        raise ConfigError(
            f"LOCAL_RANK {local_rank} has no GPU: {devices} are visible. Start at most {devices} ranks per machine."
        )
    torch.cuda.set_device(local_rank if devices > 1 else 0)


def _parse_tcp(init_method: str) -> tuple[str, int]:
    host, _, port = init_method.removeprefix("tcp://").rpartition(":")
    if not init_method.startswith("tcp://") or not host or not port.isdigit():
        raise ConfigError(f"init_method must be 'env://' or 'tcp://host:port', got {init_method!r}.")
    return host.strip("[]"), int(port)


def _warn_of_untested_torch() -> None:
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    first, end = TESTED_TORCH
    if not first <= version < end:
        warnings.warn(
            f"PyTorch {torch.__version__} is outside the range that cyxtrain is tested with: from {first[0]}.{first[1]} "
            f"up to, but not including, {end[0]}.{end[1]}.",
            stacklevel=3,
        )


def _tell(error: BaseException) -> None:
    """Tells the other ranks that this one ends because of an error of its own."""
    group = dist.group.WORLD if dist.is_initialized() else None
    if isinstance(group, RingProcessGroup):
        group.fail(f"{type(error).__name__}: {error}")


def _at_exit() -> None:
    """Leaves; where the program ends because of an error, the others hear of it."""
    if _joined is None:
        return
    error = getattr(sys, "last_value", None)
    if error is not None and not _is_interactive():
        _tell(error)
    finalize()


def _is_interactive() -> bool:
    """In a prompt or notebook, the last error may be long past."""
    return bool(sys.flags.interactive) or "ps1" in vars(sys)
