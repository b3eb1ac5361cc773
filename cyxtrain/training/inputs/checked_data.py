"""Data that passed a dry run, how its batches reach the model, and what is measured on it."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cyxtrain.callbacks.callback import checked_callbacks
from cyxtrain.config import DistributedTrainingConfig
from cyxtrain.config.settings import is_number, require, require_integer
from cyxtrain.data.batches.batch import Batch
from cyxtrain.data.batches.collate import labels_of
from cyxtrain.data.batches.prefetch import Placement
from cyxtrain.data.batches.rows import Rows
from cyxtrain.data.batches.stored import few_of_stored, holds_stored
from cyxtrain.data.sources.source import Source
from cyxtrain.environment import accelerator
from cyxtrain.environment.regular_files import path_or_url
from cyxtrain.errors import brief
from cyxtrain.metrics.logged import LoggedNumbers
from cyxtrain.metrics.loss import Loss
from cyxtrain.metrics.metric import Metrics
from cyxtrain.metrics.named_metrics import NamedMetrics
from cyxtrain.optim.optimizers import place_state
from cyxtrain.optim.precision import Precision
from cyxtrain.training.inputs.checks import check_targets
from cyxtrain.training.inputs.dry_run import DryRun, Tried, trained_by
from cyxtrain.training.inputs.facts import value_facts
from cyxtrain.training.model.forward import ModelCall
from cyxtrain.training.model.out_of_memory import memory_explained
from cyxtrain.training.model.own_steps import PREDICT, TEST, TRAIN, BuiltInStep, OwnStep, OwnSteps, StepCall, step_for
from cyxtrain.training.model.placement import choose_device, put_channels_last
from cyxtrain.training.model.snapshot import inputs_seen, modes_kept, put_into_training, snapshot
from cyxtrain.training.trained import trained_with
from cyxtrain.world.world import World

_NOT_SHARED = (
    "output_dir needs samples that all ranks share, and each has its own: let each predict to a separate folder, with "
    "distributed=False."
)
# What a function returns keeps the class of a loss out.
LossLike = nn.Module | Callable[..., Tensor | tuple[Any, Any]] | str | Mapping[str, Any] | None


class TrainerArguments(NamedTuple):
    """The world and the arguments of a trainer; `loss_fn` has its factors, `logged` what a dry run logs."""

    world: World
    model: nn.Module
    loss_fn: Any
    optimizers: Mapping[str, torch.optim.Optimizer]
    device: str | torch.device
    metrics: NamedMetrics
    steps: OwnSteps
    logged: LoggedNumbers


class EmptyBatch:
    """A forward of a model and its loss on a batch without samples, whose gradients are zeros.

    With SyncBatchNorm and uneven micro-batches a rank that has run out of samples runs it: each forward and backward of
    such a layer is a collective, which all ranks must make equally often. It computes in full precision: with autocast
    SyncBatchNorm sends float32 for 16-bit rows, but an empty batch in its own type.
    """

    def __init__(self, source: Source, placement: Placement, call: ModelCall, loss: Loss) -> None:
        no_rows = source.first(1).mapped(lambda tensor: tensor[:0])
        self._batch = Batch(0, *placement.place(no_rows))
        self._device = placement.device
        self._call = copy.copy(call)
        self._call.precision = Precision("fp32", placement.device)
        self._loss = loss

    def forward(self, model: Callable[..., Any]) -> Any:
        """Return the model's output."""
        return self._call(model, self._batch)

    def __call__(self, model: Callable[..., Any]) -> Tensor:
        """Return a loss of 0 on which to call `backward`, 0-dim."""
        found = self._loss(self.forward(model), self._batch)
        values = [each.value for _, _, each in self._loss.components(found)]
        return torch.stack(values).sum() * 0.0

    @staticmethod
    @contextlib.contextmanager
    def using_running_statistics(model: nn.Module) -> Iterator[None]:
        """Make SyncBatchNorm use its running statistics, so that no rank needs another one."""
        layers = [module for module in model.modules() if isinstance(module, nn.SyncBatchNorm)]
        with modes_kept(*layers):
            for layer in layers:
                layer.eval()
            yield

    def problem(self, model: nn.Module, layers: Sequence[nn.Module]) -> str:
        """Return why a model cannot compute on no samples, or ""; `layers` would wait for other ranks."""
        dtypes: set[torch.dtype] = set()
        with snapshot([model, *self._loss.functions], self._device, copies=True), torch.enable_grad():
            put_into_training(model, *self._loss.modules)
            for layer in layers:
                layer.eval()  # in training mode it waits for the other ranks
            try:
                with inputs_seen(layers, lambda tensor: dtypes.add(tensor.dtype)):
                    found = torch.autograd.grad(self(model), trained_by(model, self._loss), allow_unused=True)
            except Exception as error:
                return f"{type(error).__name__}: {error}"
            gradients = [each for each in found if each is not None]
            buffers = [each for each in model.buffers() if each.is_floating_point()]
            if not all(bool(torch.isfinite(each).all()) for each in (*gradients, *buffers)):
                return "its gradients or buffers are then not finite."
        if dtypes & {torch.float16, torch.bfloat16}:
            return "PyTorch's SyncBatchNorm sends other types without samples than with samples of 16 bits."
        return ""


