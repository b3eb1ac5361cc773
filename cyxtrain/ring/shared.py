"""Memory that the ranks of one machine have in common, and the reduction of what each has put there (Linux).

What a rank's neighbours can reach need not travel: each rank reduces its part of everybody's elements, and puts the
result where each rank wants it. All ranks must have come so far twice. Where each has a core, every rank shows there
how far it is, and looks at the others; elsewhere they tell each other, by empty frames.
Sources: memfd_create(2); Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms (2009), section 4, for who
reduces what.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cyxtrain.ring.algorithms import FEW_RANKS, chunks, ring_order, tree
from cyxtrain.ring.arguments import timeout_of
from cyxtrain.ring.combining import added_by_numpy, silent_numpy
from cyxtrain.ring.frames import Reduction
from cyxtrain.ring.group import Group
from cyxtrain.ring.ready import SIGN_WORDS, Announcement, Exchange
from cyxtrain.ring.routes import few
from cyxtrain.ring.work import CallOptions, collective

_PIECE_BYTES = 1 << 18
"""What is reduced at once: the same elements of a few ranks stay in a processor's second cache."""
_PAGE_BYTES = mmap.PAGESIZE
_MAP_FIXED = 0x10
_ORDERS_WRITES = platform.machine().lower() in ("x86_64", "amd64")
"""Whether others see what this processor writes in the order in which it was written."""
_mapped: weakref.WeakKeyDictionary[mmap.mmap, int] = weakref.WeakKeyDictionary()
"""The memory of this process that others have too, and the descriptor of the file that it is."""


