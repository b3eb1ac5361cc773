"""The process group for `torch.distributed.init_process_group("ring")`."""

from __future__ import annotations

import dataclasses
import multiprocessing.util
import sys
import types
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeGuard

import torch
import torch.distributed as dist

from cyxtrain.config import RingOptions
from cyxtrain.environment import accelerator, torch_compat
from cyxtrain.errors import ConfigError, CyxtrainError
from cyxtrain.ring.gradient_buffer import SharedGradientBuffer
from cyxtrain.ring.group import Group
from cyxtrain.ring.monitoring.group_registry import WORLD_GROUPS, GroupRegistry
from cyxtrain.ring.process_group import RingOperations
from cyxtrain.ring.schedules.summation import RowSum
from cyxtrain.ring.work import DoneWork, KeptDoneWork, KeptPostedWork, MessageWork, PostedWork

# To drop PyTorch before 2.14, delete this branch and legacy_backend.py.
if torch_compat.BACKENDS_HAVE_A_CONSTRUCTOR:
    from cyxtrain.ring.registered_backend import RegisteredGroup as PyTorchGroup
else:
    from cyxtrain.ring.legacy_backend import NamedGroup as PyTorchGroup  # type: ignore[assignment]

DEFAULT_TIMEOUT = timedelta(minutes=30)


class RingProcessGroup(RingOperations, PyTorchGroup):
    """A torch.distributed process group whose ranks communicate directly, by its `group`, which can be replaced.

    Tensors of an accelerator are copied through pinned host memory. All ranks share the `store`, with its own keys for
    this group. `timeout` applies to every collective, and to joining unless `join_timeout` is set. Frames of another
    `generation` are refused. `global_ranks` are the ranks in the world, which errors name; None: the same. `registry`
    has the other groups of the same world.

    Raises RendezvousError if the ranks did not find each other.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        timeout: timedelta = DEFAULT_TIMEOUT,
        *,
        join_timeout: timedelta | None = None,
        generation: int = 0,
        global_ranks: Sequence[int] | None = None,
        options: RingOptions | None = None,
        registry: GroupRegistry | None = None,
    ) -> None:
        PyTorchGroup.__init__(self, store, rank, world_size)
        self._store = store
        self._hold(
            Group.join(
                store, rank, world_size, timeout, join_timeout or timeout, generation, global_ranks, options, registry
            )
        )

    def _hold(self, group: Group) -> None:
        self.group = group
        self._group = group
        # Finalize, unlike atexit, also runs at the end of multiprocessing's children.
        self._at_exit = multiprocessing.util.Finalize(None, _leave, (weakref.ref(group),), exitpriority=1)
        self.register_for(_devices(), group)

    def replace_group(self, group: Group) -> None:
        """Continue over a `group` of a later generation (`Group.next_generation`); PyTorch and users keep this object.

        PyTorch then sees the ranks and the size of the new group, and the old one is left. Gradient buffers, pending
        messages and other PyTorch groups made from the old one keep it, and raise its error. Destroy those groups
        first: each new group asks them whether a rank was lost. PyTorch makes new groups at its store, which may have
        ended with rank 0. A device mesh, a DTensor and a PyTorch wrapper keep the ranks that they were made with: make
        them again.

        Raises:
            ConfigError: The group is not of a later generation, or this object is a PyTorch group other than the
                default one; nothing has changed.
            CyxtrainError: A collective runs; nothing has changed.
        """
        old = self._group
        if group.directory.generation <= old.directory.generation:
            raise ConfigError(
                f"a group of generation {group.directory.generation} cannot follow one of generation "
                f"{old.directory.generation}: make it with next_generation of the group that it replaces."
            )
        if self is not dist.group.WORLD and self in torch_compat.process_groups():
            raise ConfigError("only the default group can be replaced: make other groups again, with new_group.")
        with old.engine.paused():
            self._at_exit.cancel()
            self._hold(group)
            torch_compat.renumber_ranks(self, group.world_size)
        old.engine.leave()

    def get_group_store(self) -> dist.Store:
        """Return the store that the group was made with."""
        return self._store

    def shutdown(self) -> None:
        """Leave the group with a goodbye. Idempotent."""
        self._at_exit.cancel()
        super().shutdown()
        # A reference to this group must not keep the port of the store open.
        self._store = dist.HashStore()


def is_ring(group: Any) -> TypeGuard[RingProcessGroup]:
    """Return whether a PyTorch group runs over the ring, which notices ranks that die."""
    return isinstance(group, RingProcessGroup)


def failure_of(group: Any) -> CyxtrainError | None:
    """Return the error that ended a group; None if it has not failed, or its backend is not the ring."""
    return group.group.failure.error if is_ring(group) else None


def raised_failure_of(group: Any) -> CyxtrainError | None:
    """Return the error that ended a group, once this rank's program has seen it; otherwise None."""
    return failure_of(group) if is_ring(group) and group.group.failure.is_raised else None


