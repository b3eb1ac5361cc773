"""Optimizers by name, by a factory or as objects, and PyTorch's fused kernels."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from cyxtrain.config.settings import unknown_name
from cyxtrain.data.batches.structure import map_tree
from cyxtrain.environment import torch_compat
from cyxtrain.errors import ConfigError, brief, shortened
from cyxtrain.parallel.sparse_gradients import makes_sparse_gradients

ONLY = "optimizer"
"""The name of an optimizer that is the only one of its trainer."""

OptimizerLike = torch.optim.Optimizer | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | str

# with Keras's learning rates; with PyTorch's if Keras has no such optimizer, or (Adadelta) none that trains
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": partial(torch.optim.Adam, lr=1e-3),
    "adamw": partial(torch.optim.AdamW, lr=1e-3),
    "sgd": partial(torch.optim.SGD, lr=1e-2),
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-3),
    "adagrad": partial(torch.optim.Adagrad, lr=1e-2),
    "adadelta": torch.optim.Adadelta,
    "adafactor": partial(torch.optim.Adafactor, lr=1e-3),
    "adamax": partial(torch.optim.Adamax, lr=1e-3),
    "asgd": torch.optim.ASGD,
    "lbfgs": torch.optim.LBFGS,
    "nadam": partial(torch.optim.NAdam, lr=1e-3),
    "radam": torch.optim.RAdam,
    "rprop": torch.optim.Rprop,
    "sparseadam": torch.optim.SparseAdam,
}


def parameters_for(name: str, model: nn.Module) -> Any:
    """Return a model's parameters for an optimizer by name.

    For AdamW in two groups: norms and biases have no weight decay, as in BERT.
    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization (2019).
    """
    if name.lower() == "sparseadam":
        _require_sparse(model)
    exempt_ids = _norms_and_biases(model)
    if name.lower() != "adamw" or not exempt_ids:
        return model.parameters()
    decayed = [parameter for parameter in model.parameters() if id(parameter) not in exempt_ids]
    exempt = [parameter for parameter in model.parameters() if id(parameter) in exempt_ids]
    exempt_group = {"params": exempt, "weight_decay": 0.0}
    if not decayed:
        return [exempt_group]
    return [{"params": decayed}, exempt_group]


def _require_sparse(model: nn.Module) -> None:
    sparse = makes_sparse_gradients(model)
    dense = [name for name, each in model.named_parameters() if each.requires_grad and name not in sparse]
    if dense:
        raise ConfigError(
            f"'sparseadam' takes sparse gradients, as of nn.Embedding(sparse=True), and {shortened(dense)} have dense "
            "ones: use 'adam' without sparse=True, or 'sgd' or 'adagrad', which take both."
        )


def spares_norms_and_biases(optimizer: torch.optim.Optimizer, model: nn.Module) -> bool:
    """Return whether an optimizer decays a model's weights, except norms and biases."""
    decays = {bool(group.get("weight_decay")) for group in optimizer.param_groups}
    exempt = [group for group in optimizer.param_groups if not group.get("weight_decay")]
    exempt_ids = {id(parameter) for group in exempt for parameter in group["params"]}
    return len(decays) == 2 and exempt_ids == _norms_and_biases(model)


def _norms_and_biases(model: nn.Module) -> set[int]:
    """Return the ids of biases and of the parameters of norms, by name, so that custom classes count."""
    found = set()
    for module in model.modules():
        is_norm = "norm" in type(module).__name__.lower()
        for name, parameter in module.named_parameters(recurse=False):
            if is_norm or "bias" in name:
                found.add(id(parameter))
    return found


