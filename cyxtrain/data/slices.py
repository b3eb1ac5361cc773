"""Which part of each step a rank works on: a value, from which a step can be divided anew."""

from __future__ import annotations

import dataclasses

from cyxtrain.world.world import World


@dataclasses.dataclass(frozen=True)
class Slices:
    """The division of each step into `count` slices; a rank works on the slices in `owned`.

    The samples and the random numbers of a slice depend on its number, not on the rank that owns it.
    """

    count: int = 1
    owned: range = range(1)

    @classmethod
    def of(cls, world: World, count: int | None = None) -> Slices:
        """Divide `count` slices, one per rank by default, among the ranks: neighbouring ones to each."""
        if count is None:
            count = world.size
        first = -(-count * world.rank // world.size)
        end = -(-count * (world.rank + 1) // world.size)
        return cls(count, range(first, end))