def fail(group: Any, reason: str | CyxtrainError) -> None:
    """End a group because of an error of this rank, and tell all ranks, if the backend can."""
    if is_ring(group):
        group.fail(reason)


def members_of(group: Any) -> tuple[int, ...]:
    """Return the launcher's number of each rank of a group, which errors name."""
    if not is_ring(group):
        return tuple(range(dist.get_world_size()))
    return group.group.directory.global_ranks


def transport_of(group: Any) -> str:
    """Return how a group's collectives reach other ranks; "" if its backend is not the ring."""
    return group.transport if is_ring(group) else ""


def gradient_buffers_of(
    group: Any, kinds: Sequence[tuple[int, torch.dtype]], row_sum: RowSum | None = None
) -> Sequence[SharedGradientBuffer | None]:
    """Return memory that all ranks share for these numbers of elements, None where they cannot. All ranks call it."""
    if not is_ring(group):
        return [None] * len(kinds)
    return group.make_gradient_buffers(kinds, row_sum)


def register() -> None:
    """Make "ring" a backend of torch.distributed; opens no socket and starts no thread."""
    works = (DoneWork, KeptDoneWork, MessageWork, PostedWork, KeptPostedWork)
    for cls in (RingProcessGroup, RingOperations, PyTorchGroup, SharedGradientBuffer, *works):
        _skip_dynamo(cls)
    if "ring" not in dist.Backend.backend_list:
        dist.Backend.register_backend("ring", _create, extended_api=True, devices=_devices())


def _skip_dynamo(cls: type) -> None:
    """Keep torch.compile away from a class's methods, without importing the compiler, which takes seconds."""
    for name, member in list(vars(cls).items()):
        is_property = isinstance(member, property)
        function = member.fget if is_property else member
        if not isinstance(function, types.FunctionType) or torch_compat.skip_compiling(function):
            continue
        disabled: Any = torch.compiler.disable(function)
        if is_property:
            disabled = property(disabled)
        setattr(cls, name, disabled)


def _devices() -> list[str]:
    """Return the device types whose tensors the ring carries."""
    visible = accelerator.visible()
    return ["cpu"] if visible is None else ["cpu", visible.type]


def _create(options: Any, ready: Any) -> RingProcessGroup:
    """Make the group that PyTorch asks for, or take the one passed as `pg_options`."""
    if isinstance(ready, RingProcessGroup):
        return ready
    settings = dataclasses.replace(RingOptions.from_environment(), group_name=options.group_id)
    # PyTorch gives no ranks for the group of the whole world.
    global_ranks = options.global_ranks_in_group or None
    return RingProcessGroup(
        options.store,
        options.group_rank,
        options.group_size,
        options.timeout,
        global_ranks=global_ranks,
        options=settings,
        registry=WORLD_GROUPS,
    )


def _leave(group: weakref.ref[Group]) -> None:
    alive = group()
    if alive is None:
        return
    error = getattr(sys, "last_value", None)
    is_interactive = "ps1" in vars(sys)
    # The program ends because of this error; at a prompt it may be an old one.
    if error is not None and not is_interactive:
        alive.engine.fail(f"{type(error).__name__}: {error}")
    alive.engine.leave()
