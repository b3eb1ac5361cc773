"""Checks before training: what would go wrong later, or silently; and what ranks must have alike, in words."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cyxtrain.checkpoint.format.names import plain_parameters
from cyxtrain.checkpoint.format.optimizer_state import optimizer_state_by_name
from cyxtrain.config import DDPConfig, DistributedTrainingConfig
from cyxtrain.config.settings import require, unknown_name
from cyxtrain.data.batches.collate import TARGET_NAMES
from cyxtrain.data.batches.rows import sampled_hash
from cyxtrain.data.batches.structure import Tree, parts_by_name
from cyxtrain.data.sources.source import Source
from cyxtrain.errors import ConfigError, brief, shortened
from cyxtrain.metrics.loss import Loss
from cyxtrain.optim.optimizers import ONLY, described_name, needs_closure, parameters_of
from cyxtrain.parallel.reducer import trained_parameters
from cyxtrain.parallel.sparse_gradients import makes_sparse_gradients
from cyxtrain.tensors.layouts import is_plain, kind_of, parts_of
from cyxtrain.training.trained import params_without_optimizer

_OWN_FIELDS = ("verbose", "checkpoint_dir", "profile")
"""What ranks may set differently: only one of them shows and writes."""
_SAMPLED_ELEMENTS = 64
_TAKE_SPARSE_GRADIENTS = (torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam)


def check_trained(
    trained: nn.Module, optimizers: Mapping[str, torch.optim.Optimizer], config: DistributedTrainingConfig
) -> None:
    """Refuse a model without trainable parameters, and optimizers or a precision that it cannot have."""
    if not trained_parameters(trained):
        raise ConfigError("the model has no parameters to train: none has requires_grad=True.")
    clips = {name: getattr(config, name) for name in ("clip_norm", "clip_value", "clip_adaptive")}
    clips = {name: limits for name, limits in clips.items() if limits is not None}
    for optimizer in optimizers.values():
        _check_optimizer(optimizer, trained)
        # It evaluates the loss several times per step, between which these would change it.
        excluded = [*clips, *(["precision='fp16'"] if config.precision == "fp16" else [])]
        if excluded and needs_closure(optimizer):
            raise ConfigError(
                f"{type(optimizer).__name__} evaluates the loss several times per step, which {excluded[0]} would "
                f"change between two evaluations: leave {excluded[0]} out, or use Adam or SGD."
            )
    _check_owners(trained, optimizers)
    for name, limits in clips.items():
        unknown = [*(limits.keys() - optimizers.keys())] if isinstance(limits, Mapping) else []
        if unknown:
            raise unknown_name(f"{name}={dict(limits)!r}: the trainer", str(unknown[0]), [*optimizers], "optimizer")
    halves = [name for name, each in trained_parameters(trained) if each.dtype in (torch.float16, torch.bfloat16)]
    if config.precision == "fp16" and halves:  # their gradients could not be unscaled
        raise ConfigError(
            f"precision='fp16' computes in 16 bits and keeps parameters in 32, and {shortened(halves)} are of 16: "
            "give the model as float32."
        )


def _check_owners(trained: nn.Module, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
    """Refuse a parameter in two optimizers; if there are several, also one that none trains."""
    owners: dict[int, str] = {}
    names = {id(parameter): name for name, parameter in plain_parameters(trained)}
    for own, optimizer in optimizers.items():
        for parameter in {id(each) for each in parameters_of(optimizer)}:
            if owners.setdefault(parameter, own) != own:
                raise ConfigError(
                    f"{names.get(parameter, 'a parameter')} is in the optimizers {owners[parameter]!r} and {own!r}: "
                    "build each with its own parameters."
                )
    left = params_without_optimizer(trained, optimizers.values())
    if left and optimizers.keys() != {ONLY}:
        raise ConfigError(
            f"none of the optimizers {', '.join(map(repr, optimizers))} has {shortened(left)}: add the parameters to "
            "one of them, or freeze them with requires_grad_(False)."
        )


def checked_ddp_config(config: DDPConfig | None) -> DDPConfig:
    """Return a valid config of gradients; for None the defaults, with unused parameters allowed."""
    found = DDPConfig(find_unused_parameters=True) if config is None else config
    require(isinstance(found, DDPConfig), f"ddp_config must be a cyxtrain.DDPConfig(...), got {brief(found)}.")
    found.validate()
    return found


def _check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Refuse optimizers that cannot take the model's sparse gradients."""
    named, kind = makes_sparse_gradients(model), type(optimizer)
    refuses = kind.__module__.startswith("torch.optim") and not isinstance(optimizer, _TAKE_SPARSE_GRADIENTS)
    for name, parameter in named.items():
        groups = [group for group in optimizer.param_groups if any(each is parameter for each in group["params"])]
        decays = any(group.get("weight_decay") for group in groups)
        if groups and (refuses or decays):
            what, remedy = (kind.__name__, "SGD or Adagrad") if refuses else ("weight_decay", "no weight_decay for it")
            raise ConfigError(
                f"{name} makes sparse gradients, which PyTorch's {what} does not take: use {remedy}, or build the "
                "embedding with sparse=False."
            )


