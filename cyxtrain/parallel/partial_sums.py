"""The memory of a bucket: a row for each sum that a rank has at the end of a step, with flags at the end of the row.

A rank adds its slices up as they come, in the order of the tree that `world/slices.py` describes. Without virtual ranks
it has one slice, and one row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from cyxtrain.parallel.layout import BucketSpec
from cyxtrain.parallel.synchronization import Synchronization
from cyxtrain.ring import DIGITS
from cyxtrain.world.slices import Slices, additions_after, rows_of

WEIGHT = slice(-1 - DIGITS, -1)
"""Its digits among the flags of the last bucket."""


class BucketFlags:
    """What follows the gradients in a bucket: unused parameters, absent slice; in the last one signals, weight, loss.

    Attributes:
        numbers: All of them.
        real: The same, as real numbers.
    """

    def __init__(self, numbers: Tensor, spec: BucketSpec) -> None:
        self.numbers = numbers
        self.real = numbers.real if numbers.is_complex() else numbers
        self._count = len(spec.parameters)
        self.weight = self.real[WEIGHT]
        self._signals: Tensor | None = None
        self._loss: Tensor | None = None
        if spec.num_signals:
            first_signal = self._count + 1
            self._signals = numbers[first_signal : first_signal + spec.num_signals]
            self._loss = numbers[-1]

    def write(self, ready: Sequence[bool] | None, sent: Synchronization, *, absent: bool) -> None:
        """Write those of a slice, which has the gradients that are `ready`; None: all.

        The unused parameters of a slice that is `absent` (no samples) do not count.
        """
        self.numbers.zero_()
        if absent:
            self.numbers[self._count] = 1
        elif ready is not None:
            unused = [0.0 if each else 1.0 for each in ready]
            self.numbers[: self._count] = torch.tensor(unused, device=self.numbers.device)
        if self._signals is not None and any(sent.signals):
            self._signals.copy_(torch.tensor(sent.signals, device="cpu"))
        if self._loss is None:
            return
        if sent.loss is not None:
            torch.sub(sent.loss, sent.loss, out=self._loss)  # 0 or NaN, without waiting for the device
        if sent.weight is not None:
            self.weight.copy_(sent.weight.digits(self.weight.device), non_blocking=True)


class BucketRow:
    """A flat tensor in the layout of a bucket.

    Attributes:
        numbers: Gradients, then flags.
        views: The places of the gradients, in the shapes of their parameters.
    """

    def __init__(self, numbers: Tensor, spec: BucketSpec, parameters: Sequence[nn.Parameter]) -> None:
        self.numbers = numbers
        self.flags = BucketFlags(numbers[spec.flags_offset :], spec)
        self.views = [_slot(numbers, offset, each) for offset, each in zip(spec.offsets, parameters, strict=True)]


class PartialSums:
    """The sums of the slices that this rank has in a step: a binary counter.

    A sum has a number for each gradient, and the flags at its end; 0.0: no slice of it has that gradient. Sums that the
    step is left with are in rows of the bucket; others, which are added to those within the step, are the gradients
    themselves as autograd has made them.

    Args:
        slices: Those that this rank owns.
        rows: Where the sums are at the end of a step, as `rows_of`.

    Attributes:
        number: The running slice.
    """

    def __init__(self, slices: Slices, rows: Sequence[BucketRow]) -> None:
        self._slices = slices
        self._num_places = len(rows[0].views) + 1
        self._lasting = {
            number: [*row.views, row.flags.numbers] for number, row in zip(rows_of(slices), rows, strict=True)
        }
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the sums, and begin the first slice."""
        self._sums: dict[int, list[Tensor | float]] = {}
        self.number = self._slices.owned.start
        self._begin_slice()

    def next_slice(self) -> None:
        """Begin the next slice."""
        self.number += 1
        self._begin_slice()

    def _begin_slice(self) -> None:
        # The first addition is that of the running slice, and each further one adds the sum before.
        into = [into for into, _ in additions_after(self.number, self._slices)]
        self._smaller = [self._sums.pop(place) for place in into[:-1]]
        self._is_added = bool(into)
        largest = into[-1] if into else self.number
        self._places = self._lasting.get(largest)
        self._largest = self._sums.setdefault(largest, [0.0] * self._num_places)

    def place_of(self, place: int) -> Tensor | None:
        """Return where in the bucket the sum of a gradient is; None: it is not there."""
        return None if self._places is None else self._places[place]

    def add(self, place: int, numbers: Tensor | float) -> None:
        """Add a gradient of the running slice, or 0.0 for none, to all sums that are complete with it.

        Now, while it is in the caches: it is not read again at the end of the slice. It must not be modified later.
        """
        # Not in place: the gradients of two parameters may share memory.
        for each in self._smaller:
            numbers = each[place] + numbers
        if self._places is None:
            self._largest[place] = self._largest[place] + numbers if self._is_added else numbers
        elif self._is_added:
            self._places[place].add_(numbers)  # also 0.0: -0.0 becomes 0.0, as where zeros are stored and added
        elif isinstance(numbers, Tensor):
            self._places[place].copy_(numbers)
        else:
            self._places[place].fill_(numbers)


def _slot(flat: Tensor, offset: int, parameter: nn.Parameter) -> Tensor:
    """Return the parameter's place, with its strides if its memory is dense, as autograd wants them."""
    count = parameter.numel()
    place = flat[offset : offset + count]
    if parameter.is_contiguous() or not torch.ops.aten.is_non_overlapping_and_dense(parameter):
        return place.view(parameter.shape)
    return place.as_strided(parameter.shape, parameter.stride(), place.storage_offset())
