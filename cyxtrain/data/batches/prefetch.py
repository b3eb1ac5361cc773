"""Rows on their way from memory to where the model computes; to an accelerator one micro-batch ahead."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from cyxtrain.data.batches.rows import Rows
from cyxtrain.data.batches.structure import map_tree
from cyxtrain.environment import accelerator

_T = TypeVar("_T")
_MAX_IN_FLIGHT = 4
"""Batches that the host may be ahead of an accelerator: each holds memory there until it has been computed with."""

PrepareTarget = Callable[[Tensor, torch.dtype], Tensor]


@dataclass(frozen=True)
class Placement:
    """Where a model wants its batches, and in which types.

    Attributes:
        device: To compute on.
        dtype: Of the model's parameters: floats become it, and bytes (images) and truths too, but for masks, which are
            truths among several inputs. Other whole numbers stay whole; unsigned ones become int64, because no layer
            takes them.
        prepare_target: Gives targets the type that the loss wants.
        channels_last: Whether inputs of four and five dimensions get that memory format.
    """

    device: torch.device
    dtype: torch.dtype
    prepare_target: PrepareTarget
    channels_last: bool = False

    def place(self, rows: Rows) -> Rows:
        """Returns a batch's tensors on the device, converted."""
        inputs, targets, weights = rows
        placed = self._input(inputs) if isinstance(inputs, Tensor) else map_tree(self._part, inputs)
        return Rows(
            map_tree(as_channels_last, placed) if self.channels_last else placed,
            None if targets is None else map_tree(self._target, targets),
            None if weights is None else self._moved(weights).to(self.dtype),
        )

    def _input(self, tensor: Tensor) -> Tensor:
        tensor = self._moved(tensor)  # as few bytes as can be, from pinned memory
        dtype = tensor.dtype
        if dtype is self.dtype:
            return tensor
        if tensor.is_floating_point() or dtype in (torch.uint8, torch.bool):
            return tensor.to(self.dtype)
        return tensor.to(torch.int64) if dtype in (torch.uint16, torch.uint32, torch.uint64) else tensor

    def _part(self, tensor: Tensor) -> Tensor:
        """Returns one of several inputs: beside others, truths are a mask."""
        return self._moved(tensor) if tensor.dtype is torch.bool else self._input(tensor)

    def _target(self, tensor: Tensor) -> Tensor:
        return self.prepare_target(self._moved(tensor), self.dtype)

    def _moved(self, tensor: Tensor) -> Tensor:
        if tensor.device == self.device:
            return tensor
        return tensor.to(self.device, non_blocking=tensor.is_cpu)  # from an accelerator the host has to wait


def as_channels_last(tensor: Tensor) -> Tensor:
    """Returns a tensor of four or five dimensions in PyTorch's `channels_last` memory format; others as they are."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    found = formats.get(tensor.dim())
    return tensor if found is None else tensor.contiguous(memory_format=found)


class PendingRows(NamedTuple):
    """Rows that are being copied to an accelerator.

    Attributes:
        rows: On the accelerator, not converted yet.
        copied: Those of their tensors that the side stream fills.
        event: Reached when they are filled; None: there are none.
    """

    rows: Rows
    copied: list[Tensor]
    event: torch.Event | None


class DeviceCopier:
    """Bring rows to the CPU that computes, when the model needs them.

    Args:
        placement: Where the model computes, and in which types.

    Attributes:
        place: Returns rows as the model takes them.
        is_ahead: Whether copies are begun before the model needs the rows.
    """

    is_ahead = False

    def __init__(self, placement: Placement) -> None:
        self.place = placement.place

    def own(self, tensor: Tensor, memory_format: torch.memory_format = torch.preserve_format) -> Tensor:
        """Return a copy that nobody else changes."""
        return tensor.clone(memory_format=memory_format)

    def send(self, rows: Rows) -> PendingRows:
        """Begin to bring rows to where the model computes."""
        return PendingRows(rows, [], None)

    def receive(self, pending: PendingRows) -> Rows:
        """Return rows that were sent, as the model takes them."""
        return self.place(pending.rows)


class Prefetcher(DeviceCopier):
    """Copy rows to an accelerator from pinned memory, on a side stream, while the current stream computes.

    Rows that are on an accelerator already stay on the current stream, which may have gathered them; so do conversions.

    Args:
        placement: As `DeviceCopier`, on an accelerator.
    """

    is_ahead = True

    def __init__(self, placement: Placement) -> None:
        super().__init__(placement)
        self._device = accelerator.indexed(placement.device)
        self._stream = accelerator.side_stream(self._device, "rows")
        self._reached: collections.deque[torch.Event] = collections.deque()

    def own(self, tensor: Tensor, memory_format: torch.memory_format = torch.preserve_format) -> Tensor:
        """As `DeviceCopier`; a tensor on the CPU is copied to pinned memory."""
        return _pinned(tensor, memory_format) if tensor.is_cpu else super().own(tensor, memory_format)

    def send(self, rows: Rows) -> PendingRows:
        """As `DeviceCopier`. The host waits only where it is more than `_MAX_IN_FLIGHT` batches ahead."""
        while len(self._reached) > _MAX_IN_FLIGHT:
            self._reached.popleft().synchronize()
        if not any(tensor.is_cpu for tensor in rows.tensors()):
            return PendingRows(rows, [], None)
        copied: list[Tensor] = []

        def copy(tensor: Tensor) -> Tensor:
            if not tensor.is_cpu:
                return tensor
            pinned = tensor if tensor.is_pinned() else _pinned(tensor)
            copied.append(pinned.to(self._device, non_blocking=True))
            return copied[-1]

        with self._stream:
            return PendingRows(rows.mapped(copy), copied, self._stream.record_event())

    def receive(self, pending: PendingRows) -> Rows:
        """As `DeviceCopier`: the current stream may use them."""
        current = torch.accelerator.current_stream(self._device)
        if pending.event is not None:
            current.wait_event(pending.event)
            for tensor in pending.copied:
                tensor.record_stream(current)  # the side stream must not reuse the memory while this one reads it
        self._reached.append(current.record_event())
        return self.place(pending.rows)


def make_copier(placement: Placement) -> DeviceCopier:
    """Return what brings rows to where the model computes."""
    return (Prefetcher if accelerator.has_side_streams(placement.device) else DeviceCopier)(placement)


def _pinned(tensor: Tensor, memory_format: torch.memory_format = torch.preserve_format) -> Tensor:
    """Return a copy in memory that the accelerator reads without the host."""
    return torch.empty_like(tensor, pin_memory=True, memory_format=memory_format).copy_(tensor)


class Early(Generic[_T]):
    """The result of a call that is made before its result is needed; an error is raised when it is needed.

    Args:
        make: Called at once.
    """

    def __init__(self, make: Callable[[], _T]) -> None:
        self._error: Exception | None = None
        try:
            self._result = make()
        except Exception as error:
            self._error = error

    def get(self) -> _T:
        """Return the result, or raise the error."""
        if self._error is not None:
            raise self._error
        return self._result


def one_ahead(items: Iterator[_T]) -> Iterator[_T]:
    """Yield items, each after the one that follows it was asked for."""
    coming = Early(lambda: next(items, None))
    while (item := coming.get()) is not None:
        coming = Early(lambda: next(items, None))
        yield item
