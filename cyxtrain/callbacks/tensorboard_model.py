"""What TensorBoard shows of a model besides curves: histograms and images of weights, its graph, a profile of steps."""

from __future__ import annotations

import contextlib
import io
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from cyxtrain.config.settings import require
from cyxtrain.data.rng import generators_kept
from cyxtrain.errors import reason_of, warn

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_LARGEST = 1024
"""Rows and columns of an image; larger weights are cut."""


def write_weights(writer: SummaryWriter, model: nn.Module, step: int, *, images: bool) -> None:
    """Write a histogram of each parameter, and an image of those with rows and columns."""
    for name, parameter in model.named_parameters():
        weights = parameter.detach().float().cpu()
        if not weights.numel() or not weights.isfinite().all():
            continue  # TensorBoard refuses them
        writer.add_histogram(f"weights/{name}", weights, step)
        if images and weights.dim() > 1:
            writer.add_image(f"images/{name}", _image(weights), step, dataformats="HW")


def _image(weights: Tensor) -> Tensor:
    """Return weights as grays from 0 to 1: outputs below, inputs beside each other, with the kernels of each pair."""
    if weights.dim() > 2:
        kernels = weights.flatten(2, -2) if weights.dim() > 3 else weights.unsqueeze(2)
        weights = kernels.permute(0, 2, 1, 3).flatten(2).flatten(0, 1)
    weights = weights[:_LARGEST, :_LARGEST]
    low, high = weights.min(), weights.max()
    return (weights - low) / (high - low).clamp(min=torch.finfo(torch.float32).tiny)


class GraphWriter:
    """Writes the graph of a model once it has been called, from the inputs of that call."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.close = model.register_forward_pre_hook(self._note, with_kwargs=True).remove

    def _note(self, _: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._inputs = arguments, named
        self.close()

    def write(self, writer: SummaryWriter) -> bool:
        """Write the graph; return whether the model had been called. Model and generators stay as they are."""
        if self._inputs is None:
            return False
        (arguments, named), self._inputs = self._inputs, None
        tensors = {name: value for name, value in named.items() if isinstance(value, Tensor)}
        call = _Call(self._model, [*tensors], {**named})
        modes = [(module, module.training) for module in self._model.modules()]
        device = next((each.device for each in self._model.parameters()), torch.device("cpu"))
        try:
            with generators_kept(device), torch.no_grad(), contextlib.redirect_stdout(io.StringIO()):
                writer.add_graph(call, (*tensors.values(), *arguments), use_strict_trace=False)
        except Exception as error:  # a model that PyTorch cannot trace
            warn(f"the model's graph could not be written for TensorBoard: {reason_of(error)}")
        finally:
            for module, mode in modes:
                module.training = mode
        return True


class _Call(nn.Module):
    """A model called with its named tensors by position: PyTorch traces positions only."""

    def __init__(self, model: nn.Module, names: list[str], named: dict[str, Any]) -> None:
        super().__init__()
        self.model = model
        self._names, self._named = names, named

    def forward(self, *values: Any) -> Any:
        count = len(self._names)
        return self.model(*values[count:], **{**self._named, **dict(zip(self._names, values[:count], strict=True))})


def profiler_of(first: int, last: int, folder: str) -> torch.profiler.profile:
    """Return a started profiler of steps `first` to `last`, from 1, which TensorBoard's plugin shows."""

    def action(step: int) -> torch.profiler.ProfilerAction:
        if step == last - 1:
            return torch.profiler.ProfilerAction.RECORD_AND_SAVE
        return torch.profiler.ProfilerAction.RECORD if first - 1 <= step < last else torch.profiler.ProfilerAction.NONE

    handler = torch.profiler.tensorboard_trace_handler(folder)
    profiler = torch.profiler.profile(schedule=action, on_trace_ready=handler)
    profiler.start()
    return profiler


def steps_to_profile(asked: Any) -> tuple[int, int] | None:
    """Return the first and the last step of Keras's `profile_batch`: a number, two, or "first,last"; None: none."""
    words = asked.split(",") if isinstance(asked, str) else [*asked] if isinstance(asked, (tuple, list)) else [asked]
    found = [int(word) for word in words if str(word).strip().isdecimal()]
    is_range = len(found) == len(words) in (1, 2) and (found == [0] or 0 < found[0] <= found[-1])
    message = "TensorBoard.profile_batch must be the number of a step from 1, two as in (10, 20), or 0, got"
    require(is_range, f"{message} {asked!r}.")
    return None if found == [0] else (found[0], found[-1])
