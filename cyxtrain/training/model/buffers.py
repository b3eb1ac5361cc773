"""Copies of buffers, such as running means, to restore them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cyxtrain.environment import torch_compat
from cyxtrain.tensors.fingerprint import fingerprint
from cyxtrain.tensors.layouts import is_plain, parts_of, write


@dataclass
class _Kept:
    module: nn.Module
    name: str
    buffer: Tensor | None
    copy: Tensor
    version: float = -1
    """Of the buffer, when it was copied; where nothing changes it without that."""


class BuffersKept:
    """Copies of a module's buffers, of any kind of tensor."""

    def __init__(self, model: nn.Module) -> None:
        self._kept = [
            _Kept(module, name, buffer, buffer.detach().clone())
            for module in model.modules()
            for name, buffer in module.named_buffers(recurse=False)
        ]

    def keep(self) -> None:
        """Copy the buffers as they are now."""
        kinds: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
        for kept in self._kept:
            before, kept.buffer = kept.buffer, torch_compat.own_buffers(kept.module).get(kept.name)
            now = kept.buffer
            if now is None:
                continue
            if not is_plain(now):
                version = torch_compat.version_of(now)
                if now is not before or version != kept.version:
                    kept.copy, kept.version = now.detach().clone(), version
                continue
            if _form(now) != _form(kept.copy):
                kept.copy = torch.empty_like(now, memory_format=torch.contiguous_format)
            copies, buffers = kinds.setdefault((now.device, now.dtype), ([], []))
            copies.append(kept.copy)
            buffers.append(now)
        # All of them: PyTorch's batch norm, and code that writes to .data, change one without a change of its version.
        for copies, buffers in kinds.values():
            torch_compat.copy_all(copies, buffers)

    def restore(self) -> None:
        """Restore the buffers; unchanged ones are not written."""
        for kept in self._kept:
            if kept.buffer is not None:
                kept.buffer = _restored(kept.buffer, kept.copy)  # changed in place
            setattr(kept.module, kept.name, kept.buffer)  # or replaced


def _form(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, tensor.device, tensor.layout


def _restored(buffer: Tensor, copy: Tensor) -> Tensor:
    """Return a buffer with the values of a copy: itself, written in place, or a new copy if it cannot be written."""
    if buffer.is_cpu and fingerprint(buffer) == fingerprint(copy):
        return buffer
    if parts_of(buffer) is None:
        return copy.clone()
    write(buffer, copy)
    return buffer
