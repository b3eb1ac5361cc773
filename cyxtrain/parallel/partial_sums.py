"""The memory of a bucket: a row for each sum of slices that a rank has, and the flags at the end of each row.

A rank adds its slices up as they come, in the order of the tree that `world/slices.py` describes. Without virtual ranks
it has one slice, and one row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
    """The sums of the slices that this rank has in a step: a binary counter of rows.

    Args:
        slices: Those that this rank owns.
        rows: Where the sums are at the end of a step, as `rows_of`.
        make_row: Returns memory for a sum that is added to another one within the step.

    Attributes:
        number: The running slice.
        adds: Whether the running slice is added to earlier ones.
    """

    def __init__(self, slices: Slices, rows: Sequence[BucketRow], make_row: Callable[[], BucketRow]) -> None:
        self._slices = slices
        self._lasting = dict(zip(rows_of(slices), rows, strict=True))
        self._spare: list[BucketRow] = []
        self._make_row = make_row
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the sums, and begin the first slice."""
        self._sums: dict[int, BucketRow] = {}
        self.number = self._slices.owned.start
        self._begin_slice()

    def _begin_slice(self) -> None:
        number = self.number
        # The first addition is that of the running slice, and each further one adds the sum before.
        into = [into for into, _ in additions_after(number, self._slices)]
        self._smaller = [self._sums.pop(place) for place in into[:-1]]
        if into:
            self._largest = self._sums[into[-1]]
        else:
            self._largest = self._lasting.get(number) or self._unused_row()
            self._sums[number] = self._largest
        self.adds = bool(into)

    def _unused_row(self) -> BucketRow:
        return self._spare.pop() if self._spare else self._make_row()

    def place_of(self, slot: int) -> Tensor:
        """Return the place of a gradient in the largest sum that is complete with the running slice."""
        return self._largest.views[slot]

    def add(self, slot: int, gradient: Tensor | float) -> None:
        """Add a gradient of the running slice, or 0.0 for none, to all sums that are complete with it.

        While it is in the caches: none is read again at the end of the slice.
        """
        smaller = [row.views[slot] for row in self._smaller]
        self._add_to(self._largest.views[slot], smaller, gradient)

    @property
    def flags(self) -> BucketFlags:
        """Those of the largest sum; of the running slice, unless it `adds`."""
        return self._largest.flags

    def add_flags(self, flags: Tensor) -> None:
        """Add the flags of the running slice."""
        smaller = [row.flags.numbers for row in self._smaller]
        self._add_to(self.flags.numbers, smaller, flags)

    def _add_to(self, largest: Tensor, smaller: Sequence[Tensor], numbers: Tensor | float) -> None:
        for each in smaller:
            numbers = each + numbers  # not in place: gradients of two parameters may share memory
        if self.adds:
            largest.add_(numbers)  # also 0.0: -0.0 becomes 0.0, as where zeros are stored and added
        elif isinstance(numbers, Tensor):
            largest.copy_(numbers)
        else:
            largest.fill_(numbers)

    def next_slice(self) -> None:
        """Begin the next slice."""
        self._spare += self._smaller
        self.number += 1
        self._begin_slice()


def _slot(flat: Tensor, offset: int, parameter: nn.Parameter) -> Tensor:
    """Return the parameter's place, with its strides if its memory is dense, as autograd wants them."""
    count = parameter.numel()
    place = flat[offset : offset + count]
    if parameter.is_contiguous() or not torch.ops.aten.is_non_overlapping_and_dense(parameter):
        return place.view(parameter.shape)
    return place.as_strided(parameter.shape, parameter.stride(), place.storage_offset())