def make_optimizer(optimizer: OptimizerLike, model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer of the model's parameters: as given, made by a function, or by name."""
    if isinstance(optimizer, str) and optimizer.lower() not in OPTIMIZERS:
        raise unknown_name("cyxtrain", optimizer, list(OPTIMIZERS), "optimizer")
    if isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    if isinstance(optimizer, nn.Module):
        raise ConfigError(
            f"optimizer must be a torch.optim optimizer, got the module {type(optimizer).__name__}: the order is "
            "DistributedTrainer(model, loss_fn, optimizer)."
        )
    if next(model.parameters(), None) is None:  # such a model evaluates and predicts; `fit` refuses it
        return torch.optim.SGD([{"params": []}], lr=0.0)
    if isinstance(optimizer, str):
        return OPTIMIZERS[optimizer.lower()](parameters_for(optimizer, model))
    made: Any = optimizer(model.parameters()) if callable(optimizer) else None
    if not isinstance(made, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer must be a torch.optim optimizer, a function that makes one of the parameters, or a name, "
            f"got {brief(optimizer)}."
        )
    return made


def make_optimizers(
    optimizer: OptimizerLike, optimizers: Mapping[str, torch.optim.Optimizer] | None, model: nn.Module
) -> dict[str, torch.optim.Optimizer]:
    """Return the optimizers of a trainer by name: one, or several with different parameters."""
    if optimizers is None:
        return {ONLY: make_optimizer(optimizer, model)}
    if optimizer != "adam":  # this is the default: then only `optimizers` was given
        raise ConfigError("optimizer and optimizers are given: put all of them into optimizers={...}, by name.")
    given = dict(optimizers) if isinstance(optimizers, Mapping) else {}
    if not given or not all(isinstance(value, torch.optim.Optimizer) for value in given.values()):
        raise ConfigError(
            "optimizers must be a dictionary of torch.optim optimizers by name, as in optimizers={'g': "
            f"torch.optim.Adam(model.generator.parameters()), 'd': ...}}, got {brief(optimizers)}."
        )
    return {str(name): value for name, value in given.items()}


def described_name(name: str, what: str = "optimizer") -> str:
    """Return an optimizer for messages, such as "optimizer 'g'", or `what` else belongs to it."""
    return what if name == ONLY else f"{what} {name!r}"


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return the parameters of all groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether each step needs a function that evaluates the loss, as LBFGS does."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


# state that PyTorch's optimizers keep on the CPU unless fused or capturable
_ON_THE_CPU = ("step", "mu_product")


def place_state(*optimizers: torch.optim.Optimizer) -> None:
    """Move the state of optimizers to the devices of their parameters, which `model.to(device)` does not."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            _place_group_state(optimizer, group)


def _place_group_state(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> None:
    on_cpu = () if group.get("fused") or group.get("capturable") else _ON_THE_CPU
    for parameter in group["params"]:
        to_parameter = partial(torch.Tensor.to, device=parameter.device)
        state = optimizer.state.get(parameter, {})
        for name, value in state.items():
            stays = name in on_cpu and isinstance(value, torch.Tensor) and value.is_cpu
            if not stays:
                state[name] = map_tree(to_parameter, value)


_FUSABLE = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
# in 16 bits PyTorch's fused SGD on CPUs (seen in 2.13) loses nine tenths of a step
_EXACT_ON_CPUS = (torch.float32, torch.float64)
# settings of a group by which users choose an implementation, and their defaults
_UNDECIDED = {"fused": None, "foreach": None, "differentiable": False, "capturable": False}


def can_fuse(optimizer: torch.optim.Optimizer, wanted: bool | str, sparse: Iterable[str] = ()) -> bool:
    """Return whether to use PyTorch's fused kernel, as `wanted`; the optimizer's settings take precedence."""
    name = next(iter(sparse), None)
    reason = f"{name} makes sparse gradients" if name else _reason_against(optimizer)
    if wanted is True and reason:
        raise ConfigError(f"fused_optimizer=True: {reason}. Use 'auto', which fuses what it can.")
    return bool(wanted) and reason is None


def _reason_against(optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]] | None = None) -> str | None:
    """Return why an optimizer, or some of its groups, cannot be fused; None if they can."""
    if type(optimizer) not in _FUSABLE:
        return f"PyTorch has no fused {type(optimizer).__name__}"
    if groups is None:
        groups = optimizer.param_groups
    for group in groups:
        reason = _reason_against_group(type(optimizer), group)
        if reason is not None:
            return reason
    return None


def _reason_against_group(kind: type[torch.optim.Optimizer], group: Mapping[str, Any]) -> str | None:
    decided = [f"{key}={group[key]}" for key, default in _UNDECIDED.items() if group.get(key, default) != default]
    if decided:
        return f"the {kind.__name__} was built with {', '.join(decided)}"
    if isinstance(group["lr"], torch.Tensor):
        return f"the {kind.__name__} has a tensor as its learning rate"
    for parameter in group["params"]:
        device_type = parameter.device.type
        if not parameter.is_floating_point() or not torch_compat.has_fused_kernels(device_type):
            return f"the {kind.__name__} has a parameter of {parameter.dtype} on {parameter.device}"
        if kind is torch.optim.Adagrad and device_type not in ("cpu", "cuda"):
            return f"PyTorch has no fused {kind.__name__} on {device_type}"
        if device_type == "cpu" and parameter.dtype not in _EXACT_ON_CPUS:
            return (
                f"the {kind.__name__} has a parameter of {parameter.dtype}, and on CPUs PyTorch's kernel is wrong there"
            )
    return None


@contextlib.contextmanager
def fused(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Use the fused kernel of an optimizer that `can_fuse` within the context."""
    fuse(optimizer)
    try:
        yield
    finally:
        # None leaves the choice of an implementation to PyTorch again.
        _set_fused(optimizer, [group for group in optimizer.param_groups if group["fused"] is True], None)


def fuse(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer step by the fused kernel; groups that callbacks have added too, if they can."""
    _match_layout(optimizer)
    new = [group for group in optimizer.param_groups if group["fused"] is None]
    if _reason_against(optimizer, new) is None:
        _set_fused(optimizer, new, True)


def _set_fused(optimizer: torch.optim.Optimizer, groups: Sequence[dict[str, Any]], value: bool | None) -> None:
    for group in groups:
        group["fused"] = value
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if "step" in state:  # the fused kernel needs it on the parameter's device, the others on the CPU
                device = parameter.device if value else torch.device("cpu")
                state["step"] = torch.as_tensor(state["step"], dtype=torch.float32, device=device)


def _match_layout(optimizer: torch.optim.Optimizer) -> None:
    """Give the optimizer's state the memory layout of its parameters.

    PyTorch's fused CPU kernels read both in memory order and do not check: after a change to channels_last, or with a
    saved state of another layout, their steps would be wrong.
    """
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            same_shape = isinstance(value, torch.Tensor) and value.shape == parameter.shape
            if same_shape and value.stride() != parameter.stride():
                state[name] = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)
