"""Reductions as stages that an executor runs: by doubling, or in chunks of which each rank reduces one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from cyxtrain.ring.schedules import algorithms
from cyxtrain.ring.schedules.algorithms import Step
from cyxtrain.ring.schedules.kernels import Combiner, Reduction, Scratch, divide
from cyxtrain.ring.schedules.selector import AlgorithmSelector
from cyxtrain.ring.schedules.summation import Spans, chunks, is_latency_bound


class Buffers(NamedTuple):
    """The memory that a schedule works on, in bytes."""

    source: memoryview
    target: memoryview  # the same as `source` for reductions
    item_bytes: int  # a schedule counts elements
    combiner: Combiner | None = None  # of target and scratch; None: nothing is reduced
    scratch: memoryview | None = None


class Stage(NamedTuple):
    """A part of an operation: one schedule on some memory."""

    schedule: Sequence[Step]
    buffers: Buffers


class ReductionPlan:
    """The stages that reduce a flat tensor in place; `combiner` combines it with the scratch."""

    def __init__(
        self,
        reduction: Reduction,
        flat: Tensor,
        combiner: Combiner,
        scratch: Scratch,
        selector: AlgorithmSelector,
    ) -> None:
        self._flat = flat
        self._memory = combiner.memory
        self._item_bytes = flat.element_size()
        self._combiner = combiner
        self._scratch = scratch
        self._selector = selector
        self._averages = reduction is Reduction.AVG
        self.is_latency_bound = is_latency_bound(selector.world_size, flat.numel(), self._item_bytes)

    def stages(self, rest: Callable[[Spans], Sequence[Step]]) -> Iterator[Stage]:
        """Reduce every element, by doubling or by chunks, whichever suits the size.

        Doubling leaves all on every rank; `rest` returns the schedule that moves reduced spans, by rank, to where they
        belong.
        """
        if self.is_latency_bound:
            return self.by_doubling()
        spans = chunks(self._flat.numel(), self._selector.world_size)
        return self.by_chunks(spans, rest(spans))

    def by_doubling(self) -> Iterator[Stage]:
        """Leave all elements reduced on every rank, in as few rounds as possible."""
        world_size = self._selector.world_size
        schedule = algorithms.recursive_doubling(self._selector.rank, world_size, self._flat.numel())
        yield Stage(schedule, self._buffers())
        if self._averages:
            divide(self._flat, world_size)

    def by_chunks(self, spans: Spans, rest: Sequence[Step] | None = None) -> Iterator[Stage]:
        """Leave this rank's span reduced and the others partial; then move the spans by the schedule `rest`."""
        rank = self._selector.rank
        world_size = self._selector.world_size
        buffers = self._buffers()
        yield Stage(algorithms.reduce_scatter(rank, world_size, spans), buffers)
        if self._averages:
            divide(self._flat[slice(*spans[rank])], world_size)
        if rest is not None:
            yield Stage(rest, buffers)

    def _buffers(self) -> Buffers:
        return Buffers(self._memory, self._memory, self._item_bytes, self._combiner, self._scratch.memory)
