"""A process group in Python for PyTorch up to 2.13, which cannot construct a `Backend` in Python.

No backend is registered in C++, so PyTorch asks the group for names, devices and the backend of a device.
"""

# PyTorch's annotations of the overridden methods differ by version.
# mypy: disable-error-code="override,assignment"

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from cyxtrain.ring.group import Group


class NamedGroup(dist.ProcessGroup):
    """A process group that is its own backend; the abstract part of `RingProcessGroup`."""

    _name = "ring"
    _description = "ring"
    _devices: Sequence[str] = ()
    # PyTorch asks for it if the default group is bound to a device, as NCCL's is.
    supports_splitting = False

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size)  # type: ignore[call-arg]

    def register_for(self, devices: Sequence[str], group: Group) -> None:
        """Keep the types of device that PyTorch may ask for."""
        self._devices = devices

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(name) for name in self._devices]

    def _get_backend(self, device: torch.device) -> NamedGroup:
        return self

    def setGroupName(self, name: str) -> None:  # noqa: N802 - PyTorch's name
        """Keep the name that PyTorch gives."""
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802 - PyTorch's name
        """Return the name that PyTorch gave."""
        return self._name

    def setGroupDesc(self, description: str) -> None:  # noqa: N802 - PyTorch's name
        """Keep the description that PyTorch gives."""
        self._description = description

    def getGroupDesc(self) -> str:  # noqa: N802 - PyTorch's name
        """Return the description that PyTorch gave."""
        return self._description

    # Other names of the same methods, which PyTorch's Python code uses.
    _set_group_name = setGroupName
    _set_group_desc = setGroupDesc
    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)
