"""The loss, accuracy and metrics of an epoch or a validation."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from typing_extensions import override

from cyxtrain.config.settings import require
from cyxtrain.data.batches.structure import Tree
from cyxtrain.metrics.accumulator import Accumulator, Number, Pair, joined, mean_of, number_of
from cyxtrain.metrics.loss import Loss
from cyxtrain.metrics.metric import Metrics
from cyxtrain.metrics.weighting import BatchLoss, Weighting
from cyxtrain.world.slices import Slices
from cyxtrain.world.world import World

_LOSS = "loss"
_CORRECT = ""  # the column of correct predictions: a loss may also return an "accuracy"


class Correct(NamedTuple):
    """Numbers of correct predictions, and of predictions that are counted, in a batch."""

    correct: Number
    counted: Number


class SliceMetrics(Metrics):
    """Metrics of a fit with virtual ranks: each slice has its own, and their states are merged by its number.

    So the result does not depend on the ranks.
    """

    def __init__(self, metrics: Metrics, slices: Slices) -> None:
        super().__init__(metrics.copy()._metrics, metrics.whole_sets)
        self._slices = slices
        self._by_slice: dict[int, Metrics] = {}

    @override
    def add(self, output: Any, target: Any, rows: int, row: int = 0) -> None:
        if not self:
            return
        if row not in self._by_slice:
            self._by_slice[row] = super().copy()
        self._by_slice[row].add(output, target, rows)

    def _merged(self, states: Mapping[int, Mapping[str, Any]]) -> Metrics:
        merged = super().copy()
        merged.merge([states[number] for number in sorted(states)])
        return merged

    def _own_states(self) -> dict[int, dict[str, Any]]:
        return {number: metrics.state() for number, metrics in self._by_slice.items()}

    @override
    def lazy_values(self) -> dict[str, Callable[[], float]]:
        return self._merged(self._own_states()).lazy_values()

    @override
    def cheap_values(self) -> dict[str, float]:
        pairs = [metrics.cheap_pairs() for metrics in self._by_slice.values()]
        names = dict.fromkeys(name for each in pairs for name in each)
        sums = {name: [sum(numbers) for numbers in zip(*(each[name] for each in pairs), strict=True)] for name in names}
        return {name: mean_of(pair) for name, pair in sums.items()}

    @override
    def over_ranks(self, world: World) -> dict[str, float]:
        states: dict[int, dict[str, Any]] = {}
        for of_rank in world.gather_json(self._own_states()):
            states |= {int(number): state for number, state in of_rank.items()}
        # The same states, in the same order, on every rank.
        return self._merged(states).over_ranks(world.alone())

    @override
    def state(self) -> dict[str, Any]:
        return {"slices": self._own_states()}

    @override
    def merge(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Continue with the states of this rank's slices, among those of all ranks of a checkpoint."""
        for state in states:
            for number, of_slice in state.get("slices", {}).items():
                if int(number) in self._slices.owned:
                    self._by_slice[int(number)] = self._merged({0: of_slice})


