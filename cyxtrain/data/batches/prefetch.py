"""Copies of batches to the device; to an accelerator one micro-batch ahead."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from cyxtrain.data.batches.rows import Rows
from cyxtrain.data.batches.structure import OpaqueBatch, map_tree
from cyxtrain.environment import accelerator

_T = TypeVar("_T")
# Batches that the host may be ahead of an accelerator: each holds memory there until it has been computed with.
_MAX_IN_FLIGHT = 4

PrepareTarget = Callable[[Tensor, torch.dtype], Tensor]


@dataclass(frozen=True)
class Placement:
    """Where a model wants its batches, and in which types.

    Floats, bytes (images) and booleans become `dtype`, except booleans among several inputs: masks. Other integers keep
    their type; unsigned ones become int64, which layers accept.
    """

    device: torch.device
    dtype: torch.dtype
    prepare_target: PrepareTarget  # converts targets to the type that the loss wants
    channels_last: bool = False  # whether inputs of four and five dimensions get that memory format

    def place(self, rows: Rows) -> Rows:
        """Return a batch's tensors on the device, converted."""
        inputs, targets, weights = rows
        if isinstance(inputs, OpaqueBatch):
            return rows._replace(inputs=inputs.mapped(self._as_given))
        placed = self._input(inputs) if isinstance(inputs, Tensor) else map_tree(self._part, inputs)
        if self.channels_last:
            placed = map_tree(as_channels_last, placed)
        targets = map_tree(self._target, targets)
        if weights is not None:
            weights = self._moved(weights).to(self.dtype)
        return Rows(placed, targets, weights)

    def _target(self, tensor: Tensor) -> Tensor:
        return self.prepare_target(self._moved(tensor), self.dtype)

    def _input(self, tensor: Tensor) -> Tensor:
        tensor = self._moved(tensor)  # before the conversion: fewer bytes, from pinned memory
        dtype = tensor.dtype
        if dtype is self.dtype:
            return tensor
        if tensor.is_floating_point() or dtype in (torch.uint8, torch.bool):
            return tensor.to(self.dtype)
        if dtype in (torch.uint16, torch.uint32, torch.uint64):
            return tensor.to(torch.int64)
        return tensor

    def _part(self, tensor: Tensor) -> Tensor:
        """Return one of several inputs: booleans among them are a mask."""
        if tensor.dtype is torch.bool:
            return self._moved(tensor)
        return self._input(tensor)

    def _as_given(self, part: Any) -> Any:
        """Return a part of a batch for a step of the user's own: only floats are converted."""
        if not isinstance(part, Tensor):
            return part.to(self.device)
        moved = self._moved(part)
        if part.is_floating_point():
            return moved.to(self.dtype)
        return moved

    def _moved(self, tensor: Tensor) -> Tensor:
        if tensor.device == self.device:
            return tensor
        return tensor.to(self.device, non_blocking=tensor.is_cpu)  # from an accelerator the host has to wait


def as_channels_last(tensor: Tensor) -> Tensor:
    """Return a tensor of 4 or 5 dimensions in PyTorch's `channels_last` memory format, others unchanged."""
    if tensor.dim() == 4:
        return tensor.contiguous(memory_format=torch.channels_last)
    if tensor.dim() == 5:
        return tensor.contiguous(memory_format=torch.channels_last_3d)
    return tensor


class DeviceCopier:
    """Copies rows to the device when the model needs them."""

    prefetches = False  # whether copies begin before the model needs the rows

    def __init__(self, placement: Placement) -> None:
        self._place = placement.place

    def clone(self, tensor: Tensor, memory_format: torch.memory_format = torch.preserve_format) -> Tensor:
        """Return a copy, which the data cannot change."""
        return tensor.clone(memory_format=memory_format)

    def send(self, rows: Rows) -> Callable[[], Rows]:
        """Begin the copy; return a function that returns the rows on the device, converted."""
        return functools.partial(self._place, rows)


class Prefetcher(DeviceCopier):
    """Copies from pinned memory to an accelerator, on a side stream, while the current stream computes.

    The current stream keeps rows that are on an accelerator already, which it may have gathered, and conversions.
    """

    prefetches = True

    def __init__(self, placement: Placement) -> None:
        super().__init__(placement)
        self._device = accelerator.indexed(placement.device)
        self._stream = accelerator.side_stream(self._device, "rows")
        self._reached: collections.deque[torch.Event] = collections.deque()

    @override
    def clone(self, tensor: Tensor, memory_format: torch.memory_format = torch.preserve_format) -> Tensor:
        if tensor.is_cpu:
            return _pinned(tensor, memory_format)
        return super().clone(tensor, memory_format)

    @override
    def send(self, rows: Rows) -> Callable[[], Rows]:
        while len(self._reached) > _MAX_IN_FLIGHT:
            self._reached.popleft().synchronize()
        if not any(tensor.is_cpu for tensor in rows.tensors()):
            return functools.partial(self._receive, rows, [], None)
        copied: list[Tensor] = []

        def copy(tensor: Tensor) -> Tensor:
            if not tensor.is_cpu:
                return tensor
            if not tensor.is_pinned():
                tensor = _pinned(tensor)
            on_device = tensor.to(self._device, non_blocking=True)
            copied.append(on_device)
            return on_device

        with self._stream:
            return functools.partial(self._receive, rows.mapped(copy), copied, self._stream.record_event())

    def _receive(self, rows: Rows, copied: list[Tensor], event: torch.Event | None) -> Rows:
        current = torch.accelerator.current_stream(self._device)
        if event is not None:
            current.wait_event(event)
            for tensor in copied:
                tensor.record_stream(current)  # the side stream must not reuse the memory while this one reads it
        self._reached.append(current.record_event())
        return self._place(rows)


def make_copier(placement: Placement) -> DeviceCopier:
    """Return the copier to a placement's device."""
    if accelerator.has_side_streams(placement.device):
        return Prefetcher(placement)
    return DeviceCopier(placement)


def _pinned(tensor: Tensor, memory_format: torch.memory_format = torch.preserve_format) -> Tensor:
    """Return a copy in memory that the accelerator reads without the host."""
    return torch.empty_like(tensor, pin_memory=True, memory_format=memory_format).copy_(tensor)


def call_early(function: Callable[[], _T]) -> Callable[[], _T]:
    """Call a function now; return one that returns its result, or raises its error, when that is needed."""
    try:
        result = function()
    except Exception as error:
        return functools.partial(_raise, error)
    return lambda: result


def _raise(error: Exception) -> NoReturn:
    raise error


def prefetch_one(items: Iterator[_T]) -> Iterator[_T]:
    """Yield items, each after the following one was requested."""
    following = call_early(lambda: next(items, None))
    while (item := following()) is not None:
        following = call_early(lambda: next(items, None))
        yield item
