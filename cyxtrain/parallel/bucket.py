"""A bucket of gradients: filled in backward, exchanged, and given back as averages."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cyxtrain.errors import DistributedTrainingError
from cyxtrain.parallel.exchange import (
    AllReduceExchange,
    CommHookExchange,
    GradientExchange,
    SharedMemoryExchange,
    SliceExchange,
    padded,
)
from cyxtrain.parallel.layout import BucketSpec
from cyxtrain.parallel.partial_sums import WEIGHT, BucketFlags, BucketRow, PartialSums
from cyxtrain.parallel.synchronization import Synchronization
from cyxtrain.ring import MeanWeight, SharedGradientBuffer
from cyxtrain.world.slices import Slices, rows_of

GradientObserver = Callable[[int, str, Tensor], None]
"""Called with the number of a slice, the name of a parameter, and its gradient in that slice."""
STEP_LATER = (
    "The replicas would differ. Call optimizer.step() after backward, when .grad is the average; a hook may look at a "
    "gradient, not use it up."
)


class Bucket:
    """Gradients that are exchanged together; PyTorch's comm hooks get it as a GradBucket.

    Args:
        spec: What it has.
        parameters: Those of the model, with names.
        index: Its number.
        last: Whether it is the last one.
        slices: Those whose gradients it adds up.
        shared_buffer: Memory that all ranks share.
        as_view: Whether `.grad` becomes its place in the bucket.
    """

    def __init__(
        self,
        spec: BucketSpec,
        parameters: Sequence[tuple[str, nn.Parameter]],
        index: int,
        last: bool,
        slices: Slices,
        shared_buffer: SharedGradientBuffer | None = None,
        *,
        as_view: bool = False,
    ) -> None:
        self.names = [parameters[i][0] for i in spec.parameters]
        self._parameters = [parameters[i][1] for i in spec.parameters]
        self._spec = spec
        self._as_view = as_view
        self._slices = slices
        self.observer: GradientObserver | None = None
        """What sees each gradient before it is added up."""
        self.received: list[float] = []
        """In the last bucket: the mean over slices of each signal, in the latest synchronisation."""
        self.losses_are_finite = True  # in the last bucket: whether the losses of all slices were
        self._gradients_end = spec.flags_offset
        self._index = index
        self._last = last
        self._own_flags = BucketFlags(torch.zeros(spec.num_flags, dtype=spec.dtype, device=spec.device), spec)
        self.exchange: GradientExchange
        if shared_buffer is None:
            self._exchange_by_messages()
        else:
            self._lay_out(shared_buffer.rows)
            is_mean_of_ranks = not slices.is_virtual
            self.exchange = SharedMemoryExchange(shared_buffer, self._gradients_end, is_mean_of_ranks=is_mean_of_ranks)
        self.clear()

    def _exchange_by_messages(self) -> None:
        spec = self._spec
        count = padded(spec.count, self._slices)
        rows = [torch.zeros(count, dtype=spec.dtype, device=spec.device) for _ in rows_of(self._slices)]
        self._lay_out([row[: spec.count] for row in rows])
        if self._slices.is_virtual:
            self.exchange = SliceExchange(rows, self.numbers, self._gradients_end, self._slices, self._slices.count)
        else:
            self.exchange = AllReduceExchange(self.numbers, self._gradients_end)

    def _lay_out(self, rows: Sequence[Tensor]) -> None:
        """Put the sums of slices into rows of memory; the first one receives the average."""
        self._result = self._row(rows[0])
        self.numbers = self._result.numbers
        others = [self._row(row) for row in rows[1:]]
        self._sums = PartialSums(self._slices, [self._result, *others])

    def _row(self, numbers: Tensor) -> BucketRow:
        return BucketRow(numbers, self._spec, self._parameters)

    @property
    def flags(self) -> Tensor:
        """For each parameter the share of slices that have not used it; that of absent ones; signals; weight; loss."""
        return self._result.flags.real

    def change_group(self) -> None:
        """Leave the memory that the ranks of an earlier group share."""
        if isinstance(self.exchange, SharedMemoryExchange):
            self.exchange.abandon()
            numbers = self.numbers
            self._exchange_by_messages()
            self.numbers.copy_(numbers)

    def clear(self) -> None:
        """Begin a new synchronisation; an interrupted one, which uses the same memory, is completed first."""
        self.exchange.abandon()
        self._sums.begin_step()
        self._begin_slice()
        self.launched = False

    def _begin_slice(self) -> None:
        self._ready = [False] * len(self._parameters)
        self._missing = len(self._parameters)

    def take(self, slot: int) -> None:
        """Copy the gradient of a parameter, or add it to those of an earlier slice."""
        parameter = self._parameters[slot]
        gradient = checked_gradient(self.names[slot], parameter)
        if self.observer is not None:
            self.observer(self._sums.number, self.names[slot], gradient)
        place = self._sums.place_of(slot)
        if gradient is not place:
            self._sums.add(slot, gradient.to_dense() if gradient.is_sparse else gradient)
            if self._as_view and not self._slices.is_virtual:
                parameter.grad = place
        if not self._ready[slot]:
            self._ready[slot] = True
            self._missing -= 1

    def parameter(self, slot: int) -> nn.Parameter:
        """Return a parameter by its place."""
        return self._parameters[slot]

    @property
    def complete(self) -> bool:
        """Whether every gradient of the running slice was taken."""
        return self._missing == 0

    def fill(self) -> None:
        """Complete the running slice: take gradients that were accumulated earlier, and zeros for the others."""
        for slot, ready in enumerate(self._ready):
            if ready:
                continue
            if self._parameters[slot].grad is not None:
                self.take(slot)
            else:
                self._sums.add(slot, 0.0)

    def end_slice(self, sent: Synchronization, *, absent: bool) -> None:
        """Add the running slice, which is complete, to the sums; `absent`: it has no samples."""
        ready = None if self.complete else self._ready
        if not self._slices.is_virtual:
            self._result.flags.write(ready, sent, absent=absent)
            return
        self._own_flags.write(ready, sent, absent=absent)
        self._sums.add(len(self._parameters), self._own_flags.numbers.clone())

    def next_slice(self) -> None:
        """Begin another slice of this rank's."""
        self._sums.next_slice()
        self._begin_slice()

    def exchange_by_hook(self, state: Any, hook: Callable[[Any, Any], Any]) -> None:
        """Let a comm hook average the gradients from now on."""
        self.exchange = CommHookExchange(self.numbers, self._gradients_end, hook, state, self)

    def launch(self, group: Any, sent: Synchronization, *, absent: bool) -> None:
        """End this rank's last slice, and begin the exchange."""
        self.launched = True
        self.end_slice(sent, absent=absent)
        if sent.weight is not None:
            # In shared memory, each bucket may be divided while it is summed; otherwise, and for sparse gradients, it
            # is when the digits in the last bucket's flags have arrived.
            self.exchange.divide_by(sent.weight)
        self.exchange.launch(group, sent.scale)

    def factor_of(self, weight: MeanWeight | None, numbers: Sequence[float] | None) -> Tensor | float:
        """Return what averages are multiplied by for a mean over the weights that have arrived; 1 if none was sent.

        `numbers` are the `flags` on the host; None: the factor stays on the device.
        """
        if weight is None:
            return 1.0
        digits = self.flags[WEIGHT] if numbers is None else numbers[WEIGHT]
        return weight.factor_of_means(digits, self._slices.count)

    def read_flags(self, numbers: Sequence[float]) -> list[nn.Parameter]:
        """Store the received `flags`; return the parameters that some slice with samples has not used."""
        count = len(self._parameters)
        self.received = [*numbers[count + 1 : count + 1 + self._spec.num_signals]]
        self.losses_are_finite = not math.isnan(numbers[-1])
        return [parameter for parameter, share in zip(self._parameters, numbers, strict=False) if share > 0]

    def finish(self, numbers: Sequence[float] | None, *, is_finite: bool, factor: Tensor | float) -> None:
        """Give each parameter its averaged gradient; those used in no slice with samples keep theirs: none.

        `numbers` are the `flags`, on the host; without, this rank has all gradients, so each parameter was used.
        `is_finite` tells whether what was received, in all buckets, is finite; averages are multiplied by `factor`.
        """
        unused: set[int] = set()
        if numbers is not None and not self.complete:
            unused = self._unused_in_all_slices(numbers)
        self.exchange.complete(is_finite=is_finite, unused=unused)
        if isinstance(factor, Tensor) or factor != 1:
            self.exchange.multiply(factor)
        for slot, parameter in enumerate(self._parameters):
            if slot in unused:
                continue
            view = self._result.views[slot]
            if self._as_view:
                if parameter.grad is not view:
                    parameter.grad = view
            elif parameter.grad is None or parameter.grad.is_sparse:
                parameter.grad = view.clone()
            else:
                parameter.grad.copy_(view)

    def _unused_in_all_slices(self, numbers: Sequence[float]) -> set[int]:
        """Return the slots of the parameters that no slice with samples has used."""
        # In whole slices: NCCL multiplies by 1/N before it adds, so N shares need not make 1.
        count = self._slices.count
        absent = numbers[len(self._parameters)]
        missing = [slot for slot, ready in enumerate(self._ready) if not ready]
        return {slot for slot in missing if (numbers[slot] + absent) * count > count - 0.5}

    # PyTorch's GradBucket.

    def buffer(self) -> Tensor:
        """Return the gradients as one flat tensor."""
        return self.numbers[: self._gradients_end]

    def set_buffer(self, tensor: Tensor) -> None:
        """Replace the gradients."""
        self.numbers[: self._gradients_end] = tensor

    def gradients(self) -> list[Tensor]:
        """Return the gradients, as views of the buffer."""
        return list(self._result.views)

    def parameters(self) -> list[Tensor]:
        """Return the parameters."""
        return list(self._parameters)

    def index(self) -> int:
        """Return the number of this bucket."""
        return self._index

    def is_last(self) -> bool:
        """Return whether it is the last bucket of a synchronisation."""
        return self._last


def checked_gradient(name: str, parameter: nn.Parameter) -> Tensor:
    """Return a parameter's gradient; raise DistributedTrainingError if a hook took it, or it has a graph."""
    gradient = parameter.grad
    if gradient is None:
        raise DistributedTrainingError(
            f"a hook took the gradient of {name} before it was averaged over ranks. {STEP_LATER}"
        )
    if gradient.requires_grad:
        raise DistributedTrainingError(
            f"the gradient of {name} has a graph, as backward(create_graph=True) makes it: its average over ranks "
            "would have none. For what you differentiate again take torch.autograd.grad(..., create_graph=True), add "
            "it to the loss, and call loss.backward()."
        )
    return gradient
