"""A barrier of ranks that share memory: by progress counters if each rank has a core, otherwise by frames."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cyxtrain.ring.schedules.selector import AlgorithmSelector
from cyxtrain.ring.wire.persistent import Exchange, PersistentOperation, ProgressCounter, publish


class SharedMemoryBarrier:
    """A barrier at which all ranks arrive again and again during an operation.

    `words` has each rank's own words, by rank; `digest` tells apart operations that share them. The `operation` has no
    payload. Each operation arrives an even number of times, and answers probes at its end.
    """

    def __init__(
        self, operation: PersistentOperation, selector: AlgorithmSelector, words: Sequence[memoryview], digest: int = 0
    ) -> None:
        self.operation = operation
        self.counters: list[ProgressCounter] = []
        """The progress counters of the other ranks; none if ranks exchange frames."""
        if selector.uses_counters:
            others = [peer for peer in range(selector.world_size) if peer != selector.rank]
            self.counters = [operation.counter(selector.rank, peer, words) for peer in others]
        self._published = words[selector.rank]
        self._digest = digest

    def arrive(self) -> tuple[Exchange, ...]:
        """Arrive; return the exchanges after which all ranks have arrived, none if they already have."""
        if not self.counters:
            return self.operation.barrier
        count = publish(self._published, self._digest)
        missing = tuple(counter for counter in self.counters if not counter.expect_count(count))
        return (Exchange((), missing),) if missing else ()

    def answer_probes(self) -> Iterator[Exchange]:
        """Receive the frames of the ranks that probed whether this rank is in the same operation."""
        sequence = self.operation.sequence
        probes = tuple(counter.probe_frame for counter in self.counters if counter.has_asked(sequence))
        if probes:
            yield Exchange((), probes)
