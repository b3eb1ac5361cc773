"""Rows on their way from memory to where the model computes; to a GPU one micro-batch ahead."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cyxtrain.data.rows import Rows
from cyxtrain.data.sampler import Indices
from cyxtrain.data.tree import map_tree

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
        return tensor if tensor.device == self.device else tensor.to(self.device, non_blocking=True)


def as_channels_last(tensor: Tensor) -> Tensor:
    """Returns a tensor of four or five dimensions in PyTorch's `channels_last` memory format; others as they are."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    found = formats.get(tensor.dim())
    return tensor if found is None else tensor.contiguous(memory_format=found)


class Mover(ABC):
    """Gathers rows, and brings them to the model.

    Args:
        gather: Returns rows by number.
        placement: Where they go, and in which types.
    """

    def __init__(self, gather: Callable[[Indices], Rows], placement: Placement) -> None:
        self._gather = gather
        self._placement = placement

    @abstractmethod
    def __call__(self, indices: Indices, following: Indices | None) -> Rows:
        """Returns rows by number.

        Args:
            indices: Which rows, shape (rows,).
            following: Which come next, as the very array that will be given then; None: not known.
        """


class ToCPU(Mover):
    """To a CPU, when they are wanted: the core that gathers rows early is the one that computes."""

    def __call__(self, indices: Indices, following: Indices | None) -> Rows:
        """Returns the rows."""
        return self._placement.place(self._gather(indices))


class ToGPU(Mover):
    """To a GPU, on a stream of its own: the next rows travel while it computes with these.

    Args:
        gather: As `Mover`.
        placement: As `Mover`; of a GPU.
    """

    def __init__(self, gather: Callable[[Indices], Rows], placement: Placement) -> None:
        super().__init__(gather, placement)
        self._stream = torch.cuda.Stream(placement.device)
        self._ahead: tuple[Indices, Rows] | None = None

    def __call__(self, indices: Indices, following: Indices | None) -> Rows:
        """Returns rows that the current stream may use, and sends the following ones on their way."""
        ahead, self._ahead = self._ahead, None
        rows = ahead[1] if ahead is not None and ahead[0] is indices else self._move(indices)
        current = torch.cuda.current_stream(self._placement.device)
        current.wait_stream(self._stream)
        for tensor in rows.tensors():
            tensor.record_stream(current)  # their memory is this stream's until it is done with them
        if following is not None:
            self._ahead = following, self._move(following)
        return rows

    def _move(self, indices: Indices) -> Rows:
        rows = self._gather(indices)
        if any(tensor.is_cuda for tensor in rows.tensors()):  # the current stream has gathered it
            self._stream.wait_stream(torch.cuda.current_stream(self._placement.device))
        with torch.cuda.stream(self._stream):
            return self._placement.place(rows.mapped(_pinned))


def make_mover(gather: Callable[[Indices], Rows], placement: Placement) -> Mover:
    """Returns what brings rows to where the model computes."""
    return (ToGPU if placement.device.type == "cuda" else ToCPU)(gather, placement)


def _pinned(tensor: Tensor) -> Tensor:
    """Returns a tensor in memory that the GPU itself can read, while the CPU does something else."""
    return tensor if tensor.is_cuda else tensor.pin_memory()
