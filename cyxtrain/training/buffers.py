"""Buffers, such as running means, as they were before something was tried."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cyxtrain import torch_compat


@dataclass
class _Kept:
    module: nn.Module
    name: str
    buffer: Tensor | None
    copy: Tensor


class BuffersKept:
    """Copies of a module's buffers.

    Args:
        model: Its buffers are kept as they are now.
    """

    def __init__(self, model: nn.Module) -> None:
        self._kept = [
            _Kept(module, name, buffer, buffer.detach().clone())
            for module in model.modules()
            for name, buffer in module.named_buffers(recurse=False)
        ]

    def keep(self) -> None:
        """Keeps them as they are now."""
        kinds: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
        for kept in self._kept:
            kept.buffer = now = torch_compat.own_buffers(kept.module).get(kept.name)
            if now is None:
                continue
            if (now.shape, now.dtype, now.device) != (kept.copy.shape, kept.copy.dtype, kept.copy.device):
                kept.copy = torch.empty_like(now)
            copies, buffers = kinds.setdefault((now.device, now.dtype), ([], []))
            copies.append(kept.copy)
            buffers.append(now)
        # All of them: PyTorch's batch norm, and code that writes to .data, change one without a change of its version.
        for copies, buffers in kinds.values():
            torch_compat.copy_all(copies, buffers)

    def bring_back(self) -> None:
        """Makes them what they were when they were kept."""
        for kept in self._kept:
            # data: one that autograd has saved may be written to.
            if kept.buffer is not None:
                kept.buffer.data.copy_(kept.copy)  # changed in place
            setattr(kept.module, kept.name, kept.buffer)  # or replaced
