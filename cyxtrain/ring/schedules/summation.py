"""The order of summation, once: a pure function of (number of leaves, element count, bytes per element).

A leaf is one rank's contribution. Up to 256 KiB, all elements are summed by one binary tree. More elements are cut into
as many chunks as there are leaves, and each chunk is summed along the ring of leaves. (The sum of two leaves is the
same both ways.) Messages, shared memory and small reductions move elements in different ways, and all add them up in
this order: every rank gets the same bits.
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

Span = tuple[int, int]
Spans = tuple[Span, ...]
Addition = tuple[int, int]
"""(into, source): leaf `into` becomes `into + source`; of two NaNs the first operand's stays."""


class RowSum(NamedTuple):
    """A mean over rows, of which a rank may have several; they are counted from 0, in the order of the ranks."""

    num_rows: tuple[int, ...]  # by rank
    additions: tuple[Addition, ...]  # they leave the sum in row 0
    divisor: int


FEW_BYTES = 1 << 18
"""Up to this size latency decides how long a reduction takes, above it bandwidth."""


@functools.lru_cache(maxsize=256)
def chunks(count: int, parts: int) -> Spans:
    """Return `parts` consecutive spans that cover 0..count, as even as possible."""
    bounds = [count * part // parts for part in range(parts + 1)]
    return tuple(itertools.pairwise(bounds))


def is_latency_bound(leaves: int, count: int, item_bytes: int) -> bool:
    """Return whether latency decides: then every rank sums all elements."""
    return leaves > 1 and count * item_bytes <= FEW_BYTES


def summation_order(leaves: int, count: int, item_bytes: int, chunk: int) -> tuple[Addition, ...]:
    """Return the additions that sum one of `chunks(count, leaves)`, in order; the last one's first leaf has the sum."""
    if is_latency_bound(leaves, count, item_bytes):
        return binary_tree(leaves)
    return along_ring(leaves, chunk)


@functools.cache
def binary_tree(leaves: int) -> tuple[Addition, ...]:
    """Add up neighbours, then neighbouring pairs, and so on; a leaf without a neighbour joins in a later round."""
    additions = []
    distance = 1
    while distance < leaves:
        for into in range(0, leaves - distance, 2 * distance):
            additions.append((into, into + distance))
        distance *= 2
    return tuple(additions)


@functools.cache
def along_ring(leaves: int, chunk: int) -> tuple[Addition, ...]:
    """Add up from leaf `chunk` + 1 around to leaf `chunk`, which then has the sum."""
    path = [(chunk + 1 + distance) % leaves for distance in range(leaves)]
    return tuple((into, source) for source, into in itertools.pairwise(path))