@dataclass(frozen=True, kw_only=True)
class ModelSetup:
    """How batches reach the model, and what is computed of its output.

    Attributes:
        num_micro_batches: Largest number in a step on any rank.
        without_rows: Computed by a rank that has fewer micro-batches than another one; None: nothing is.
    """

    placement: Placement
    loss: Loss
    call: ModelCall
    metrics: Metrics = field(default_factory=Metrics)
    num_micro_batches: int = 1
    without_rows: EmptyBatch | None = None

    @property
    def needs_all_ranks(self) -> bool:
        """Whether each forward needs all ranks: the loss gathers rows, or a layer such as SyncBatchNorm does."""
        return bool(self.loss.gathers) or self.without_rows is not None


@dataclass(frozen=True, kw_only=True)
class CheckedData(ModelSetup):
    """Data that passed a dry run.

    Attributes:
        batch_size: Rows at once, outside training.
        tried: The results of the dry run.
        name: The name of the validation set, if there are several.
    """

    source: Source
    batch_size: int
    tried: Tried
    name: str = ""

    def params(self, verbose: Any) -> dict[str, Any]:
        """Return what callbacks of `evaluate` and `predict` are given with `set_params`."""
        return {
            "epochs": 1,
            "steps": self.source.num_batches(self.batch_size),
            "samples_per_step": self.batch_size,
            "warmup_steps": 0,
            "verbose": verbose,
            "validation": False,
            "metrics": self.measured,
            "larger_is_better": {"loss": False, "accuracy": True, **self.metrics.larger_is_better},
        }

    @property
    def measured(self) -> list[str]:
        """Names of the numbers that are measured on this data: losses, then metrics."""
        names = ["loss"]
        if self.loss.accuracy is not None:
            names.append("accuracy")
        return [*dict.fromkeys([*names, *self.loss.shown, *self.metrics.names])]


def check_data(
    source: Source,
    batch_size: int,
    config: DistributedTrainingConfig,
    trainer: TrainerArguments,
    *,
    predicting: bool = False,
    trains_on: Rows | None = None,
    is_of_fit: bool = True,
) -> CheckedData:
    """Return rows that passed a dry run; `trains_on`: a micro-batch of training."""
    world = trainer.world
    model = trainer.model
    kind = PREDICT if predicting else TEST
    if trains_on is not None:
        kind = TRAIN
    loss = Loss(trainer.loss_fn)
    own = step_for(kind, trainer.steps, model, loss)
    if own is not None:  # the user's step returns its loss, as a model without a loss_fn does
        loss = Loss(None, used=loss)
    elif not predicting:
        check_targets(source, loss)
    _inspect_labels(source, loss)
    with memory_explained(world, trains=trains_on is not None):
        placement = place_model(world, model, loss, trainer.device, channels_last=config.channels_last)
        place_state(*trainer.optimizers.values())  # model.to() does not move it
    device = placement.device
    call = _make_call(model, loss, own, source, Precision(config.precision, device), device)
    metrics = NamedMetrics() if predicting else trainer.metrics
    dry_run = DryRun(world, model, loss, call, placement, metrics, is_of_fit=is_of_fit)
    tried = _tried(kind, dry_run, source, trains_on, counts_flops=bool(config.profile))
    return CheckedData(
        source=source,
        batch_size=batch_size,
        placement=placement,
        loss=loss,
        call=call,
        metrics=tried.metrics,
        tried=tried,
    )