class MetricSums:
    """Sums of losses and metrics: one row for a running epoch, or one row per batch, or per slice of each step."""

    def __init__(self, rows: int, loss: Loss, metrics: Metrics, slices: Slices | None = None) -> None:
        self.metrics = metrics.copy() if slices is None else SliceMetrics(metrics, slices)
        self._numbers = Accumulator([_LOSS, _CORRECT, *loss.shown], rows)
        self._loss = loss

    def add(self, row: int, loss: BatchLoss, correct: Correct) -> None:
        """Add a batch to a row, without waiting for an accelerator."""
        add = self._numbers.add
        add(_LOSS, loss.value, loss.weight, sum_factor=loss.sum_factor, row=row)
        add(_CORRECT, correct.correct, correct.counted, sum_factor=1.0, row=row)
        for name in self._loss.shown:
            part = loss.parts[name]
            add(name, part.value, part.weight, sum_factor=part.sum_factor, row=row)

    @property
    def shown(self) -> list[str]:
        """The names of the numbers that the table has besides loss and accuracy."""
        return [*self._loss.shown]

    def restore(
        self, table: Sequence[Sequence[float]], names: Sequence[str] | None, logged: list[dict[str, Any]]
    ) -> None:
        """Start with an earlier table of numbers with these names; None: the same names as now.

        Numbers keep their names: numbers that are new here are moved from `logged`, others to it.
        """
        shown = self.shown
        if names is None:  # an older checkpoint has none
            names = shown
        columns = [_LOSS, _CORRECT, *names]
        require(
            len(table[0]) == 2 * len(columns) and ([*names] == shown or not self._loss.weightings),
            f"it has the sums of other losses or numbers ({', '.join(names) or 'none'}) than this program "
            f"({', '.join(shown) or 'none'}): return the same, or resume from the end of an epoch.",
        )
        for number, row in enumerate(table):
            sums = dict(zip(columns, zip(row[::2], row[1::2], strict=True), strict=True))
            for name in names:
                if name not in shown:
                    logged.append({name: ["mean", None, [*sums[name]]]})
            for state in logged:
                for name in state.keys() & {*shown}:
                    sums[name] = joined("mean", sums.get(name, (0.0, 0.0)), state.pop(name)[2])
            pairs = {name: ("mean", sums.get(name, (0.0, 0.0))) for name in self._numbers.names}
            self._numbers.load(pairs, number)

    def table(self) -> Tensor:
        """The sums so far, shape (rows, 4 + ...), float64, on the CPU; waits for an accelerator."""
        return self._numbers.table()

    def over_ranks(self, world: World) -> dict[str, float]:
        """Return loss, accuracy and metrics over the ranks of a world; collective."""
        return _measured(self._numbers.over(world), self._loss) | self.metrics.over_ranks(world)

    def lazy_values(self) -> dict[str, Callable[[], float]]:
        """Return functions that calculate loss, accuracy (unless nothing counted) and each metric of this rank."""
        measured = _measured(self._numbers.pairs(), self._loss)
        if math.isnan(measured.get("accuracy", 0.0)):
            del measured["accuracy"]
        return {name: functools.partial(float, value) for name, value in measured.items()} | self.metrics.lazy_values()

    def cheap_values(self) -> dict[str, float]:
        """Return this rank's loss, accuracy and means; on an accelerator of the call before, without waiting."""
        pairs = self._numbers.lately()
        # The first call on an accelerator begins the copies of all of them.
        means = self.metrics.cheap_values()
        if not pairs:
            return {}
        return _measured(pairs, self._loss) | means


def _measured(pairs: Mapping[str, Pair], loss: Loss) -> dict[str, float]:
    """Return the loss, the accuracy (if targets are classes; NaN if none counted) and a loss's other numbers."""
    shown = {name: _number_by(loss.weightings.get(name), pairs[name]) for name in loss.shown}
    found = {_LOSS: _number_by(loss.weighting, pairs[_LOSS])}
    if loss.weightings:
        found[_LOSS] = loss.combined(shown, {name: pairs[name][1] for name in shown})
    if loss.accuracy is not None:
        found["accuracy"] = mean_of(pairs[_CORRECT])
    return {**found, **shown}


def _number_by(weighting: Weighting | None, pair: Pair) -> float:
    return number_of("sum" if weighting is Weighting.NOTHING else "mean", pair)


def correct_of(output: Any, target: Tree | None, loss: Loss) -> Correct:
    """Return the numbers of correct predictions in an output; zeros if targets are not classes."""
    found = predicted_classes(output, target, loss)
    if found is None:
        return Correct(0, 0)
    predicted, classes, _ = found
    right = predicted == classes
    if loss.is_binary or loss.ignored is None:
        return Correct(right.sum(), classes.numel())
    valid = classes != loss.ignored
    return Correct((right & valid).sum(), valid.sum())


def predicted_classes(output: Any, target: Tree | None, loss: Loss) -> tuple[Tensor, Tensor, int] | None:
    """Return the predicted classes, the right ones and their number; None if targets are not classes."""
    if loss.accuracy is None:
        return None
    pair = loss.accuracy.pair(output, target)
    if pair is None:
        return None
    scores, classes = pair
    if loss.is_binary:
        return scores.reshape(classes.shape) > loss.threshold, classes > 0.5, 2
    return scores.argmax(1), classes, scores.shape[1]
