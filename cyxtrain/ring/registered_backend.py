"""A process group with a registered backend, for PyTorch 2.14 and later."""

# Written for PyTorch 2.14; mypy may read the types of an older one.
# mypy: disable-error-code="override,assignment,call-arg,arg-type,misc"

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch.distributed as dist

from cyxtrain.environment import torch_compat
from cyxtrain.ring.group import Group
from cyxtrain.ring.process_group import RingOperations


class RingBackend(RingOperations, torch_compat.Backend):
    """The ring as a subclass of PyTorch's Backend: what C++ finds in a process group for a device."""

    def __init__(self, group: Group) -> None:
        torch_compat.Backend.__init__(self, group.rank, group.world_size)
        self.follow(group)

    def follow(self, group: Group) -> None:
        """Take another group from now on."""
        # The process group owns it, and Python cannot collect a cycle through C++.
        self._group = weakref.proxy(group)

    # PyTorch recurses endlessly if a subclass does not define these (seen in 2.14 and 2.15).
    supports_splitting = supports_shrinking = supports_reconfigure = supports_window = property(lambda _: False)
    _supports_time_estimate = property(lambda _: False)


class RegisteredGroup(dist.ProcessGroup):
    """A PyTorch process group with a `RingBackend`; the abstract part of `RingProcessGroup`.

    Python's calls reach the ring directly. By way of C++ they would return PyTorch's copy of a work, whose
    `is_completed()` stays False and which does not know the source of a message (seen in 2.14 and 2.15).
    """

    _group: Group
    _backend: RingBackend | None = None

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        # Not the store itself: C++ would keep it, and with it the port of rank 0, as long as this group is referenced.
        # `get_group_store` returns the store until the group is left.
        del store
        super().__init__(dist.HashStore(), rank, world_size)

    def register_for(self, devices: Sequence[str], group: Group) -> None:
        """Register the backend for device types; with a later group, the backend only follows it."""
        if self._backend is None:
            self._backend = RingBackend(group)
            torch_compat.register_backend(self, self._backend, devices)
        self._backend.follow(group)
