"""Reductions that are kept ready: training repeats them, and to prepare a small one takes longer than to do it."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from cyxtrain.ring.schedules import algorithms
from cyxtrain.ring.schedules.algorithms import Multicast
from cyxtrain.ring.schedules.selector import AlgorithmSelector
from cyxtrain.ring.shared_memory.peer_read import address_of
from cyxtrain.ring.wire.frames import (
    HEADER_BYTES,
    NO_ROOT,
    Kind,
    Operation,
    Reduction,
    dtype_code,
    expected_header,
    header,
    put_sequence,
)
from cyxtrain.ring.wire.kernels import added_by_numpy, divide, silent_numpy
from cyxtrain.ring.wire.link import Link
from cyxtrain.ring.wire.payload import is_plain
from cyxtrain.ring.wire.transfers import UnexpectedHeader

MAX_READY = 64
"""So many of a kind are kept."""
_PADDING = -HEADER_BYTES % 16
_PLAIN_TYPES = (Tensor, torch.nn.Parameter)


_Key = TypeVar("_Key")
_Kept = TypeVar("_Kept")


def keep(kept: dict[_Key, _Kept], key: _Key, value: _Kept) -> None:
    """Keeps one more; of too many the oldest goes."""
    if len(kept) >= MAX_READY:
        del kept[next(iter(kept))]
    kept[key] = value


class PersistentOps:
    """What opens the reductions of one group that are kept ready; and the small ones, by shape, dtype and reduction.

    Args:
        links: To each other rank.
        routes: Of this rank.
        generation: Of the group.
    """

    def __init__(self, links: Mapping[int, Link], routes: AlgorithmSelector, generation: int) -> None:
        self.routes = routes
        self.numbers = itertools.count()
        """Of memory that all ranks have in common: the same on each, as all ask for it together."""
        self._links = links
        self._generation = generation
        self._ready: dict[tuple[torch.dtype, torch.Size, Reduction], SmallReduction] = {}

    def of(self, tensor: Tensor, reduction: Reduction) -> SmallReduction | None:
        """Returns what reduces this tensor; None: it goes the general way.

        So goes what is not small, what NumPy does not add, what travels with checksums, and every tensor whose memory
        may not be what it seems.
        """
        if type(tensor) not in _PLAIN_TYPES or tensor.layout is not torch.strided or not is_plain(tensor):
            return None
        key = tensor.dtype, tensor.shape, reduction
        ready = self._ready.get(key)
        if ready is None:
            ready = self._prepared(tensor, reduction)
            if ready is not None:
                keep(self._ready, key, ready)
        return ready if tensor.data_ptr() else None  # a tensor of zeros may have no memory

    def _prepared(self, tensor: Tensor, reduction: Reduction) -> SmallReduction | None:
        count, item_bytes = tensor.numel(), tensor.element_size()
        array = added_by_numpy(reduction, tensor.dtype)
        if array is None or count == 0 or not self.routes.tells_all(count, item_bytes):
            return None
        announcement = self.announcement(reduction, tensor.dtype, tuple(tensor.shape), count * item_bytes)
        return None if announcement is None else SmallReduction(announcement, self.routes, array)

    @property
    def announces(self) -> bool:
        """Whether anything is kept ready: not where there is nobody, or frames carry checksums."""
        return bool(self._links)

    @property
    def may_share_memory(self) -> bool:
        """Whether there may be memory that all ranks have in common, and reductions in it: few ranks of one machine."""
        return self.announces and self.routes.direct and self.routes.world_size <= algorithms.FEW_RANKS

    def announcement(
        self,
        reduction: Reduction,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        payload_bytes: int,
        root: int = NO_ROOT,
    ) -> PersistentHeader | None:
        """Returns what opens an all_reduce that is kept ready, or None.

        Args:
            reduction: How elements are combined.
            dtype: Of the elements.
            shape: Of them.
            payload_bytes: Of each frame.
            root: Number of the memory that they lie in, where all ranks have it in common.
        """
        if not self.announces:
            return None
        operation = Operation(Kind.ALL_REDUCE, 0, reduction, dtype_code(dtype), shape, root, self._generation)
        return PersistentHeader(operation, self._links, self.routes, payload_bytes)


class Exchange(NamedTuple):
    """What a rank does at once: it tells some ranks its frame, and then hears of some.

    Attributes:
        tells: The links to those.
        hears: What those tell, or show.
    """

    tells: tuple[Link, ...]
    hears: tuple[ExpectedFrame | ProgressCounter, ...]


Rounds = Iterable[Exchange]
"""What a rank does in an operation that is kept ready: it gives way for each exchange with others."""


class PersistentHeader:
    """What ranks tell each other in an operation that is kept ready, a frame of few bytes, and how it reaches all.

    Cost: each tells all others, in one round; where ranks share cores each tells rank 0, and rank 0 all others.

    Attributes:
        frame: What this rank tells: header and payload.
        hearings: What others tell this rank, by rank.
        collecting: After it, those who make something of what all have told have it.
        spreading: After it, all others have what was made of it.
        sequence: Number of the operation at work.

    Args:
        operation: Without its number.
        links: To each other rank.
        routes: Of this rank.
        payload_bytes: Of each frame.
    """

    def __init__(
        self, operation: Operation, links: Mapping[int, Link], routes: AlgorithmSelector, payload_bytes: int
    ) -> None:
        self._unnumbered = operation
        self.reduction = operation.reduction
        self.payload_bytes = payload_bytes
        self.sequence = 0
        head = header(expected_header(operation.identity(), payload_bytes), memoryview(b""), checksums=None)
        self.frame = _room_for_frame(payload_bytes)
        self.frame[:HEADER_BYTES] = head
        self.hearings: dict[int, ExpectedFrame] = {}
        self.collecting, self.spreading = (self._exchange(tell, links) for tell in routes.meeting(1))

    def _exchange(self, tell: Multicast, links: Mapping[int, Link]) -> Exchange:
        """Returns a half of a meeting, with room for what is told in it."""
        hears = {other: ExpectedFrame(links[other], self.payload_bytes) for other in tell.hears}
        self.hearings.update(hears)
        return Exchange(tuple(links[other] for other in tell.to), tuple(hears.values()))

    def sign(self, rank: int, peer: int, words: Sequence[memoryview]) -> ProgressCounter:
        """Returns what shows this rank how far another one is.

        Args:
            rank: This one.
            peer: That one.
            words: By rank, what it shows: `SIGN_WORDS` words of 8 bytes.
        """
        return ProgressCounter(words[peer], words[rank], rank, peer, self.hearings[peer], self.frame)

    @property
    def meeting(self) -> tuple[Exchange, Exchange]:
        """What all ranks do to know that all others have come."""
        return self.collecting, self.spreading

    def identity(self) -> bytes:
        """As `Operation.identity`."""
        return self._operation().identity()

    def describe(self) -> str:
        """As `Operation.describe`."""
        return self._operation().describe()

    def _operation(self) -> Operation:
        return self._unnumbered._replace(sequence=self.sequence)

    def number(self) -> bytes:
        """Numbers the frame; returns its header, which is that of all others."""
        put_sequence(self.frame, self.sequence)
        return bytes(self.frame[:HEADER_BYTES])


class SmallReduction:
    """An all_reduce of few elements: whoever has what all have told sums it, and the others get the sum.

    It is summed in the order of `algorithms.tree`, the same on every rank, in memory that is used again each time.

    Args:
        announcement: With as many bytes as the tensor.
        routes: Of this rank.
        array: NumPy's type of the elements.
    """

    def __init__(self, announcement: PersistentHeader, routes: AlgorithmSelector, array: type[np.number[Any]]) -> None:
        self.announcement = announcement
        self._averages = announcement.reduction is Reduction.AVG
        self._world_size = routes.world_size
        frames = {routes.rank: announcement.frame}
        frames.update((other, hearing.frame) for other, hearing in announcement.hearings.items())
        rows = {rank: np.frombuffer(frame, array, offset=HEADER_BYTES) for rank, frame in frames.items()}
        steps = algorithms.tree(self._world_size) if routes.sums else []
        self._steps: list[tuple[Any, Any]] = [(rows[into], rows[source]) for into, source in steps]
        self._own, self._sum = (address_of(frame) + HEADER_BYTES for frame in (announcement.frame, frames[0]))

    def rounds(self, tensor: Tensor) -> Iterator[Exchange]:
        """Reduces a tensor, in place; gives way for each exchange with others."""
        ctypes.memmove(self._own, tensor.data_ptr(), self.announcement.payload_bytes)
        yield self.announcement.collecting
        if self._steps:
            with silent_numpy():
                for into, source in self._steps:
                    np.add(into, source, into)
        yield self.announcement.spreading  # the sum is in what rank 0 tells
        ctypes.memmove(tensor.data_ptr(), self._sum, self.announcement.payload_bytes)
        if self._averages:
            divide(tensor.detach(), self._world_size)


class ExpectedFrame:
    """What one other rank tells: the frame that must come.

    Args:
        link: From whom.
        payload_bytes: Of what it tells.

    Attributes:
        frame: Where it goes.
        done: Whether all of it has arrived.
    """

    __slots__ = ("_have", "_head", "done", "frame", "link")

    def __init__(self, link: Link, payload_bytes: int) -> None:
        self.link = link
        self.frame = _room_for_frame(payload_bytes)
        self._head = b""
        self._have = 0
        self.done = False

    def expect(self, head: bytes) -> None:
        """Begins anew, with a frame of this header."""
        self._head, self._have, self.done = head, 0, False

    def advance(self) -> bool:
        """Receives what has arrived; returns whether anything moved."""
        have = self._have
        count = self.link.receive(self.frame[have:] if have else self.frame)
        have = self._have = have + count
        if count and have >= HEADER_BYTES:  # of another header there may come no more
            head = bytes(self.frame[:HEADER_BYTES])
            if head != self._head:
                raise UnexpectedHeader(self.link.rank, head)
            self.done = have == len(self.frame)
        return count > 0


class ProgressCounter:
    """How far one other rank is in what both do in memory that they have in common, as it shows there.

    Nothing comes from it, so whoever waits long for it to begin asks: with a frame, which it takes when it is through,
    or which tells it that it is in another operation. When it has begun nobody asks: it might be through before.

    Args:
        theirs: Its words there: how far it is, with what, and, by rank, in which operation it has asked that one.
        own: This rank's.
        rank: This rank.
        peer: The other one.
        hearing: Of what it asks.
        frame: What this rank asks.

    Attributes:
        done: Whether it is as far as it was to be.
    """

    __slots__ = ("_frame", "_own", "_peer", "_rank", "_theirs", "_wanted", "done", "hearing", "link")

    def __init__(
        self,
        theirs: memoryview,
        own: memoryview,
        rank: int,
        peer: int,
        hearing: ExpectedFrame,
        frame: memoryview,
    ) -> None:
        self.link = hearing.link
        self.hearing = hearing
        self.done = False
        self._theirs, self._own = theirs, own
        self._rank, self._peer = rank, peer
        self._frame = frame
        self._wanted = 0

    def shows(self, count: int) -> bool:
        """Returns whether it is that far; what it has done before can then be seen. `advance` looks again."""
        self._wanted = count
        return self.advance()

    def expect(self, head: bytes) -> None:
        """Nothing comes."""

    def advance(self) -> bool:
        """Returns whether it is there; who begins with something else is not."""
        theirs = self._theirs
        self.done = theirs[_COUNT] >= self._wanted and (theirs[_WHAT] == self._own[_WHAT] or self._has_begun)
        return self.done

    def question(self, sequence: int) -> memoryview | None:
        """Returns what to ask it in an operation; None: it has been asked, or has begun."""
        if self._has_begun or self._own[_asked(self._peer, sequence)] == sequence:
            return None
        self._own[_asked(self._peer, sequence)] = sequence
        return self._frame

    @property
    def _has_begun(self) -> bool:
        """Whether it is in the same operation as this rank: all do two things in each."""
        return self._wanted % 2 == 0

    def has_asked(self, sequence: int) -> bool:
        """Returns whether it has asked this rank in an operation, once it shows that it has done its part of it."""
        return bool(self._theirs[_asked(self._rank, sequence)] == sequence)


def _asked(rank: int, sequence: int) -> int:
    """Returns where stands in which operation a rank was asked: of two in a row, as nobody is ahead by more than one.

    Who is late may look for a question of this operation when it has been asked in the next one already.
    """
    return _ASKED + 2 * rank + sequence % 2


def show(words: memoryview, what: int) -> int:
    """Shows others that this rank has come one step further; returns how far it is.

    Who sees it sees all that this rank has written before.

    Args:
        words: Of this rank.
        what: What it does.
    """
    words[_WHAT] = what
    words[_COUNT] = count = words[_COUNT] + 1
    return int(count)


_COUNT, _WHAT = 0, 1
SAYS = 2
"""The word in which a rank says something of what it has made."""
_ASKED = 8
"""Another line of a cache than that of the first words."""
SIGN_WORDS = _ASKED + 2 * algorithms.FEW_RANKS


def _room_for_frame(payload_bytes: int) -> memoryview:
    """Returns memory for a frame in which the payload lies where NumPy adds quickly, as far as Python's own does."""
    return memoryview(bytearray(_PADDING + HEADER_BYTES + payload_bytes))[_PADDING:]
