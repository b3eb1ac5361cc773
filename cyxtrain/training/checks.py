"""What is refused before training: everything that would go wrong later, or silently."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from cyxtrain.data.batches import Batch, Placement
from cyxtrain.data.source import ArraySource
from cyxtrain.errors import ConfigError
from cyxtrain.parallel.reducer import trained_parameters
from cyxtrain.training.loss import Loss
from cyxtrain.training.step import call_model

_PROBED_ROWS = 2


def check_model(model: nn.Module) -> None:
    """Refuses models that cannot be trained over ranks.

    Raises:
        ConfigError: Sparse gradients, lazy modules that have not run, or nothing to train.
    """
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise ConfigError(
                f"{name or 'the model'} makes sparse gradients, which cannot be averaged over ranks: build it with "
                "sparse=False."
            )
    if not trained_parameters(model):
        raise ConfigError("the model has no parameters to train: none has requires_grad=True.")


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Refuses optimizers that call the model several times per step.

    Raises:
        ConfigError: LBFGS.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError("LBFGS evaluates the loss several times per step, which fit does not do: use Adam or SGD.")


def probe(model: nn.Module, source: ArraySource, placement: Placement, loss: Loss) -> None:
    """Runs the model on two rows, without gradients, to find what does not fit before anything has changed.

    Every rank takes the same rows, so all come to the same verdict. Modes and random generators stay as they are.

    Args:
        model: Runs in evaluation mode.
        source: Its first rows are taken.
        placement: Of batches.
        loss: Learns here whether it returns (sum, weight).

    Raises:
        ConfigError: The model cannot take X, the loss cannot take its output, or their shapes do not fit.
    """
    if loss.function is None:
        return  # such a model may compute its loss in training mode only
    batch = Batch(0, *placement.place(*source.slice(0, _PROBED_ROWS)), joined_rows=_PROBED_ROWS)
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        with torch.no_grad(), torch.random.fork_rng([placement.device] if placement.device.type == "cuda" else []):
            output = _call("the model cannot take X", call_model, model, batch, loss)
            _check_shapes(output, batch.targets, loss)
            loss.look_at_result(_call("the loss cannot take the model's output and y", loss.function, output, batch.targets))
    finally:
        for module, mode in modes:
            module.training = mode


def _call(what: str, function: Any, *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except ConfigError:
        raise
    except Exception as error:
        shapes = ", ".join(f"{list(value.shape)}" for value in arguments if isinstance(value, Tensor))
        batch = next((value for value in arguments if isinstance(value, Batch)), None)
        if batch is not None:
            shapes = f"{list(batch.inputs.shape)}"
        raise ConfigError(f"{what}, tried on shapes {shapes}: {type(error).__name__}: {error}") from error


def _check_shapes(output: Any, target: Tensor | None, loss: Loss) -> None:
    """Refuses shapes that PyTorch would stretch into a table of every row against every other."""
    if not isinstance(output, Tensor) or target is None or output.shape == target.shape:
        return
    longer, shorter = (output, target) if output.dim() > target.dim() else (target, output)
    hazard = longer.dim() == shorter.dim() + 1 and longer.shape[-1] == 1 and longer.shape[:-1] == shorter.shape
    classes = loss.is_known and not loss.is_elementwise
    if loss.is_elementwise or (hazard and not classes):
        shapes = [f"({', '.join(['n', *map(str, tensor.shape[1:])])})" for tensor in (output, target)]
        raise ConfigError(
            f"the model's output has shape {shapes[0]} and y has {shapes[1]}: the loss would compare every row with "
            "every other. Reshape y (y.reshape(-1, 1)), or let the model return one number per row (squeeze(-1))."
        )