def check_targets(source: Source, loss: Loss) -> None:
    """Refuse data without the targets that the loss needs."""
    if source.targets is None and loss.function is not None:
        inputs = source.inputs
        if isinstance(inputs, dict) and not source.is_whole:
            raise ConfigError(
                f"y is missing: the batches have {', '.join(inputs)}, and y must be called one of "
                f"{', '.join(TARGET_NAMES)}; or give (x, y)."
            )
        raise ConfigError(
            "y is missing: the loss compares the model's output with it. Only a model that computes its own "
            "loss (loss_fn=None) does without."
        )
    targets = parts_by_name(source.targets)
    missing = [name for name in loss.by_output if name not in targets]
    has = f"the parts {[*targets]!r}" if targets else "one part"
    require(not missing, f"loss_fn has a loss for {missing!r}, and y has {has}: y must have the keys of loss_fn.")
    for name, each in loss.by_output.items():
        _check_target(targets[name], each)
    _check_target(source.targets, loss)


def _check_target(targets: Tree | None, loss: Loss) -> None:
    if loss.is_known and isinstance(targets, (dict, tuple, list)):
        raise ConfigError(
            f"{type(loss.function).__name__} compares one output with one y, and y has {len(targets)} parts: give a "
            "loss_fn of your own, which is called with the model's output and y as they are, or, if the model returns "
            "a dictionary, one loss for each output: loss_fn={...}."
        )
    if not isinstance(targets, Tensor) or not isinstance(loss.function, (nn.CrossEntropyLoss, nn.NLLLoss)):
        return
    name, shape = type(loss.function).__name__, [*targets.shape[1:]]
    if targets.is_floating_point() and not shape:
        dtype = str(targets.dtype).removeprefix("torch.")
        raise ConfigError(
            f"{name} wants class indices of an integer dtype, and y has dtype {dtype}: convert it with y.long(), or "
            "y.astype('int64') in NumPy."
        )
    if shape == [1] and not targets.is_floating_point():
        raise ConfigError(f"{name} wants one class number per row, and y has shape (n, 1): use y.reshape(-1).")


def check_classes(targets: Tree | None, output: Any, loss: Loss) -> None:
    """Refuse class indices for which the model has no output."""
    for part, each in loss.by_output.items():
        own, answer = loss.of_output(part, output, targets)
        check_classes(answer, own, each)
    function = loss.function
    known = isinstance(function, (nn.CrossEntropyLoss, nn.NLLLoss))
    if not known or not isinstance(targets, Tensor) or targets.is_floating_point() or not isinstance(output, Tensor):
        return
    if output.dim() != targets.dim() + 1:
        return
    classes, targets = output.shape[1], targets.to(torch.int64)
    wrong = ((targets < 0) | (targets >= classes)) & (targets != function.ignore_index)
    if bool(wrong.any()):
        row = int(wrong.reshape(len(targets), -1).any(1).nonzero()[0])
        value = int(targets[wrong][0])
        raise ConfigError(
            f"y holds class {value} (row {row}), and the model has outputs for classes 0 to {classes - 1}. Number the "
            "classes from 0, or give the model's last layer more outputs."
        )


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
        state, groups = optimizer_state_by_name(optimizer, model)
        facts[what] = type(optimizer).__name__
        for number, group in enumerate(groups):
            for name, value in group.items():
                # Functions and the like have an address in their text, which differs.
                plain = isinstance(value, (bool, int, float, str, tuple, list, Tensor, type(None)))
                facts[f"{what}'s {name} (group {number})"] = str(value) if plain else type(value).__name__
        for name, values in state.items():
            tensors = [value for value in values.values() if isinstance(value, Tensor)]
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
