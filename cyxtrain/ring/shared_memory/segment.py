"""Memory that the ranks of one machine have in common (Linux): a file without a name, of which each rank has a row.

Source: memfd_create(2).
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
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from cyxtrain.ring.wire.frames import Reduction
from cyxtrain.ring.wire.persistent import SIGN_WORDS

if TYPE_CHECKING:
    from cyxtrain.ring.group import Group

_PAGE_BYTES = mmap.PAGESIZE
_SIGN_BYTES = SIGN_WORDS * 8
_MAP_FIXED = 0x10
_mapped: weakref.WeakKeyDictionary[mmap.mmap, int] = weakref.WeakKeyDictionary()
"""The memory of this process that others have too, and the descriptor of the file that it is."""


class SharedMemorySegment:
    """Memory that all ranks have in common: of each rank its places, and words to show how far it is with each.

    Args:
        memory: Of all ranks, one after the other.
        places: Where each place of a rank begins in what is its own, and where that ends.
    """

    def __init__(self, memory: mmap.mmap, places: Sequence[int]) -> None:
        self._memory = memory
        self._places = places
        self._starts = range(0, len(memory), places[-1])

    def rows(self, place: int, array: type[np.number[Any]], count: int) -> list[Any]:
        """Returns, by rank, `count` elements at the place of this number."""
        first = self._places[place]
        return [np.frombuffer(self._memory, array, count, start + first) for start in self._starts]

    def words(self, place: int) -> list[memoryview]:
        """Returns, by rank, the words in which it shows how far it is there."""
        memory, starts = memoryview(self._memory), (start + place * _SIGN_BYTES for start in self._starts)
        return [memory[start : start + _SIGN_BYTES].cast("q") for start in starts]


def make_shared_memory(
    group: Group, sizes: Sequence[int], timeout: timedelta | None = None
) -> SharedMemorySegment | None:
    """Returns memory that all ranks have in common, zeros; all ranks call it.

    None, on every rank: not all can have it, or there is no room.

    Args:
        group: Of the ranks.
        sizes: Of a rank's places, in bytes.
        timeout: Of each collective; None: the group's.

    Cost: two small collectives, one or two descriptors, and all of the memory, at once.
    """
    places = list(itertools.accumulate(map(_pages, sizes), initial=_pages(len(sizes) * _SIGN_BYTES)))
    stride, found = places[-1], None
    with contextlib.ExitStack() as stack:
        facts = torch.zeros(4, dtype=torch.int64, device="cpu")
        if group.rank == 0:
            with contextlib.suppress(OSError, AttributeError):
                facts = _create(group.world_size * stride, stack)
        group.broadcast(facts, 0, timeout)
        with contextlib.suppress(OSError, ValueError):
            found = _open(facts, group.rank * stride, stride, group.world_size)
        everywhere = torch.tensor([int(found is not None)], device="cpu")
        group.all_reduce(everywhere, Reduction.MIN, timeout)  # and nobody closes the file before all have it
    return SharedMemorySegment(found, places) if found is not None and everywhere.item() else None


def _pages(size: int) -> int:
    """Returns so many bytes as whole pages have."""
    return -(-size // _PAGE_BYTES) * _PAGE_BYTES


def _create(size: int, stack: contextlib.ExitStack) -> Tensor:
    """Makes a file in memory, without a name; returns (process, descriptor, inode, bytes)."""
    descriptor = os.memfd_create("cyxtrain")
    stack.callback(os.close, descriptor)
    os.ftruncate(descriptor, size)
    return torch.tensor([os.getpid(), descriptor, os.fstat(descriptor).st_ino, size], device="cpu")


def _open(facts: Tensor, first: int, stride: int, world_size: int) -> mmap.mmap | None:
    """Maps the file of rank 0, and has room made for this rank: where there is none, that is known now."""
    process, number, inode, size = facts.tolist()
    if process == 0:
        return None
    descriptor = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, descriptor)
        status = os.fstat(descriptor)
        if (status.st_ino, status.st_size, size) != (inode, size, world_size * stride):
            return None  # what this process sees in /proc is not what rank 0 sees; or the ranks have other sizes
        os.posix_fallocate(descriptor, first, stride)
        memory = mmap.mmap(descriptor, size)
        _mapped[memory] = descriptor
        weakref.finalize(memory, os.close, descriptor)
        stack.pop_all()
    return memory


def _keep_apart() -> None:
    """Gives a forked child memory of its own: else what it calculates would change its parent's gradients."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 4)
    for memory, descriptor in _mapped.items():
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        access, kind = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_FIXED
        libc.mmap(address, len(memory), access, kind, descriptor, 0)


if sys.platform == "linux":
    os.register_at_fork(after_in_child=_keep_apart)
