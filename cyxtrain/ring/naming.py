"""The names that PyTorch gives to a group, and asks a group written in Python for."""

# PyTorch's own annotations of what is overridden here differ from version to version.
# mypy: disable-error-code="override,assignment"

from __future__ import annotations

import torch.distributed as dist


class NamedGroup(dist.ProcessGroup):
    """A process group that keeps its name; the abstract part of `RingProcessGroup`."""

    _name = "ring"
    _description = "ring"

    def setGroupName(self, name: str) -> None:  # noqa: N802 - PyTorch's name
        """Keeps the name that PyTorch gives."""
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802 - PyTorch's name
        """Returns the name that PyTorch gave."""
        return self._name

    def setGroupDesc(self, description: str) -> None:  # noqa: N802 - PyTorch's name
        """Keeps the description that PyTorch gives."""
        self._description = description

    def getGroupDesc(self) -> str:  # noqa: N802 - PyTorch's name
        """Returns the description that PyTorch gave."""
        return self._description

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
    group_name, group_desc = property(getGroupName), property(getGroupDesc)
