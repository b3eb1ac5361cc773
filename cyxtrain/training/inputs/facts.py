"""What must be the same on all ranks before a fit, in words that an error can quote."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cyxtrain.checkpoint.format.names import plain_parameters
from cyxtrain.checkpoint.format.optimizer_state import groups_by_name
from cyxtrain.config import DistributedTrainingConfig
from cyxtrain.data.batches.rows import sampled_hash
from cyxtrain.metrics.loss import Loss
from cyxtrain.optim.optimizers import described_name
from cyxtrain.tensors.layouts import is_plain, kind_of, parts_of

_OWN_FIELDS = ("verbose", "checkpoint_dir", "profile")
"""What ranks may set differently: only one of them shows and writes."""
_SAMPLED_ELEMENTS = 64


def config_facts(config: DistributedTrainingConfig) -> dict[str, Any]:
    """Return the settings one by one."""
    return {
        f"the setting {name}": value for name, value in dataclasses.asdict(config).items() if name not in _OWN_FIELDS
    }


def model_facts(trained: nn.Module, loss: Loss) -> dict[str, Any]:
    """Return the kinds of parameters, buffers and loss; a hash only of the loss's constants, which stay each rank's."""
    facts: dict[str, Any] = {"the loss": loss.describe(), "_loss": loss.warning, "accuracy": str(loss.accuracy)}
    for name, parameter in trained.named_parameters():
        facts[f"the parameter {name}"] = _kind(parameter) + ("" if parameter.requires_grad else ", frozen")
    for name, buffer in trained.named_buffers():
        facts[f"the buffer {name}"] = _kind(buffer)
    known = {id(buffer) for buffer in trained.buffers()}
    for name, module in loss.named_modules("loss_fn").items():
        constants = [(own, buffer) for own, buffer in module.named_buffers(name) if id(buffer) not in known]
        facts |= {f"{own}: hash of its values": _hash([buffer]) for own, buffer in constants}
    return facts


def optimizer_facts(optimizers: Mapping[str, torch.optim.Optimizer], model: nn.Module) -> dict[str, Any]:
    """Return the kind of each optimizer, the settings of its groups, and a hash of samples of its state."""
    facts: dict[str, Any] = {"the optimizers": [*optimizers]}
    for own, optimizer in optimizers.items():
        what = f"the {described_name(own)}"
        groups = groups_by_name(optimizer, model)
        facts[what] = type(optimizer).__name__
        for number, group in enumerate(groups):
            for name, value in group.items():
                # Functions and the like have an address in their text, which differs.
                plain = isinstance(value, (bool, int, float, str, tuple, list, Tensor, type(None)))
                facts[f"{what}'s {name} (group {number})"] = str(value) if plain else type(value).__name__
        for name, parameter in plain_parameters(model):
            if parameter not in optimizer.state:
                continue
            tensors = [value for value in optimizer.state[parameter].values() if isinstance(value, Tensor)]
            facts[f"{what}'s state of {name}: hash of its values"] = _hash(tensors)
    return facts


def trained_facts(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, Any]:
    """Return what callbacks may change: a hash of which parameters are trained, and the sizes of groups."""
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return {
        "which parameters are trained": f"{len(names):,} ({hashlib.sha256(' '.join(names).encode()).hexdigest()[:8]})",
        "how many parameters each group of the optimizer has": [
            len(group["params"]) for optimizer in optimizers for group in optimizer.param_groups
        ],
    }


def value_facts(model: nn.Module) -> dict[str, Any]:
    """Return a hash of samples of each parameter and buffer."""
    named = (*model.named_parameters(), *model.named_buffers())
    return {f"the model's {name}: hash of its values": _hash([tensor]) for name, tensor in named}


def _kind(tensor: Tensor) -> str:
    kind = "" if is_plain(tensor) else f"{kind_of(tensor)} "
    return f"{kind}{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _hash(tensors: Iterable[Tensor]) -> str:
    flat = (part.reshape(-1) for tensor in tensors for part in parts_of(tensor) or ())
    return " ".join(sampled_hash(values, _SAMPLED_ELEMENTS) for values in flat if len(values))
