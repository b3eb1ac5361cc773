"""A bucket of gradients: filled in backward, exchanged, and given back as averages."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cyxtrain.errors import DistributedTrainingError
from cyxtrain.parallel.exchange import AllReduceExchange, CommHookExchange, GradientExchange, SharedMemoryExchange
from cyxtrain.parallel.layout import BucketSpec
from cyxtrain.parallel.synchronization import Synchronization
from cyxtrain.ring import DIGITS, MeanWeight, SharedGradientBuffer

_WEIGHT = slice(-1 - DIGITS, -1)
"""Its digits among the flags of the last bucket."""
STEP_LATER = (
    "The replicas would differ. Call optimizer.step() after backward, when .grad is the average; a hook may look at a "
    "gradient, not use it up."
)


class Bucket:
    """Gradients that are exchanged together; PyTorch's comm hooks get it as a GradBucket.

    In memory: gradients, then flags: unused parameters, absent rank; in the last bucket: signals, weight, loss.
    """

    def __init__(
        self,
        spec: BucketSpec,
        parameters: Sequence[tuple[str, nn.Parameter]],
        index: int,
        last: bool,
        shared_buffer: SharedGradientBuffer | None = None,
        *,
        as_view: bool = False,
    ) -> None:
        self.names = [parameters[i][0] for i in spec.parameters]
        self._parameters = [parameters[i][1] for i in spec.parameters]
        self._spec = spec
        self._as_view = as_view  # whether `.grad` becomes its place in the bucket
        self.received: list[float] = []
        """In the last bucket: the mean over ranks of each signal, in the latest synchronisation."""
        self.losses_are_finite = True  # in the last bucket: whether the losses of all ranks were
        self._gradients_end = spec.flags_offset
        self._group: Any = None
        self._index = index
        self._last = last
        self.exchange: GradientExchange
        if shared_buffer is None:
            self._lay_out(torch.zeros(spec.count, dtype=spec.dtype, device=spec.device))
            self.exchange = AllReduceExchange(self.numbers, self._gradients_end)
        else:
            self._lay_out(shared_buffer.tensor)
            self.exchange = SharedMemoryExchange(shared_buffer, self._gradients_end)
        self.clear()

    def _lay_out(self, flat: Tensor) -> None:
        """Set the views of gradients, flags, signals and loss in a flat tensor."""
        spec = self._spec
        self.numbers = flat
        self._flags = flat[spec.flags_offset :]
        # for each parameter the share of ranks that have not used it; that of absent ranks; signals; weight; loss
        self.flags = self._flags.real if self._flags.is_complex() else self._flags
        self._weight = self.flags[_WEIGHT]
        self._signals: Tensor | None = None
        self._loss: Tensor | None = None
        if spec.num_signals:
            first_signal = len(self._parameters) + 1
            self._signals = self._flags[first_signal : first_signal + spec.num_signals]
            self._loss = self._flags[-1]
        self._views = [
            _slot(flat, offset, parameter) for offset, parameter in zip(spec.offsets, self._parameters, strict=True)
        ]

    def change_group(self) -> None:
        """Leave the memory that the ranks of an earlier group share."""
        if isinstance(self.exchange, SharedMemoryExchange):
            self.exchange.abandon()
            self._lay_out(self.numbers.clone())
            self.exchange = AllReduceExchange(self.numbers, self._gradients_end)

    def clear(self) -> None:
        """Begin a new synchronisation; an interrupted one, which uses the same memory, is completed first."""
        self.exchange.abandon()
        self._ready = [False] * len(self._parameters)
        self._missing = len(self._parameters)
        self.launched = False

    def take(self, slot: int) -> None:
        """Copy the gradient of a parameter."""
        parameter = self._parameters[slot]
        view = self._views[slot]
        gradient = checked_gradient(self.names[slot], parameter)
        if gradient is not view:
            view.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
            if self._as_view:
                parameter.grad = view
        if not self._ready[slot]:
            self._ready[slot] = True
            self._missing -= 1

    @property
    def complete(self) -> bool:
        """Whether every gradient was taken."""
        return self._missing == 0

    def fill(self) -> None:
        """Complete the bucket: take gradients that were accumulated earlier, and zeros for the others."""
        for slot, ready in enumerate(self._ready):
            if ready:
                continue
            if self._parameters[slot].grad is not None:
                self.take(slot)
            else:
                self._views[slot].zero_()

    def exchange_by_hook(self, state: Any, hook: Callable[[Any, Any], Any]) -> None:
        """Let a comm hook average the gradients from now on."""
        self.exchange = CommHookExchange(self.numbers, self._gradients_end, hook, state, self)

    def launch(self, group: Any, sent: Synchronization, *, absent: bool) -> None:
        """Begin the exchange; the unused parameters of a rank that is `absent` (no samples) do not count."""
        self.launched = True
        self._group = group
        self._flags.zero_()
        count = len(self._parameters)
        if absent:
            self._flags[count] = 1
        elif not self.complete:
            unused = [0.0 if ready else 1.0 for ready in self._ready]
            self._flags[:count] = torch.tensor(unused, device=self._flags.device)
        if self._signals is not None and any(sent.signals):
            self._signals.copy_(torch.tensor(sent.signals, device="cpu"))
        if self._loss is not None and sent.loss is not None:
            torch.sub(sent.loss, sent.loss, out=self._loss)  # 0 or NaN, without waiting for the device
        weight = sent.weight
        if weight is not None:
            # In shared memory, each bucket is divided while it is summed; elsewhere, and for sparse gradients, when
            # the digits in the last bucket's flags have arrived.
            self.exchange.divide_by(weight)
            if self._loss is not None:
                self._weight.copy_(weight.digits(self._weight.device), non_blocking=True)
        self.exchange.launch(group, sent.scale)

    def factor_of(self, weight: MeanWeight | None, numbers: Sequence[float] | None) -> Tensor | float:
        """Return what averages are multiplied by for a mean over the weights that have arrived; 1 if none was sent.

        `numbers` are the `flags` on the host; None: the factor stays on the device.
        """
        if weight is None:
            return 1.0
        digits = self._weight if numbers is None else numbers[_WEIGHT]
        return weight.factor_of_means(digits, self._group.size())

    def read_flags(self, numbers: Sequence[float]) -> list[nn.Parameter]:
        """Store the received `flags`; return the parameters that some rank with samples has not used."""
        count = len(self._parameters)
        self.received = [*numbers[count + 1 : count + 1 + self._spec.num_signals]]
        self.losses_are_finite = not math.isnan(numbers[-1])
        return [parameter for parameter, share in zip(self._parameters, numbers, strict=False) if share > 0]

    def finish(self, numbers: Sequence[float] | None, *, is_finite: bool, factor: Tensor | float) -> None:
        """Give each parameter its averaged gradient; those used on no rank with samples keep theirs: none.

        `numbers` are the `flags`, on the host; without, this rank has all gradients, so each parameter was used.
        `is_finite` tells whether what was received, in all buckets, is finite; averages are multiplied by `factor`.
        """
        unused: set[int] = set()
        if numbers is not None and not self.complete:
            unused = self._unused_on_all_ranks(numbers)
        self.exchange.complete(is_finite=is_finite, unused=unused)
        if isinstance(factor, Tensor) or factor != 1:
            self.exchange.multiply(factor)
        for slot, parameter in enumerate(self._parameters):
            if slot in unused:
                continue
            if self._as_view:
                if parameter.grad is not self._views[slot]:
                    parameter.grad = self._views[slot]
            elif parameter.grad is None or parameter.grad.is_sparse:
                parameter.grad = self._views[slot].clone()
            else:
                parameter.grad.copy_(self._views[slot])

    def _unused_on_all_ranks(self, numbers: Sequence[float]) -> set[int]:
        """Return the slots of the parameters that no rank with samples has used."""
        # In whole ranks: NCCL multiplies by 1/N before it adds, so N shares need not make 1.
        world_size = self._group.size()
        absent = numbers[len(self._parameters)]
        missing = [slot for slot, ready in enumerate(self._ready) if not ready]
        return {slot for slot in missing if (numbers[slot] + absent) * world_size > world_size - 0.5}

    # PyTorch's GradBucket.

    def buffer(self) -> Tensor:
        """Return the gradients as one flat tensor."""
        return self.numbers[: self._gradients_end]

    def set_buffer(self, tensor: Tensor) -> None:
        """Replace the gradients."""
        self.numbers[: self._gradients_end] = tensor

    def gradients(self) -> list[Tensor]:
        """Return the gradients, as views of the buffer."""
        return list(self._views)

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


def _slot(flat: Tensor, offset: int, parameter: nn.Parameter) -> Tensor:
    """Return the parameter's place, with its strides if its memory is dense, as autograd wants them."""
    count = parameter.numel()
    place = flat[offset : offset + count]
    if parameter.is_contiguous() or not torch.ops.aten.is_non_overlapping_and_dense(parameter):
        return place.view(parameter.shape)
    return place.as_strided(parameter.shape, parameter.stride(), place.storage_offset())
