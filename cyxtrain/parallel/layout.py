"""Which gradients are exchanged together: pure arithmetic, fixed when the wrapper is made.

A bucket is one flat tensor: the gradients of some parameters, then a flag per parameter, which is 1 on a rank that has
not used it, and one that is 1 on a rank without samples; in the last bucket, then, the ranks' signals. All are averaged
with the gradients, so that all ranks know who used what, and what others signal, without another message. The digits of
the weight of the rank's loss follow, if the data decide it. The very last number is 0, and NaN on a rank whose loss is
not finite: the average is then NaN on every rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from cyxtrain.ring import DIGITS

_FIRST_BUCKET_BYTES = 1 << 20  # the first bucket is small, so that communication begins early in backward
NUM_SIGNALS = 5  # numbers that each rank signals to all others in a synchronisation


@dataclass(frozen=True)
class ParameterSpec:
    """The layout's view of a parameter: its number of elements, dtype and device."""

    count: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class BucketSpec:
    """The indices of a bucket's parameters, and where each begins in its flat tensor."""

    parameters: tuple[int, ...]
    offsets: tuple[int, ...]
    flags_offset: int  # the first flag, after the gradients; one per parameter and one more
    dtype: torch.dtype
    device: torch.device
    num_signals: int = 0  # signals that follow the flags, and then weight and loss; 0: none of them

    @property
    def count(self) -> int:
        """Elements of the flat tensor, flags and signals included."""
        return self.flags_offset + self.num_flags

    @property
    def num_flags(self) -> int:
        """Elements after the gradients."""
        of_parameters = len(self.parameters) + 1
        if not self.num_signals:
            return of_parameters
        return of_parameters + self.num_signals + DIGITS + 1


def bucket_layout(
    parameters: Sequence[ParameterSpec], bucket_bytes: int, num_signals: int = NUM_SIGNALS
) -> list[BucketSpec]:
    """Return the buckets in the order in which they are launched.

    Parameters are taken from the last to the first, about the order in which backward makes gradients. A bucket is
    closed when it has reached its size, so that one large parameter does not wait for small ones; the first one of each
    kind is closed at 1 MiB.
    """
    finished: list[tuple[int, list[int]]] = []
    open_buckets: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    open_bytes: dict[tuple[torch.dtype, torch.device], int] = {}
    limits: dict[tuple[torch.dtype, torch.device], int] = {}
    for index in reversed(range(len(parameters))):
        spec = parameters[index]
        kind = (spec.dtype, spec.device)
        open_buckets.setdefault(kind, []).append(index)
        open_bytes[kind] = open_bytes.get(kind, 0) + spec.count * spec.dtype.itemsize
        if open_bytes[kind] >= limits.get(kind, min(bucket_bytes, _FIRST_BUCKET_BYTES)):
            finished.append((index, open_buckets.pop(kind)))
            open_bytes[kind] = 0
            limits[kind] = bucket_bytes
    finished += [(bucket[-1], bucket) for bucket in open_buckets.values()]
    # By the parameter that is ready last: the order in which buckets fill.
    finished.sort(key=lambda item: -item[0])
    buckets = [_bucket(indices, parameters) for _, indices in finished]
    if buckets:
        buckets[-1] = replace(buckets[-1], num_signals=num_signals)
    return buckets


def _bucket(indices: list[int], parameters: Sequence[ParameterSpec]) -> BucketSpec:
    *offsets, end = itertools.accumulate((parameters[index].count for index in indices), initial=0)
    first = parameters[indices[0]]
    return BucketSpec(tuple(indices), tuple(offsets), end, first.dtype, first.device)
