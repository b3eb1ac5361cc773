"""What buffers that differ between ranks become: decided by what writes them, not by their type."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from cyxtrain.environment import torch_compat

MEAN = dist.ReduceOp.AVG
_STATISTICS = ("running_", "moving_", "num_batches_tracked")
_LIBRARIES = ("torch.ao.", "torchao.", "torch.nn.utils.")
_EXTREMES = {"min_val": dist.ReduceOp.MIN, "max_val": dist.ReduceOp.MAX}


def kinds_of_buffers(module: nn.Module) -> dict[int, dist.ReduceOp.RedOpType | None]:
    """Return, by id, how each buffer is reduced over ranks (None: all take rank 0's), if that is known.

    A module's `averaged_buffers` names those that are means over samples. Without it, running statistics are, by their
    names; an observer of a quantisation has seen a minimum and a maximum; spectral norm's vectors and a pruning's mask
    belong to a weight.
    """
    kinds: dict[int, dist.ReduceOp.RedOpType | None] = {}
    for part in module.modules():
        declared = getattr(part, "averaged_buffers", None)
        is_library = type(part).__module__.startswith(_LIBRARIES)
        buffers = torch_compat.own_buffers(part)
        for name, buffer in buffers.items():
            if declared is not None:
                kinds[id(buffer)] = dict.fromkeys(declared, MEAN).get(name)
            elif name.startswith(_STATISTICS):
                kinds[id(buffer)] = MEAN
            elif is_library and "histogram" not in buffers:
                kinds[id(buffer)] = _EXTREMES.get(name)
            elif is_library or f"{name.rpartition('_')[0]}_orig" in torch_compat.own_parameters(part):
                kinds[id(buffer)] = None
    return kinds
