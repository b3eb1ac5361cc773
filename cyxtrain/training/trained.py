"""What is trained: the model, and a loss with its own parameters or buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from cyxtrain.checkpoint.format.names import plain_name, plain_state
from cyxtrain.checkpoint.weights import fitting_state, load_model_state
from cyxtrain.environment import torch_compat
from cyxtrain.errors import CheckpointError, shortened, warn_together
from cyxtrain.metrics.loss import Loss
from cyxtrain.optim.optimizers import parameters_of


class Trained(nn.Module):
    """A model and its loss as one module, called like the model, or like a user's own step.

    The model's parts keep their names; the names of the loss's parts begin with `loss_fn.`, or with `loss_fn_.` if the
    model has a part called `loss_fn`.
    """

    def __init__(
        self, model: nn.Module, losses: Mapping[str, nn.Module], step: Callable[[Any], Any] | None = None
    ) -> None:
        super().__init__()
        self.model = model
        self._step = step
        self.losses = dict(losses)
        self._registered = nn.ModuleList(losses.values())  # train() and to() visit children, not named_modules

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Call the model, or the step."""
        return (self._step or self.model)(*inputs, **named)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield (name, module) of the parts; all other methods that yield names use it."""
        if memo is None:
            memo = set()
        yield from self.model.named_modules(memo, prefix, remove_duplicate)
        dot = "." if prefix else ""
        for name, module in self.losses.items():
            yield from module.named_modules(memo, f"{prefix}{dot}{name}", remove_duplicate)


def trained_with(model: nn.Module, loss: Loss | None, step: Callable[[Any], Any] | None = None) -> nn.Module:
    """Return the model and what is trained with it, as one module; a call runs `step`, if given."""
    losses: dict[str, nn.Module] = {}
    if loss is not None:
        prefix = "loss_fn_" if "loss_fn" in dict(model.named_children()) else "loss_fn"
        of_model = {id(part) for part in model.modules()}  # their state is in the model's
        named = loss.named_modules(prefix)
        losses = {name: each for name, each in named.items() if id(each) not in of_model and _has_state(each)}
    if not losses and step is None:
        return model
    return Trained(model, losses, step)


def _has_state(module: nn.Module) -> bool:
    if isinstance(module, torch_compat.LossModule) and type(module).__module__.startswith("torch."):
        return False  # their buffers are arguments, such as class weights
    return bool(module.state_dict()) or next(module.buffers(), None) is not None


def params_without_optimizer(trained: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> list[str]:
    """Return the names of parameters that require gradients and are in no group of the optimizers."""
    known = {id(parameter) for optimizer in optimizers for parameter in parameters_of(optimizer)}
    named = trained.named_parameters()
    return [plain_name(name) for name, each in named if each.requires_grad and id(each) not in known]


def warn_of_params_without_optimizer(
    trained: nn.Module, optimizers: Iterable[torch.optim.Optimizer], warned: set[str]
) -> None:
    """Warn about trained parameters without an optimizer, except those in `warned`; add their names to it."""
    names = [name for name in params_without_optimizer(trained, optimizers) if name not in warned]
    warned.update(names)
    if not names:
        return
    require = "require" if len(names) > 1 else "requires"
    everything = "model.parameters()"
    if isinstance(trained, Trained):
        everything = "[*model.parameters(), *loss_fn.parameters()]"
    warn_together(
        f"the optimizer does not have {shortened(names)}, which {require} gradients: fit "
        f"does not train them. Build it from {everything} or give its name, such as 'adam'; add them with "
        "optimizer.add_param_group({'params': [...]}); or freeze them with requires_grad_(False)."
    )


def extra_state(trained: nn.Module) -> dict[str, Any]:
    """Return what a checkpoint keeps beyond the model's `state_dict`: losses, and buffers without one."""
    states = {name: plain_state(module) for name, module in _losses_of(trained).items()}
    known = set(plain_state(trained.model if isinstance(trained, Trained) else trained))
    for name, state in states.items():
        known.update(f"{name}.{own}" for own in state)
    buffers = {}
    for name, buffer in trained.named_buffers():
        if plain_name(name) not in known and _can_be_kept(buffer):
            buffers[plain_name(name)] = buffer
    return {"losses": states, "buffers": buffers}


def _losses_of(trained: nn.Module) -> dict[str, nn.Module]:
    return trained.losses if isinstance(trained, Trained) else {}


def _can_be_kept(buffer: torch.Tensor) -> bool:
    return buffer.layout is torch.strided and not buffer.is_quantized and not buffer.is_meta


def check_extra_state(trained: nn.Module, state: Mapping[str, Any], source: str) -> None:
    """Refuse a state of other losses, names or shapes, before anything has changed."""
    losses = _losses_of(trained)
    given = state.get("losses", {})
    if losses.keys() != given.keys():
        raise CheckpointError(
            f"Cannot load {source}: it has a state of {', '.join(given) or 'no loss'}, and this trainer of "
            f"{', '.join(losses) or 'no loss'}. Give the loss_fn that it was trained with; "
            "cyxtrain.load_weights(model, path) takes the model's weights alone."
        )
    for name, module in losses.items():
        fitting_state(module, given[name], f"the {name} of {source}")


def load_extra_state(trained: nn.Module, state: Mapping[str, Any], source: str) -> None:
    """Load what `extra_state` returned; skip buffers that this model does not have."""
    for name, module in _losses_of(trained).items():
        load_model_state(module, state["losses"][name], f"the {name} of {source}")
    modules = {plain_name(name): module for name, module in trained.named_modules()}
    for name, saved in state.get("buffers", {}).items():
        owner, _, own = name.rpartition(".")
        if owner not in modules:
            continue
        buffers = torch_compat.own_buffers(modules[owner])
        now = buffers.get(own)
        if now is not None and now.shape == saved.shape:
            now.data.copy_(saved)
        elif now is not None:
            # Its size has changed since.
            buffers[own] = saved.to(now.device)
        elif own in buffers:
            # The forward makes it, and has not run yet.
            device = next((each.device for each in trained.parameters()), saved.device)
            buffers[own] = saved.to(device)
