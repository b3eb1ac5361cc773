"""A model's loss and metrics over all rows, each counted once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from cyxtrain.callbacks.callback import Callbacks
from cyxtrain.data.batches.batch import Batch
from cyxtrain.training.epoch import run_whole_batches
from cyxtrain.training.inputs.plan import CheckedData
from cyxtrain.training.step import EvaluationStep
from cyxtrain.world import runtime


class Evaluation:
    """Metrics over all rows, the same on every rank: `loss, accuracy = ...`, `.loss`, `["accuracy"]`, `dict(...)`.

    It unpacks as loss, accuracy, then the other metrics. A regression has no accuracy: it unpacks as loss, then its
    metrics; without any, as loss and None.

    Args:
        metrics: By name.
    """

    def __init__(self, **metrics: float) -> None:
        self._metrics = metrics

    def __iter__(self) -> Iterator[float]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, key: str | int) -> float:
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
        """Returns the names of the metrics."""
        return list(self._metrics)

    @property
    def loss(self) -> float:
        """The loss."""
        return self._metrics["loss"]

    @property
    def accuracy(self) -> float | None:
        """The share of rows with the right class; NaN where none counted, None where targets are not classes."""
        return self._metrics.get("accuracy")

    def __repr__(self) -> str:
        return f"Evaluation({', '.join(f'{name}={value:.6g}' for name, value in self._metrics.items())})"


def evaluate_rows(
    model: nn.Module,
    rows: CheckedData,
    *,
    distributed: bool,
    give_up: Callable[[], bool] = lambda: False,
    callbacks: Callbacks | None = None,
) -> Evaluation | None:
    """Returns loss, accuracy and metrics over all rows, the same on any number of ranks; None: this rank gave up.

    Args:
        model: Not wrapped.
        rows: All of them.
        distributed: Whether the ranks share the work; else this one does it all.
        give_up: Asked after each batch whether to leave the others.
        callbacks: Told of each batch, or None.
    """
    table_rows = rows.source.table_rows(rows.batch_size)
    step = EvaluationStep(model, rows.loss, table_rows, rows.call, rows.placement.device, rows.metrics)
    told, numbers = callbacks or Callbacks(), itertools.count()

    def step_and_tell(batch: Batch) -> None:
        number = next(numbers)
        told.on_test_batch_begin(number)
        step(batch)
        told.on_test_batch_end(number, step.totals.lazy_values)

    complete = run_whole_batches(model, rows, step_and_tell, distributed=distributed, give_up=give_up)
    measured = step.totals.over_ranks(runtime.cpu_group()) if distributed else step.totals.local_values()
    return Evaluation(**measured) if complete else None