class SharedMean:
    """The mean over ranks of elements that each rank has in memory that all have in common, in place.

    Bits are those of `Group.all_reduce`.

    Args:
        group: Of the ranks.
        announcement: Of no bytes.
        rows: By rank, where its elements are.
        words: By rank, where it shows how far it is (`Sign`); None: the ranks tell each other by frames.

    Attributes:
        tensor: This rank's elements. While a reduction is under way nobody touches them.
    """

    def __init__(
        self,
        group: Group,
        announcement: Announcement,
        rows: Sequence[Any],
        words: Mapping[int, memoryview] | None = None,
    ) -> None:
        rank, world_size = group.rank, group.world_size
        self._own = own = rows[rank]
        self._group = group
        self._announcement = announcement
        self.tensor = torch.from_numpy(own)
        self._address = self.tensor.data_ptr()
        peers = [peer for peer in range(world_size) if peer != rank]
        self._signs = [] if words is None else [announcement.sign(rank, peer, words) for peer in peers]
        self._shown = None if words is None else words[rank]
        self._count = 0
        is_few = few(world_size, own.size, own.itemsize)
        steps = tree(world_size) if is_few else ring_order(rank, world_size)
        is_power = world_size & (world_size - 1) == 0  # then both round alike, and to multiply is twice as fast
        divide: tuple[np.ufunc, float] = (np.multiply, 1 / world_size) if is_power else (np.true_divide, world_size)
        self._divide, by = divide
        self._by = own.dtype.type(by)
        first, end = chunks(own.size, world_size)[rank]
        self._pieces = []
        for start in range(first, end, _PIECE_BYTES // own.itemsize):
            parts = [row[start : min(start + _PIECE_BYTES // own.itemsize, end)] for row in rows]
            total = steps[-1][0]
            others = [part for other, part in enumerate(parts) if other != total]
            self._pieces.append(([(parts[into], parts[source]) for into, source in steps], parts[total], others))

    @collective
    def all_reduce(self, opts: CallOptions | None = None) -> Any:
        """Averages over ranks, as torch.distributed.all_reduce does with AVG, and returns PyTorch's work.

        Cost: two meetings of all, see `Announcement`; each reads and writes its part of everybody's elements once.
        """
        self._group.take_rounds(self._announcement, self._rounds(), timeout_of(opts))
        return [self.tensor]

    def _rounds(self) -> Iterator[Exchange]:
        """Reduces; gives way where all ranks must have come that far.

        Before the first such place each rank has its elements there; between the two, a part of everybody's is this
        rank's alone; after the second one all is done.
        """
        has_moved = self.tensor.data_ptr() != self._address  # as share_memory() moves what a user finds in .grad
        if has_moved:
            self._own[...] = self.tensor.numpy()
        yield from self._meet()
        with silent_numpy():
            for steps, total, others in self._pieces:
                for into, source in steps:
                    np.add(into, source, into)
                self._divide(total, self._by, total)
                for other in others:
                    other[...] = total
        yield from self._meet()
        if self._signs:
            sequence = self._announcement.sequence
            asked = tuple(sign.hearing for sign in self._signs if sign.has_asked(sequence))
            if asked:
                yield Exchange((), asked)
        if has_moved:
            self.tensor.copy_(torch.from_numpy(self._own))

    def _meet(self) -> tuple[Exchange, ...]:
        """Returns what is to be exchanged until all ranks have come as far as this one; nothing: all have."""
        if self._shown is None:
            return self._announcement.meeting
        self._count += 1
        self._shown[0] = self._count  # who sees it sees what this rank has written before
        missing = tuple(sign for sign in self._signs if not sign.shows(self._count))
        return (Exchange((), missing),) if missing else ()


def make_shared_means(group: Group, kinds: Sequence[tuple[int, torch.dtype]]) -> list[SharedMean | None]:
    """Returns zeros in memory that all ranks have in common, to be averaged; all ranks call it.

    None, on every rank: they have none in common, because not all can read each other's memory, or there is no room;
    they are many; or the elements are none that NumPy averages.

    Args:
        group: Of the ranks.
        kinds: How many elements, and of which dtype, in each.

    Cost: two small collectives, and one or two descriptors for all of them.
    """
    ready = group.ready
    sizes = [_pages(count * dtype.itemsize) for count, dtype in kinds]
    first = _pages(len(kinds) * SIGN_WORDS * 8)  # signs come before all elements
    stride = first + sum(sizes)
    are_near = ready.announces and ready.routes.direct and group.world_size <= FEW_RANKS
    memory = _map_together(group, stride) if are_near and any(sizes) else None
    if memory is None:
        return [None for _ in kinds]
    means: list[SharedMean | None] = []
    for number, ((count, dtype), size) in enumerate(zip(kinds, sizes, strict=True)):
        array = added_by_numpy(Reduction.AVG, dtype) if count and dtype.is_floating_point else None
        # Each has its number: of two that are alike, one rank could begin with the one, and another with the other.
        announcement = ready.announcement(Reduction.AVG, dtype, (count,), 0, root=next(ready.numbers))
        if array is None or announcement is None:
            means.append(None)
        else:
            starts = [rank * stride + first for rank in range(group.world_size)]
            rows = [np.frombuffer(memory, array, count, at) for at in starts]
            words = _words(memory, stride, number, group.world_size) if ready.routes.roomy and _ORDERS_WRITES else None
            means.append(SharedMean(group, announcement, rows, words))
        first += size
    return means


def _pages(size: int) -> int:
    """Returns so many bytes as whole pages have."""
    return -(-size // _PAGE_BYTES) * _PAGE_BYTES


def _words(memory: mmap.mmap, stride: int, number: int, world_size: int) -> dict[int, memoryview]:
    """Returns, by rank, where it shows how far it is with the mean of this number."""
    starts = [rank * stride + number * SIGN_WORDS * 8 for rank in range(world_size)]
    return {rank: memoryview(memory)[start : start + SIGN_WORDS * 8].cast("q") for rank, start in enumerate(starts)}


def _map_together(group: Group, stride: int) -> mmap.mmap | None:
    """Returns memory with room for `stride` bytes of each rank; None, on all: not all can have it."""
    found = None
    with contextlib.ExitStack() as stack:
        facts = torch.zeros(4, dtype=torch.int64, device="cpu")
        if group.rank == 0:
            with contextlib.suppress(OSError, AttributeError):
                facts = _create(group.world_size * stride, stack)
        group.broadcast(facts, 0)
        with contextlib.suppress(OSError, ValueError):
            found = _open(facts, group.rank * stride, stride, group.world_size)
        everywhere = torch.tensor([int(found is not None)], device="cpu")
        group.all_reduce(everywhere, Reduction.MIN)  # and nobody closes the file before all have it
    return found if everywhere.item() else None


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
