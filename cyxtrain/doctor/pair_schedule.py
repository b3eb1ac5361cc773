"""Which pair is tried when: every pair once, and no rank in two at a time."""

from __future__ import annotations

from collections.abc import Sequence

RankPair = tuple[int, int]
"""Two ranks, the lower one first."""


def rounds(ranks: Sequence[int]) -> list[list[RankPair]]:
    """Returns the pairs in rounds: each pair exactly once, each rank at most once in a round.

    N - 1 rounds for an even number of ranks, N for an odd one, in each of which one rank has nobody.
    Source: the circle method; Kirkman, On a problem in combinations (1847).

    Args:
        ranks: Who is there, each once.
    """
    circle: list[int | None] = sorted(ranks)  # type: ignore[assignment]
    if len(circle) % 2:
        circle.append(None)  # whoever meets nobody has a pause
    found: list[list[RankPair]] = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        facing = zip(circle[:half], reversed(circle[half:]), strict=True)
        found.append([(min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return found


def partner(rank: int, pairs: Sequence[RankPair]) -> int | None:
    """Returns whom a rank meets in a round; None: nobody."""
    for low, high in pairs:
        if rank in (low, high):
            return high if rank == low else low
    return None
