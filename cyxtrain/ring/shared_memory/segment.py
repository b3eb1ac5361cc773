"""Memory that the ranks of one machine share (Linux): an anonymous file in which each rank has a row.

Rank 0 makes the file and passes its descriptor to the other ranks over their Unix sockets.
Source: memfd_create(2), unix(7) on SCM_RIGHTS.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import sys
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from cyxtrain.errors import CyxtrainError, error_from_facts
from cyxtrain.ring.schedules.kernels import Reduction
from cyxtrain.ring.wire.frames import append_sentence
from cyxtrain.ring.wire.payload import address_of
from cyxtrain.ring.wire.persistent import COUNTER_WORDS

_PAGE_BYTES = mmap.PAGESIZE
_COUNTER_BYTES = COUNTER_WORDS * 8
_MAP_FIXED = 0x10
_mapped: weakref.WeakKeyDictionary[mmap.mmap, int] = weakref.WeakKeyDictionary()
"""The shared memory of this process, and the descriptor of its file."""


class Ranks(Protocol):
    """The methods of a group that a segment needs; all ranks call each of these."""

    rank: int
    world_size: int

    def broadcast(self, tensor: Tensor, src: int, timeout: timedelta | None = None) -> None:
        """Copy the tensor of rank `src` to all."""

    def all_reduce(self, tensor: Tensor, reduction: Reduction, timeout: timedelta | None = None) -> None:
        """Reduce in place, on all ranks."""

    def share_descriptor(self, descriptor: int, timeout: timedelta | None = None) -> int:
        """Return rank 0's descriptor, or a duplicate of it that the caller owns; negative if it did not arrive."""


class SharedMemorySegment:
    """Memory that all ranks share: each has the same places in it, and progress counters for each place.

    It holds the rows of all ranks, one after the other. `places` are offsets in a row, in bytes; the last offset is the
    row's length.
    """

    def __init__(self, memory: mmap.mmap, places: Sequence[int]) -> None:
        self._memory = memory
        self._places = places
        self._starts = range(0, len(memory), places[-1])

    def rows(self, place: int, array: type[np.number[Any]], count: int) -> list[Any]:
        """Return, by rank, an array of `count` elements at a place."""
        first = self._places[place]
        return [np.frombuffer(self._memory, array, count, start + first) for start in self._starts]

    def counters(self, place: int) -> list[memoryview]:
        """Return, by rank, the words of its progress counter for a place."""
        memory = memoryview(self._memory)
        counters = []
        for row_start in self._starts:
            start = row_start + place * _COUNTER_BYTES
            counters.append(memory[start : start + _COUNTER_BYTES].cast("q"))
        return counters


def make_segment(ranks: Ranks, sizes: Sequence[int], timeout: timedelta | None = None) -> SharedMemorySegment | None:
    """Return zeroed memory that all ranks share, or None on every rank if one cannot have it. All ranks call it.

    They are connected by Unix sockets; `sizes` are the bytes of each place in a rank's row. Cost: two small
    collectives, one or two descriptors, and all of the memory at once.
    """
    counters_bytes = _pages(len(sizes) * _COUNTER_BYTES)
    places = list(itertools.accumulate(map(_pages, sizes), initial=counters_bytes))
    try:
        memory = _share_memory(ranks, places[-1], timeout)
    except CyxtrainError as error:
        raise _own_call_error(error) from None
    if memory is None:
        return None
    return SharedMemorySegment(memory, places)


def _share_memory(ranks: Ranks, row_bytes: int, timeout: timedelta | None) -> mmap.mmap | None:
    """Return memory with a row per rank in a file of rank 0's, or None on every rank if one cannot have it."""
    size = ranks.world_size * row_bytes
    file_bytes = torch.zeros(1, dtype=torch.int64, device="cpu")
    memory: mmap.mmap | None = None
    with contextlib.ExitStack() as stack:
        descriptor = -1
        if ranks.rank == 0:
            with contextlib.suppress(OSError, AttributeError):  # not Linux, or too little memory
                descriptor = os.memfd_create("cyxtrain")
                stack.callback(os.close, descriptor)
                os.ftruncate(descriptor, size)
                file_bytes[0] = size
        ranks.broadcast(file_bytes, 0, timeout)
        if file_bytes.item():
            shared = ranks.share_descriptor(descriptor, timeout)
            if ranks.rank != 0 and shared >= 0:
                stack.callback(os.close, shared)
            # Ranks may have asked for different sizes.
            if file_bytes.item() == size:
                with contextlib.suppress(OSError, ValueError):  # it cannot be mapped here: then all ranks send
                    memory = _map(shared, ranks.rank * row_bytes, row_bytes, size)
        everywhere = torch.tensor([int(memory is not None)], device="cpu")
        ranks.all_reduce(everywhere, Reduction.MIN, timeout)
    return memory if everywhere.item() else None


def _own_call_error(error: CyxtrainError) -> CyxtrainError:
    """Return the error of a collective that the ring called, with a sentence on it: no program calls it."""
    if error.during is None:
        return error
    message = append_sentence(str(error), f"The ring itself called {error.during}, to create shared memory.")
    return error_from_facts(error.to_facts() | {"message": message})


def _pages(size: int) -> int:
    """Return the bytes of the pages that hold `size` bytes."""
    return -(-size // _PAGE_BYTES) * _PAGE_BYTES


def _map(shared: int, first: int, row_bytes: int, size: int) -> mmap.mmap:
    """Map a file, and allocate this rank's row: without memory for it that fails now, not at the first write."""
    os.posix_fallocate(shared, first, row_bytes)
    # Kept as long as the memory: a forked child maps the file again.
    descriptor = os.dup(shared)
    try:
        memory = mmap.mmap(descriptor, size)
    except BaseException:
        os.close(descriptor)
        raise
    _mapped[memory] = descriptor
    weakref.finalize(memory, os.close, descriptor)
    return memory


def _make_private() -> None:
    """Give a forked child a private copy: otherwise it would change its parent's gradients."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 4)
    for memory, descriptor in _mapped.items():
        address = address_of(memoryview(memory))
        access = mmap.PROT_READ | mmap.PROT_WRITE
        flags = mmap.MAP_PRIVATE | _MAP_FIXED
        libc.mmap(address, len(memory), access, flags, descriptor, 0)


if sys.platform == "linux":
    os.register_at_fork(after_in_child=_make_private)
