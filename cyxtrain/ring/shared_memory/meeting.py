"""How ranks that share memory wait for each other: with a core per rank by progress counters, otherwise by frames."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cyxtrain.ring.schedules.selector import AlgorithmSelector
from cyxtrain.ring.wire.persistent import Exchange, PersistentOperation, publish


class Meeting:
    """Where all ranks wait for each other, again and again, during an operation.

    `words` are those of every rank's progress counter, by rank, and `what` distinguishes operations that share them.
    The `header` has no payload. Each operation meets an even number of times, and answers at its end.
    """

    def __init__(
        self, header: PersistentOperation, selector: AlgorithmSelector, words: Sequence[memoryview], what: int = 0
    ) -> None:
        others = [peer for peer in range(selector.world_size) if peer != selector.rank]
        self.header = header
        # Of the other ranks; empty: ranks exchange frames.
        self.counters = (
            [header.counter(selector.rank, peer, words) for peer in others] if selector.uses_counters else []
        )
        self._published = words[selector.rank]
        self._what = what

    def all_here(self) -> tuple[Exchange, ...]:
        """Return the exchanges to wait for, until all ranks are as far as this one; none: they are."""
        if not self.counters:
            return self.header.barrier
        count = publish(self._published, self._what)
        missing = tuple(counter for counter in self.counters if not counter.has_reached(count))
        return (Exchange((), missing),) if missing else ()

    def answer(self) -> Iterator[Exchange]:
        """Take the frames of the ranks that asked, during this operation, whether this rank is in it too."""
        sequence = self.header.sequence
        asked = tuple(counter.probe_frame for counter in self.counters if counter.has_asked(sequence))
        if asked:
            yield Exchange((), asked)
