"""A model's loss, metrics and outputs over all rows: each counted once, in order."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cyxtrain.callbacks.callback import Callbacks
from cyxtrain.data.batches.batch import Batch, share_of_batches
from cyxtrain.data.batches.structure import output_parts, with_parts
from cyxtrain.environment.accelerator import HostCopy, is_accelerator
from cyxtrain.errors import ConfigError
from cyxtrain.metrics.sums import MetricSums, correct_of
from cyxtrain.parallel import gathering_alone
from cyxtrain.progress.display import Display
from cyxtrain.training.inputs.checked_data import CheckedData
from cyxtrain.training.model.compile import marked_steps
from cyxtrain.training.model.modes import modes_kept
from cyxtrain.training.model.out_of_memory import memory_explained
from cyxtrain.world import runtime
from cyxtrain.world.agreement import raise_together

_Shapes: TypeAlias = list[list[int]]


class Evaluation:
    """Metrics over all rows, the same on every rank: `loss, accuracy = ...`, `.loss`, `["accuracy"]`, `dict(...)`.

    It unpacks as loss, accuracy, then the other metrics. A regression has no accuracy: it unpacks as loss, then its
    metrics; without any, as loss and None.

    Args:
        metrics: By name.
    """

    def __init__(self, **metrics: float) -> None:
        self._metrics = metrics

    # `float | Any`: the accuracy may be None, and `loss + accuracy` needs no check in your code.
    def __iter__(self) -> Iterator[float | Any]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, key: str | int) -> float | Any:
        return self._metrics[key] if isinstance(key, str) else self._values[key]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Evaluation):
            return self._metrics == other._metrics
        return list(self) == list(other) if isinstance(other, (tuple, list)) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    @property
    def _values(self) -> list[Any]:
        return [*self._metrics.values()] if len(self._metrics) > 1 else [self.loss, None]

    def keys(self) -> list[str]:
        """Return the names of the metrics."""
        return list(self._metrics)

    @property
    def loss(self) -> float:
        """The loss."""
        return self._metrics["loss"]

    @property
    def accuracy(self) -> float | None:
        """The share of rows with the right class; NaN if none counted, None if targets are not classes."""
        return self._metrics.get("accuracy")

    def __repr__(self) -> str:
        return f"Evaluation({', '.join(f'{name}={value:.6g}' for name, value in self._metrics.items())})"


def evaluate_rows(
    model: nn.Module,
    rows: CheckedData,
    *,
    distributed: bool,
    should_stop: Callable[[], bool] = lambda: False,
    callbacks: Callbacks | None = None,
    display: Display | None = None,
) -> Evaluation | None:
    """Return loss, accuracy and metrics over all rows, the same on any number of ranks; None: this rank stopped early.

    Args:
        model: Not wrapped.
        rows: All of them.
        distributed: Whether the ranks share the work; otherwise this one does it all.
        should_stop: Called after each batch; returns whether to skip the rest.
        callbacks: Called with each batch.
        display: Of a fit that validates.
    """
    loss, device = rows.loss, rows.placement.device
    batches = rows.source.table_rows(rows.batch_size)
    totals = MetricSums(batches, device, loss, rows.metrics)
    hooks, numbers, shown = callbacks or Callbacks(), itertools.count(), display or Display()
    own = len(share_of_batches(batches, runtime.get_rank(), runtime.get_world_size())) if batches > 1 else 0
    shown.phase("validating", 0, own)

    def evaluate_batch(batch: Batch) -> None:
        number = next(numbers)
        hooks.on_test_batch_begin(number)
        with torch.no_grad(), gathering_alone():
            output = rows.call.without_graph(model, batch)
            loss.check_shapes(output, batch.targets)
            found, output = loss(output, batch), loss.measured_part(output)
            totals.add(batch.number, found, correct_of(output, batch.answers, loss))
            totals.metrics.add(output, batch.answers, batch.rows)
        hooks.on_test_batch_end(number, totals.lazy_values)
        shown.phase("validating", number + 1, own)

    complete = _run_all(model, rows, evaluate_batch, distributed=distributed, should_stop=should_stop)
    measured = totals.over_ranks(runtime.cpu_group()) if distributed else totals.local_values()
    return Evaluation(**measured) if complete else None


def predict_rows(model: nn.Module, rows: CheckedData, *, distributed: bool, pad_value: float | None = None) -> Any:
    """Return a model's output for all rows, in their order, on every rank: NumPy arrays if X is made of them.

    Cost: the shapes of all batches, then the rows once in and once out of each rank.

    Args:
        model: Not wrapped.
        rows: All of them.
        distributed: Whether the ranks share the work; otherwise this one does it all.
        pad_value: As in `DistributedTrainer.predict`.

    Raises:
        ConfigError: The model does not return tensors with one output row per input row, of the same kind on every
            rank.
    """
    outputs = _Outputs(model, rows)
    _run_all(model, rows, outputs.add, distributed=distributed)
    own = json.dumps({"kinds": outputs.kinds, "shapes": outputs.shapes})
    found = [json.loads(text) for text in (runtime.gather_texts(own) if distributed else [own])]
    kinds = [each["kinds"] for each in found if each["kinds"]]  # a rank without a batch has none
    if any(other != kinds[0] for other in kinds):
        raise ConfigError(f"predict needs rows of one kind; the model's outputs differ between ranks: {kinds}.")
    finish: Any = _as_numpy if rows.source.is_numpy else (lambda tensor: tensor)
    parts = {}
    for name, kind in kinds[0].items():
        shapes: list[_Shapes] = [each["shapes"].get(name, []) for each in found]
        dtype = getattr(torch, kind.split()[0])
        values = _gathered([batch[name] for batch in outputs.batches], shapes, dtype, distributed=distributed)
        order = rows.source.in_order([[shape[0] for shape in each] for each in shapes])
        joined = _joined(values, [shape for each in shapes for shape in each], order, pad_value)
        parts[name] = finish(joined) if isinstance(joined, Tensor) else list(map(finish, joined))
    return with_parts(outputs.structure, parts)


def _run_all(
    model: nn.Module,
    rows: CheckedData,
    step: Callable[[Batch], object],
    *,
    distributed: bool,
    should_stop: Callable[[], bool] = lambda: False,
) -> bool:
    """Call `step` with each of this rank's batches, in evaluation mode; return whether none was skipped.

    An error on any rank is raised on all.
    """
    rank, world_size = (runtime.get_rank(), runtime.get_world_size()) if distributed else (0, 1)
    problem, complete = None, False
    try:
        with memory_explained(trains=False), modes_kept(model, *rows.loss.modules):
            for module in (model, *rows.loss.modules):
                module.eval()
            batches = rows.source.whole_batches(rows.batch_size, rows.placement, rank, world_size)
            for batch in marked_steps(batches, rows.placement.device):
                step(batch)
                if should_stop():
                    break
            else:
                complete = True
    except Exception as error:
        problem = error
    if distributed:
        raise_together(problem)
    elif problem is not None:
        raise problem
    return complete


class _Outputs:
    """The outputs of a model, batch by batch, on the CPU.

    Args:
        model: In evaluation mode.
        rows: What it predicts. A loss that the model computes itself is not part of its output.

    Attributes:
        structure: The output of the dry run, which a rank without a batch has too; its tensors have no values.
        kinds: What all rows have in common: dtypes and numbers of dimensions, by part; empty before the first batch.
    """

    def __init__(self, model: nn.Module, rows: CheckedData) -> None:
        self._model = model
        self._call = rows.call
        self._loss = rows.loss
        self._batches: list[dict[str, Tensor]] = []
        self._latest: dict[str, Tensor | HostCopy] = {}
        self.structure = self._loss.without_own(rows.output)
        self.kinds: dict[str, str] = {}

    @property
    def batches(self) -> list[dict[str, Tensor]]:
        """The parts of all outputs so far, by name."""
        self._read_latest()
        return self._batches

    @property
    def shapes(self) -> dict[str, _Shapes]:
        """The shape of each batch, by part."""
        return {name: [list(batch[name].shape) for batch in self.batches] for name in self.kinds}

    def add(self, batch: Batch) -> None:
        """Run the model; outputs on an accelerator are read one batch later, while it computes the next one."""
        with torch.no_grad(), gathering_alone():
            given = self._call.without_graph(self._model, batch, predicting=True)
        output = _checked(self._loss.without_own(given), batch.rows)
        kinds, expected = _kinds(output), self.kinds or _kinds(dict(output_parts(self.structure)))
        if kinds.keys() != expected.keys() or (self.kinds and kinds != expected):
            raise ConfigError(f"predict needs rows of one kind; the model returned {expected}, then {kinds}.")
        self.kinds = kinds
        latest: dict[str, Tensor | HostCopy] = {
            name: HostCopy(tensor.contiguous()) if is_accelerator(tensor.device) else tensor.detach()
            for name, tensor in output.items()
        }
        self._read_latest()
        self._latest = latest

    def _read_latest(self) -> None:
        """Keep the latest outputs in host memory that is not pinned."""
        if self._latest:
            self._batches.append(
                {name: each if isinstance(each, Tensor) else each.read().clone() for name, each in self._latest.items()}
            )
            self._latest = {}


def _checked(output: Any, rows: int) -> dict[str, Tensor]:
    """Return the tensors of a model's output by name; raise ConfigError unless each has a row per input row."""
    found = dict(output_parts(output))
    bad = (name for name, part in found.items() if not (isinstance(part, Tensor) and part.dim() and len(part) == rows))
    name = next(bad, None)
    if found and name is None:
        return found
    part = output if name is None else found[name]
    is_tensor = isinstance(part, Tensor)
    what = f"a tensor of shape {list(part.shape)}" if is_tensor else type(part).__name__
    what += "" if part is output else f" as {name}"
    remedy = "" if part is output else " Return only what you need."
    if "past_key_values" in what:
        remedy = " Set model.config.use_cache = False: then Hugging Face's models leave it out."
    if is_tensor and part.dim() > 1 and part.shape[1] == rows:
        remedy = (
            " Its rows are in the second dimension, as in the states of an LSTM: return it with the rows first "
            "(state.transpose(0, 1)), or return only what you need."
        )
    raise ConfigError(
        "predict needs a model that returns a tensor with one output row per input row, or several in a dictionary, a "
        f"dataclass, a tuple or a list; for {rows} rows it returned {what}.{remedy}"
    )


