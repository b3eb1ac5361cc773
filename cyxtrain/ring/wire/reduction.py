"""A reduction at work: few bytes by a tree, more in chunks of which each rank reduces one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from cyxtrain.ring.schedules import algorithms
from cyxtrain.ring.schedules.algorithms import ReadReduce, Spans, Step
from cyxtrain.ring.schedules.selector import AlgorithmSelector, few
from cyxtrain.ring.wire.frames import Reduction
from cyxtrain.ring.wire.kernels import Combiner, Scratch, divide, silent_numpy
from cyxtrain.ring.wire.transfers import Buffers


class Runner(Protocol):
    """Runs a schedule of the operation, as `Executor.run` does."""

    def __call__(self, schedule: Sequence[Step], buffers: Buffers, *, more: bool = False) -> None:
        """Does this rank's part."""


class Reducing:
    """A reduction of `flat`, in place.

    Args:
        reduction: How elements are combined.
        flat: One-dimensional.
        combiner: Of `flat` and the scratch.
        scratch: Where things arrive.
        routes: Which schedules to take.
        run: Runs them.
    """

    def __init__(
        self,
        reduction: Reduction,
        flat: Tensor,
        combiner: Combiner,
        scratch: Scratch,
        routes: AlgorithmSelector,
        run: Runner,
    ) -> None:
        self._flat = flat
        self._memory = combiner.memory
        self._item_bytes = flat.element_size()
        self._combiner = combiner
        self._scratch = scratch
        self._routes = routes
        self._run = run
        self._averages = reduction is Reduction.AVG
        self.is_few = few(routes.world_size, flat.numel(), self._item_bytes)

    def all(self, rest: Callable[[Spans], Sequence[Step]]) -> None:
        """Reduces all of it, the way that its size asks for.

        Args:
            rest: Returns what brings the spans, by rank, to where they are wanted; few elements are on every rank.
        """
        if self.is_few:
            self.by_tree()
        else:
            spans = algorithms.chunks(self._flat.numel(), self._routes.world_size)
            self.by_chunks(spans, rest(spans))

    def by_tree(self) -> None:
        """Leaves all of it reduced on every rank, in as few rounds as can be."""
        count, routes = self._flat.numel(), self._routes
        if routes.tells_all(count, self._item_bytes):
            collecting, spreading = routes.meeting(count)
            self._run([collecting], Buffers(self._memory, self._scratch.memory, self._item_bytes))
            if routes.sums:
                with silent_numpy():
                    self._combiner.combine_rows(routes.rank, algorithms.tree(routes.world_size))
            self._run([spreading], self._buffers())
        else:
            self._run(algorithms.recursive_doubling(routes.rank, routes.world_size, count), self._buffers())
        if self._averages:
            divide(self._flat, routes.world_size)

    def by_chunks(self, spans: Spans, rest: Sequence[Step] | None = None) -> None:
        """Leaves this rank's span reduced, and the others half done; then brings them where `rest` says."""
        buffers = self._buffers()
        with silent_numpy():
            self._run(self._routes.reduce_scatter(spans, self._item_bytes), buffers, more=rest is not None)
        if self._averages:
            divide(self._flat[slice(*spans[self._routes.rank])], self._routes.world_size)
        if rest is not None:
            self._run(rest, buffers)

    def by_folding(self, source: memoryview, spans: Spans) -> None:
        """Leaves this rank's span of all sources reduced; it is what was there.

        Args:
            source: What others read; it does not change.
            spans: By rank, in elements of the source.
        """
        *offers, fold = algorithms.folding(self._routes.rank, self._routes.world_size, spans)
        assert isinstance(fold, ReadReduce)
        buffers = self._buffers()._replace(source=source)
        with silent_numpy():
            self._run([*offers, fold._replace(span=(0, self._flat.numel()))], buffers)
        if self._averages:
            divide(self._flat, self._routes.world_size)

    def _buffers(self) -> Buffers:
        return Buffers(self._memory, self._memory, self._item_bytes, self._combiner, self._scratch.memory)
