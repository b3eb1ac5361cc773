"""Which part of each step a rank works on: a value, from which a step can be divided anew."""

from __future__ import annotations

import dataclasses

from cyxtrain.world.world import World


@dataclasses.dataclass(frozen=True)
class Slices:
    """Each step is divided into `count` slices, of which a rank works on those that it has `owned`.

    The rows and the random numbers of a slice depend on its number, not on the rank that owns it.
    """

    count: int = 1
    owned: range = range(1)

    @classmethod
    def of(cls, world: World, count: int | None = None) -> Slices:
        """Divide `count` slices, one per rank by default, among the ranks: neighbouring ones to each."""
        count = world.size if count is None else count
        first, end = (-(-count * rank // world.size) for rank in (world.rank, world.rank + 1))
        return cls(count, range(first, end))
