"""Metrics of a fit with virtual ranks: a state per slice, so that their result does not depend on the ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from typing_extensions import override

from cyxtrain.metrics.accumulator import mean_of
from cyxtrain.metrics.metric import Metrics
from cyxtrain.world.slices import Slices
from cyxtrain.world.world import World


class SliceMetrics(Metrics):
    """Metrics of which each slice of this rank has its own; the states of all slices are merged by their numbers."""

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