def _inspect_labels(source: Source, loss: Loss) -> None:
    """Let the loss look at the labels; at the first ones if they are in an HDF5 file."""
    inputs, targets, weights = source.example
    labels = labels_of(inputs, targets)
    are_all = source.is_whole and not holds_stored(labels)
    loss.inspect(few_of_stored(labels), are_all=are_all, rows_have_weights=weights is not None)


def _tried(kind: str, dry_run: DryRun, source: Source, trains_on: Rows | None, *, counts_flops: bool) -> Tried:
    if trains_on is not None:
        return dry_run.train(source, trains_on, counts_flops=counts_flops)
    return dry_run.predict(source) if kind == PREDICT else dry_run.evaluate(source)


def _make_call(
    model: nn.Module, loss: Loss, own: OwnStep | None, source: Source, precision: Precision, device: torch.device
) -> ModelCall:
    """Return how batches of a source reach the model, or the user's own step."""
    if own is None or loss.used is None:
        inputs, targets, _ = source.example
        return ModelCall(model, precision, inputs, targets, loss)
    return StepCall(own, BuiltInStep(model, loss.used, precision), source.target_name, device)


def check_rows(
    source: Source,
    batch_size: int | None,
    config: DistributedTrainingConfig,
    trainer: TrainerArguments,
    *,
    predicting: bool = False,
    pad_value: float | None = None,
    steps: int | None = None,
    verbose: Any = 0,
    callbacks: Any = None,
    output_dir: Any = None,
) -> tuple[CheckedData, dict[str, Any]]:
    """Return checked rows to evaluate or predict, and what ranks that share them compare."""
    call = "predict" if predicting else "evaluate"
    if batch_size is None:
        batch_size = source.batch_size or config.batch_size
    require_integer(call, "batch_size", batch_size, 1)
    checked_callbacks(callbacks)
    require(verbose in (0, 1, 2, "auto"), f"{call}.verbose must be 0, 1, 2 or 'auto', got {brief(verbose)}.")
    if output_dir is not None:
        path_or_url("predict.output_dir", output_dir)
        require(source.is_shared, _NOT_SHARED)
    if steps is not None:
        require_integer(call, "steps", steps, 1)
        source = source.shortened(steps, batch_size)
    require(pad_value is None or is_number(pad_value), f"predict.pad_value must be a number, got {pad_value!r}.")
    rows = check_data(source, batch_size, config, trainer, predicting=predicting, is_of_fit=False)
    return rows, {
        "the batch size": batch_size,
        "steps": steps,
        "whether output_dir is given": output_dir is not None,
        "pad_value": str(pad_value),  # NaN would differ from NaN
        "_shown": rows.loss.shown,
        "the metrics": [*trainer.metrics],
        **source.facts("the given"),
        **value_facts(trained_with(trainer.model, rows.loss)),
    }


def place_model(
    world: World, model: nn.Module, loss: Loss, device: str | torch.device, *, channels_last: bool = False
) -> Placement:
    """Move model and loss to their device; return where batches go, and in which types."""
    chosen = choose_device(world, device, model)
    if world.is_first:
        accelerator.warn_if_untested(chosen.type)
    model.to(chosen)
    for module in loss.modules:
        module.to(chosen)  # it may have class weights
    if channels_last:
        put_channels_last(model)
    floats = (parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    dtype = next(floats, torch.get_default_dtype())
    return Placement(chosen, dtype, loss.prepare_target, channels_last)
