"""A model's loss, metrics and outputs over all rows: each counted once, in order."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cyxtrain.callbacks.callback import Callbacks
from cyxtrain.data.batches.batch import Batch, share_of_batches
from cyxtrain.data.batches.specs import example_of, form_of
from cyxtrain.data.batches.structure import Tree, map_tree, num_rows, tensors
from cyxtrain.environment.accelerator import HostCopy, is_accelerator
from cyxtrain.errors import ConfigError
from cyxtrain.metrics.loss import Loss
from cyxtrain.metrics.sums import MetricSums, correct_of
from cyxtrain.parallel import gathering_alone
from cyxtrain.progress.display import Display
from cyxtrain.training.inputs.checked_data import CheckedData
from cyxtrain.training.model.compile import marked_steps
from cyxtrain.training.model.forward import ModelCall
from cyxtrain.training.model.modes import modes_kept
from cyxtrain.training.model.out_of_memory import memory_explained
from cyxtrain.world import runtime
from cyxtrain.world.agreement import raise_together


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
            totals.add(batch.number, loss(output, batch), correct_of(output, batch.answers, loss))
            totals.metrics.add(output, batch.answers, batch.rows)
        hooks.on_test_batch_end(number, totals.lazy_values)
        shown.phase("validating", number + 1, own)

    complete = _run_all(model, rows, evaluate_batch, distributed=distributed, should_stop=should_stop)
    measured = totals.over_ranks(runtime.cpu_group()) if distributed else totals.local_values()
    return Evaluation(**measured) if complete else None


def predict_rows(model: nn.Module, rows: CheckedData, *, distributed: bool) -> Any:
    """Return a model's output for all rows, in their order, on every rank: NumPy arrays if X is made of them.

    Args:
        model: Not wrapped.
        rows: All of them.
        distributed: Whether the ranks share the work; otherwise this one does it all.

    Raises:
        ConfigError: The model does not return tensors with one output row per input row.
    """
    outputs = _Outputs(model, rows.call, rows.loss)
    _run_all(model, rows, outputs.add, distributed=distributed)
    output = _gathered(rows, outputs) if distributed else _joined(outputs.all)
    finish: Any = _as_numpy if rows.source.is_numpy else (lambda tensor: tensor)
    return map_tree(finish, output)


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
        call: How it is called.
        loss: Of the fit; one that the model computes itself is not part of its output.
    """

    def __init__(self, model: nn.Module, call: ModelCall, loss: Loss) -> None:
        self._model = model
        self._call = call
        self._loss = loss
        self._outputs: list[Tree] = []
        self._copies: list[HostCopy] = []

    @property
    def all(self) -> list[Tree]:
        """Of all batches so far."""
        self._read_copies()
        return self._outputs

    def add(self, batch: Batch) -> None:
        """Run the model; outputs on an accelerator are read one batch later, while it computes the next one."""
        with torch.no_grad(), gathering_alone():
            given = self._call.without_graph(self._model, batch, predicting=True)
        output = _outputs(self._loss.without_own(given), batch.rows)
        kind, first = form_of(output), form_of(self._outputs[0] if self._outputs else output)
        if kind != first:
            raise ConfigError(f"predict needs rows of one kind; the model returned {first}, then {kind}.")
        copies = [HostCopy(tensor.contiguous()) for tensor in tensors(output) if is_accelerator(tensor.device)]
        self._read_copies()
        self._outputs.append(output)
        self._copies = copies

    def _read_copies(self) -> None:
        """Replace the latest outputs by their copies in host memory, which is not pinned."""
        if self._copies:
            copies = iter(self._copies)
            self._copies = []
            self._outputs[-1] = map_tree(
                lambda tensor: next(copies).read().clone() if is_accelerator(tensor.device) else tensor,
                self._outputs[-1],
            )


def _outputs(output: Any, rows: int) -> Tree:
    """Return a model's outputs: one, or several in a dictionary, a tuple or a list; raise ConfigError for others."""
    if isinstance(output, Tensor) and output.dim() > 0 and len(output) == rows:
        return output
    if isinstance(output, Mapping) and output:
        return {str(name): _outputs(part, rows) for name, part in output.items()}
    if isinstance(output, (tuple, list)) and output:
        parts = [_outputs(part, rows) for part in output]
        make: Callable[[list[Tree]], Tree] = getattr(output, "_make", type(output))  # a named tuple's own
        return make(parts)
    found = f"a tensor of shape {list(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
    raise ConfigError(
        "predict needs a model that returns a tensor with one output row per input row, or several in a dictionary, a "
        f"tuple or a list; for {rows} rows it returned {found}."
    )


def _gathered(rows: CheckedData, outputs: _Outputs) -> Tree:
    gathered, batches = gather_rows(outputs.all)
    order = rows.source.in_order(batches)
    if order is None:
        return gathered
    return map_tree(lambda tensor: torch.empty_like(tensor).index_copy_(0, order, tensor), gathered)


def gather_rows(outputs: Sequence[Tree]) -> tuple[Tree, list[list[int]]]:
    """Return the outputs of all ranks, on every rank, in their order; and how many rows each batch had, by rank.

    Cost: the rows once in and once out of each rank.

    Args:
        outputs: This rank's, batch by batch.

    Raises:
        ConfigError: They do not have the same shape and dtype on every rank.
    """
    text = json.dumps(
        {"kind": form_of(outputs[0]) if outputs else None, "batches": [num_rows(output) for output in outputs]}
    )
    found = [json.loads(other) for other in runtime.gather_texts(text)]
    batches: list[list[int]] = [other["batches"] for other in found]
    kinds = [other["kind"] for other in found if other["kind"] is not None]  # a rank without a batch has none
    if any(other != kinds[0] for other in kinds):
        raise ConfigError(f"predict needs rows of one kind; the model's outputs differ between ranks: {kinds}.")
    ends = list(itertools.accumulate(map(sum, batches)))
    own = iter(tensors(_joined(outputs)) if outputs else ())

    def gather(like: Tensor) -> Tensor:
        mine = next(own, None)
        rows = torch.empty((ends[-1], *like.shape[1:]), dtype=like.dtype, device="cpu")
        for rank, end in enumerate(ends):
            part = rows[end - sum(batches[rank]) : end]
            if len(part) == 0:
                continue
            if mine is not None and rank == runtime.get_rank():
                part.copy_(mine)
            dist.broadcast(part, rank, group=runtime.cpu_group())
        return rows

    return map_tree(gather, outputs[0] if outputs else example_of(kinds[0])), batches


def _joined(outputs: Sequence[Tree]) -> Tree:
    """Return all rows of several outputs of one kind."""
    parts = zip(*(tensors(output) for output in outputs), strict=True)
    return map_tree(lambda _: torch.cat(next(parts)), outputs[0])


def _as_numpy(tensor: Tensor) -> Any:
    return (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy()  # NumPy has no bfloat16
