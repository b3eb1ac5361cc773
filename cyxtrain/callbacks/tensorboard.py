"""Curves for TensorBoard, histograms and images of weights, the model's graph, a profile of steps."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from cyxtrain.callbacks.callback import Callback, Logs
from cyxtrain.config.settings import require, require_boolean, require_integer
from cyxtrain.data.rng import generators_kept
from cyxtrain.environment.regular_files import local_path
from cyxtrain.errors import reason_of, warn
from cyxtrain.metrics import ConfusionMatrix
from cyxtrain.optim.clipping import gradient_norm
from cyxtrain.optim.learning_rates import rates_of

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_USAGE = {
    "peak_memory": ("peak memory (GiB)", 2**30),
    "flops_per_second": ("TFLOP per second", 1e12),
    "mfu": ("MFU", 1),
}
"""Names and units of curves of `trainer.device_usage`."""
# Rows and columns of an image; larger weights are cut.
_LARGEST = 1024


class TensorBoard(Callback):
    """Write logs for TensorBoard on rank 0; show them with `tensorboard --logdir logs`.

    They hold losses and metrics of each epoch, training and validation in one chart, and pictures of
    `cyxtrain.metrics.ConfusionMatrix`; the learning rate, samples per second and the gradient norm (averaged over
    ranks, before clipping); on GPUs peak memory, FLOP/s and MFU, as in `trainer.device_usage`; the settings as a table.
    The horizontal axis is the optimizer step. A resumed fit continues its curves.

    Args:
        log_dir: Folder; use one per training. As in Keras it gets the folders "train" and "validation".
        update_freq: "epoch", "batch" or a number of steps: how often to write the learning rate, the gradient norm and
            this rank's loss so far.
        histogram_freq: Write a histogram of each parameter after every so many epochs; 0: none.
        write_graph: Write the model's graph, traced with the inputs of rank 0's first step.
        write_images: Write parameters as images, too, whenever there are histograms: outputs by inputs, and the
            kernels of convolutions side by side; at most 1,024 rows and columns.
        profile_batch: Steps of this fit that rank 0 profiles, from 1: a number, or the first and the last as in
            (10, 20) or "10,20"; 0: none. TensorBoard shows them with the plugin torch-tb-profiler.

    Raises:
        ConfigError: An argument is invalid.
    """

    runs_last = True
    writes_to = "log_dir"

    def __init__(
        self,
        log_dir: str | os.PathLike[str] = "logs",
        update_freq: str | int = "epoch",
        *,
        histogram_freq: int = 0,
        write_graph: bool = False,
        write_images: bool = False,
        profile_batch: int | str | tuple[int, int] = 0,
    ) -> None:
        owner = "TensorBoard"
        require_integer(owner, "histogram_freq", histogram_freq, 0)
        require_boolean(owner, "write_graph", write_graph)
        require_boolean(owner, "write_images", write_images)
        require(histogram_freq > 0 or not write_images, f"{owner}.write_images needs histogram_freq=1 or more.")
        self.histogram_freq = histogram_freq
        self.write_images = write_images
        self.write_graph = write_graph
        self.profile_batch = _steps_to_profile(profile_batch)
        self._graph: _GraphWriter | None = None
        self._profiler: torch.profiler.profile | None = None
        local_path(f"{owner}.log_dir", log_dir)
        self.log_dir = os.fspath(log_dir)
        self.update_freq = update_freq
        self._every_n_steps = _every_n_steps(update_freq)
        self._folder = ""
        self._purge_step: int | None = None
        self._writer: SummaryWriter | None = None
        self._validation: SummaryWriter | None = None
        self._norm: Tensor | None = None
        self._previous_hook: Callable[[Any], object] | None = None

    def on_train_begin(self, logs: Logs | None = None) -> None:
        require(
            not (self.profile_batch and self.trainer.config.profile),
            "TensorBoard(profile_batch=...) and fit(profile=...) both profile steps: choose one.",
        )
        if self.trainer.is_master():
            self._previous_hook = threading.excepthook
            threading.excepthook = self._on_thread_error  # for TensorBoard's writing thread
            self._folder = os.path.abspath(local_path("TensorBoard.log_dir", self.log_dir))
            self._writer = self._open("train")
            self._writer.add_text("settings", self._settings_table(), self.trainer.step)
            if self.write_graph:
                self._graph = _GraphWriter(self.model)
            if self.profile_batch:
                self._profiler = _profiler_of(*self.profile_batch, os.path.join(self._folder, "train"))

    def _settings_table(self) -> str:
        optimizers = {name: type(optimizer).__name__ for name, optimizer in self.trainer.optimizers.items()}
        settings = dataclasses.asdict(self.trainer.config) | optimizers
        lines = [f"| {name} | {value} |" for name, value in settings.items()]
        return "\n".join(["| setting | value |", "|---|---|", *lines])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the checkpoint: later points are hidden."""
        if self._writer is not None:
            self._writer.close()
            self._purge_step = state["step"] + 1
            self._writer = self._open("train")

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.trainer.step}

    def on_before_optimizer_step(self, batch: int, logs: Logs | None = None) -> None:
        if self._writer is None:
            return
        may_be_last = self.params["steps"] in (None, batch + 1)  # None: the number of steps is unknown
        if may_be_last or self._writes_at(self.trainer.step + 1):
            self._norm = gradient_norm(self.model)

    def _writes_at(self, step: int) -> bool:
        return self._every_n_steps > 0 and step % self._every_n_steps == 0

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        step = self.trainer.step
        if self._profiler is not None:
            self._profiler.step()
        if self._graph is not None and self._writer is not None and self._graph.write(self._writer):
            self._graph = None
        if self._writer is not None and self._writes_at(step):
            self._writer.add_scalar("step/loss so far", (logs or {})["loss"], step)
            self._write_step(step)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        if self._writer is None:
            return
        step = self.trainer.step
        for name, value in (logs or {}).items():
            if not name.startswith("val_"):
                self._writer.add_scalar(f"epoch/{name}", value, step)
        self._writer.add_scalar("epoch/samples per second", self.trainer.history.samples_per_second, step)
        for name, value in self.trainer.device_usage.items():
            shown, unit = _USAGE[name]
            self._writer.add_scalar(f"epoch/{shown}", value / unit, step)
        if not self._every_n_steps:
            self._write_step(step)
        if self.histogram_freq and (epoch + 1) % self.histogram_freq == 0:
            _write_weights(self._writer, self.model, step, images=self.write_images)
        for writer in filter(None, (self._writer, self._validation)):
            writer.flush()

    def on_validation_end(self, epoch: int, logs: Logs | None = None) -> None:
        if self._writer is None:
            return
        if self._validation is None:
            self._validation = self._open("validation")
        for name, value in (logs or {}).items():
            self._validation.add_scalar(f"epoch/{name.removeprefix('val_')}", value, self.trainer.step)
        for name, metric in self.trainer.metrics.items():
            if isinstance(metric, ConfusionMatrix):
                for own, figure in metric.figures.items():
                    self._validation.add_figure(f"epoch/{name} {own}".rstrip(), figure, self.trainer.step)

    def _write_step(self, step: int) -> None:
        assert self._writer is not None
        rates = rates_of(*self.trainer.optimizers.values())
        for number, rate in enumerate(rates):
            name = f"learning rate {number}" if len(rates) > 1 else "learning rate"
            self._writer.add_scalar(f"step/{name}", rate, step)
        if self._norm is not None:
            self._writer.add_scalar("step/gradient norm", float(self._norm), step)

    def _on_thread_error(self, arguments: Any) -> None:
        """Print nothing if TensorBoard's thread cannot write: the next call raises the error."""
        if self._previous_hook is not None and not type(arguments.thread).__module__.startswith("tensorboard."):
            self._previous_hook(arguments)

    def close(self) -> None:
        if threading.excepthook == self._on_thread_error and self._previous_hook is not None:
            threading.excepthook = self._previous_hook
        if self._graph is not None:
            self._graph.close()
        if self._profiler is not None:
            self._profiler.stop()
        self._graph = None
        self._profiler = None
        for writer in filter(None, (self._writer, self._validation)):
            writer.close()
        self._writer = None
        self._validation = None
        self._purge_step = None

    def _open(self, name: str) -> SummaryWriter:
        from torch.utils.tensorboard import SummaryWriter  # importing it takes a second

        return SummaryWriter(os.path.join(self._folder, name), purge_step=self._purge_step)