def _kinds(parts: Mapping[str, Any]) -> dict[str, str]:
    """Return what all rows have in common, even if they are padded to different lengths."""
    return {
        name: f"{str(part.dtype).removeprefix('torch.')} of {part.dim()} dimensions"
        if isinstance(part, Tensor)
        else type(part).__name__
        for name, part in parts.items()
    }


def _gathered(own: Sequence[Tensor], shapes: Sequence[_Shapes], dtype: torch.dtype, *, distributed: bool) -> Tensor:
    """Return the values of all ranks' batches as one vector, by rank; `shapes`: of the batches of each rank."""
    counts = [sum(map(math.prod, each)) for each in shapes]
    values = torch.empty(sum(counts), dtype=dtype, device="cpu")
    own_rank = runtime.get_rank() if distributed else 0
    for rank, part in enumerate(values.split(counts)):
        if rank == own_rank and own:
            torch.cat([batch.reshape(-1) for batch in own], out=part)
        if distributed and len(part):
            dist.broadcast(part, rank, group=runtime.cpu_group())
    return values


def _joined(values: Tensor, shapes: _Shapes, order: Tensor | None, pad_value: float | None) -> Tensor | list[Tensor]:
    """Return the rows of several batches in their order, as one tensor; if their shapes differ, padded or as a list.

    Args:
        values: Of all batches, one after the other.
        shapes: Of the batches.
        order: The place of each row; None: as they come.
        pad_value: Put at the ends of rows that are shorter than others; None: such rows become a list.
    """
    count = sum(shape[0] for shape in shapes)
    if all(shape[1:] == shapes[0][1:] for shape in shapes):
        rows = values.view(count, *shapes[0][1:])
        return rows if order is None else torch.empty_like(rows).index_copy_(0, order, rows)
    order = torch.arange(count, device="cpu") if order is None else order
    pieces = zip(values.split(list(map(math.prod, shapes))), shapes, strict=True)
    batches = [piece.view(shape) for piece, shape in pieces]
    if pad_value is None:
        several = [row for batch in batches for row in batch]
        return [several[number] for number in order.argsort().tolist()]
    if not (values.is_floating_point() or values.is_complex() or float(pad_value).is_integer()):
        raise ConfigError(f"pad_value must be an integer for outputs of {values.dtype}, got {pad_value}.")
    longest = [max(lengths) for lengths in zip(*shapes, strict=True)][1:]
    padded = torch.full((count, *longest), pad_value, dtype=values.dtype, device="cpu")
    for places, batch in zip(order.split([shape[0] for shape in shapes]), batches, strict=True):
        corner = (places, *map(slice, batch.shape[1:]))
        padded[corner] = batch
    return padded


def _as_numpy(tensor: Tensor) -> Any:
    return (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy()  # NumPy has no bfloat16
