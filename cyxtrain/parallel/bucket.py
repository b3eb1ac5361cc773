"""One bucket at work: gradients come in, travel, and come back averaged."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cyxtrain.errors import DistributedTrainingError
from cyxtrain.parallel.exchange import AllReduceExchange, CommHookExchange, GradientExchange, SharedMemoryExchange
from cyxtrain.parallel.layout import BucketSpec
from cyxtrain.ring import SharedGradientBuffer

STEP_LATER = (
    "The replicas would differ. Call optimizer.step() after backward, when .grad is the average; a hook may look at a "
    "gradient, not use it up."
)


class Bucket:
    """Gradients that travel together. It is also what PyTorch's comm hooks get as a GradBucket.

    Args:
        spec: Which parameters, and where.
        parameters: (name, parameter) of all that are trained, which `spec` indexes.
        index: Number of this bucket, in the order of launching.
        last: Whether it is the last one.
        mean: Memory for it that all ranks have in common, or None.
    """

    def __init__(
        self,
        spec: BucketSpec,
        parameters: Sequence[tuple[str, nn.Parameter]],
        index: int,
        last: bool,
        mean: SharedGradientBuffer | None = None,
    ) -> None:
        self.names = [parameters[i][0] for i in spec.parameters]
        """Of its parameters."""
        self._parameters = [parameters[i][1] for i in spec.parameters]
        self._spec = spec
        self.received: list[float] = []
        """In the last bucket: the sum or mean over ranks of each signal, in the latest synchronisation."""
        self.losses_are_finite = True
        """In the last bucket: whether the losses of all ranks were."""
        self._gradients_end = end = spec.flags_offset
        self._group: Any = None
        self._index = index
        self._last = last
        self._lay_out(torch.zeros(spec.count, dtype=spec.dtype, device=spec.device) if mean is None else mean.tensor)
        self.travel: GradientExchange = (
            AllReduceExchange(self._flat, end) if mean is None else SharedMemoryExchange(mean, end)
        )
        """How it travels."""
        self.clear()

    def _lay_out(self, flat: Tensor) -> None:
        """Puts everything in its place in some memory."""
        spec = self._spec
        self._flat, self._flags = flat, flat[spec.flags_offset :]
        self.flags = self._flags.real if self._flags.is_complex() else self._flags
        """For each parameter the share of ranks that have not used it; the share of absent ranks; signals; loss."""
        signals = self._flags[len(self._parameters) + 1 :]
        self._signals = signals[:-1] if spec.has_signals else None
        self._loss = signals[-1] if spec.has_signals else None
        self._views = [
            _slot(flat, offset, parameter) for offset, parameter in zip(spec.offsets, self._parameters, strict=True)
        ]

    def change_group(self) -> None:
        """Leaves the memory that the ranks of an earlier group have in common."""
        if isinstance(self.travel, SharedMemoryExchange):
            self.travel.abandon()
            self._lay_out(self._flat.clone())
            self.travel = AllReduceExchange(self._flat, self._gradients_end)

    def clear(self) -> None:
        """Begins a new synchronisation: nothing has come in yet.

        What an interrupted one has sent must be over first: it travels in the memory that is filled now. If it failed,
        the group says so at its next call.
        """
        self.travel.abandon()
        self._ready = [False] * len(self._parameters)
        self._missing = len(self._parameters)
        self.launched = False

    def take(self, slot: int, *, as_view: bool) -> None:
        """Take in the gradient of a parameter; with `as_view`, `.grad` becomes its place in the bucket.

        Raises:
            DistributedTrainingError: As `checked_gradient`.
        """
        parameter, view = self._parameters[slot], self._views[slot]
        gradient = checked_gradient(self.names[slot], parameter)
        if gradient is not view:
            view.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
            if as_view:
                parameter.grad = view
        if not self._ready[slot]:
            self._ready[slot] = True
            self._missing -= 1

    @property
    def complete(self) -> bool:
        """Whether every gradient has come in."""
        return self._missing == 0

    def fill(self, *, as_view: bool) -> None:
        """Completes the bucket: gradients that were accumulated earlier are taken, the others count as zeros."""
        for slot, ready in enumerate(self._ready):
            if ready:
                continue
            if self._parameters[slot].grad is not None:
                self.take(slot, as_view=as_view)
            else:
                self._views[slot].zero_()

    def travel_by_hook(self, state: Any, hook: Callable[[Any, Any], Any]) -> None:
        """Lets a comm hook do it, from now on."""
        self.travel = CommHookExchange(self._flat, self._gradients_end, hook, state, self)

    def launch(
        self,
        group: Any,
        *,
        absent: bool,
        signals: Sequence[float],
        loss: Tensor | None,
        scale: float,
    ) -> None:
        """Sends the bucket on its way.

        Args:
            group: The process group.
            absent: Whether this rank had no samples: then it has no say in what was used.
            signals: Of this rank; they travel with the last bucket.
            loss: Of this rank, so that all see where it is not finite; it travels there too.
            scale: What gradients are multiplied by in this step.
        """
        self.launched = True
        self._group = group
        self._flags.zero_()
        count = len(self._parameters)
        if absent:
            self._flags[count] = 1
        elif not self.complete:
            unused = [0.0 if ready else 1.0 for ready in self._ready]
            self._flags[:count] = torch.tensor(unused, device=self._flags.device)
        if self._signals is not None and any(signals):
            self._signals.copy_(torch.tensor(signals, device="cpu"))
        if self._loss is not None and loss is not None:
            torch.sub(loss, loss, out=self._loss)  # 0 or NaN, without asking the device what it is
        self.travel.launch(group, scale)

    def hear(self, numbers: Sequence[float]) -> list[nn.Parameter]:
        """Take in the flags that have arrived; return the parameters that took no part on some rank with samples.

        Args:
            numbers: `flags`, on the host.
        """
        count = len(self._parameters)
        self.received = [*numbers[count + 1 : -1]]
        self.losses_are_finite = not math.isnan(numbers[-1])
        return [parameter for parameter, share in zip(self._parameters, numbers, strict=False) if share > 0]

    def unused_flags(self) -> Tensor:
        """Return the part of `flags` that is above 0 where a parameter took no part on some rank."""
        return self.flags[: len(self._parameters)]

    def finish(self, numbers: Sequence[float] | None, *, as_view: bool, is_whole: bool) -> None:
        """Gives each parameter its averaged gradient, once all have arrived.

        Those used on no rank that had samples keep the gradient that they had: none.

        Args:
            numbers: `flags`, on the host; None: all gradients of this rank have come in, so each parameter was used.
            as_view: Whether `.grad` becomes its place in the bucket.
            is_whole: Whether what has arrived, in all buckets, is finite.
        """
        nowhere = set() if self.complete or numbers is None else self._used_nowhere(numbers)
        self.travel.settle(is_whole=is_whole, unused=nowhere)
        for slot, parameter in enumerate(self._parameters):
            if slot in nowhere:
                continue
            if as_view:
                if parameter.grad is not self._views[slot]:
                    parameter.grad = self._views[slot]
            elif parameter.grad is None or parameter.grad.is_sparse:
                parameter.grad = self._views[slot].clone()
            else:
                parameter.grad.copy_(self._views[slot])

    def _used_nowhere(self, numbers: Sequence[float]) -> set[int]:
        """Return the slots of the parameters that no rank with samples has used."""
        # In whole ranks: NCCL multiplies by 1/N before it adds, so N shares need not make 1.
        world_size, absent = dist.get_world_size(self._group), numbers[len(self._parameters)]
        return {
            slot
            for slot, ready in enumerate(self._ready)
            if not ready and (numbers[slot] + absent) * world_size > world_size - 0.5
        }

    @property
    def numbers(self) -> Tensor:
        """All that has travelled: gradients, flags, signals and loss."""
        return self._flat

    # PyTorch's GradBucket.

    def buffer(self) -> Tensor:
        """Returns the gradients as one flat tensor."""
        return self._flat[: self._gradients_end]

    def set_buffer(self, tensor: Tensor) -> None:
        """Replaces the gradients."""
        self._flat[: self._gradients_end] = tensor

    def gradients(self) -> list[Tensor]:
        """Returns the gradients, as views of the buffer."""
        return list(self._views)

    def parameters(self) -> list[Tensor]:
        """Returns the parameters."""
        return list(self._parameters)

    def index(self) -> int:
        """Returns the number of this bucket."""
        return self._index

    def is_last(self) -> bool:
        """Returns whether it is the last bucket of a synchronisation."""
        return self._last


def checked_gradient(name: str, parameter: nn.Parameter) -> Tensor:
    """Return the gradient of a parameter.

    Raises:
        DistributedTrainingError: A hook took it, or it has a graph of its own.
    """
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
    """Returns the parameter's place, with its strides where its memory is dense: autograd wants them alike."""
    count = parameter.numel()
    place = flat[offset : offset + count]
    if parameter.is_contiguous() or not torch.ops.aten.is_non_overlapping_and_dense(parameter):
        return place.view(parameter.shape)
    return place.as_strided(parameter.shape, parameter.stride(), place.storage_offset())