def _write_weights(writer: SummaryWriter, model: nn.Module, step: int, *, images: bool) -> None:
    """Write a histogram of each parameter, and an image of each matrix or convolution."""
    for name, parameter in model.named_parameters():
        weights = parameter.detach().float().cpu()
        if not weights.numel() or not weights.isfinite().all():
            continue  # TensorBoard refuses them
        writer.add_histogram(f"weights/{name}", weights, step)
        if images and weights.dim() > 1:
            writer.add_image(f"images/{name}", _image(weights), step, dataformats="HW")


def _image(weights: Tensor) -> Tensor:
    """Return weights as grays from 0 to 1: a row per output, a column per input, each with its kernel."""
    if weights.dim() > 2:
        kernels = weights.flatten(2, -2) if weights.dim() > 3 else weights.unsqueeze(2)
        weights = kernels.permute(0, 2, 1, 3).flatten(2).flatten(0, 1)
    weights = weights[:_LARGEST, :_LARGEST]
    low = weights.min()
    span = (weights.max() - low).clamp(min=torch.finfo(torch.float32).tiny)  # all may be equal
    return (weights - low) / span


class _GraphWriter:
    """Writes the graph of a model once it has been called, from the inputs of that call."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.close = model.register_forward_pre_hook(self._note, with_kwargs=True).remove

    def _note(self, _: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._inputs = arguments, named  # the first call is enough
        self.close()

    def write(self, writer: SummaryWriter) -> bool:
        """Write the graph; return whether the model had been called. Model and generators stay as they are."""
        if self._inputs is None:
            return False
        arguments, named = self._inputs
        self._inputs = None
        tensors = {name: value for name, value in named.items() if isinstance(value, Tensor)}
        call = _Call(self._model, list(tensors), dict(named))
        modes = [(module, module.training) for module in self._model.modules()]
        device = next((parameter.device for parameter in self._model.parameters()), torch.device("cpu"))
        try:
            # PyTorch prints the error of a failed trace; the warning has it. Not strict: outputs may be dictionaries.
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
        self._names = names
        self._named = named

    def forward(self, *values: Any) -> Any:
        count = len(self._names)
        tensors = dict(zip(self._names, values[:count], strict=True))
        return self.model(*values[count:], **{**self._named, **tensors})


def _profiler_of(first: int, last: int, folder: str) -> torch.profiler.profile:
    """Return a started profiler of steps `first` to `last`, from 1, which TensorBoard's plugin shows."""

    def action(step: int) -> torch.profiler.ProfilerAction:
        if step == last - 1:
            return torch.profiler.ProfilerAction.RECORD_AND_SAVE
        if first - 1 <= step < last:
            return torch.profiler.ProfilerAction.RECORD
        return torch.profiler.ProfilerAction.NONE

    handler = torch.profiler.tensorboard_trace_handler(folder)
    profiler = torch.profiler.profile(schedule=action, on_trace_ready=handler)
    profiler.start()
    return profiler


def _every_n_steps(update_freq: str | int) -> int:
    """Return the number of steps between points of the step's curves; 0: at the ends of epochs only."""
    if update_freq == "epoch":
        return 0
    if update_freq == "batch":
        return 1
    require_integer("TensorBoard", "update_freq", update_freq, 1)
    return int(update_freq)


def _steps_to_profile(asked: Any) -> tuple[int, int] | None:
    """Return the first and last step of `profile_batch`, a number, two, or "first,last"; None: none."""
    if isinstance(asked, str):
        words: list[Any] = asked.split(",")
    elif isinstance(asked, (tuple, list)):
        words = list(asked)
    else:
        words = [asked]
    steps = [int(word) for word in words if str(word).strip().isdecimal()]
    are_numbers = len(words) in (1, 2) and len(steps) == len(words)
    is_valid = are_numbers and (steps == [0] or 0 < steps[0] <= steps[-1])
    message = "TensorBoard.profile_batch must be the number of a step from 1, two as in (10, 20), or 0, got"
    require(is_valid, f"{message} {asked!r}.")
    if steps == [0]:
        return None
    return steps[0], steps[-1]
