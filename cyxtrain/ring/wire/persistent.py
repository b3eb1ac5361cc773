"""Persistent operations (MPI's word): small reductions, whose preparation takes longer than they do."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from cyxtrain.ring.schedules import algorithms
from cyxtrain.ring.schedules.kernels import Reduction, calculation_of, divide, lasting
from cyxtrain.ring.schedules.selector import AlgorithmSelector, Peers
from cyxtrain.ring.schedules.summation import binary_tree
from cyxtrain.ring.wire.frames import (
    HEADER_BYTES,
    NO_ROOT,
    Kind,
    Operation,
    dtype_code,
    expected_header,
    header,
    put_sequence,
)
from cyxtrain.ring.wire.link import Link
from cyxtrain.ring.wire.payload import address_of
from cyxtrain.ring.wire.transfers import ExpectedFrame

MAX_KEPT = 64
"""Operations kept of each kind."""
_PADDING = -HEADER_BYTES % 16  # before a frame, so that its payload is aligned
_Key = TypeVar("_Key")
_Kept = TypeVar("_Kept")


def keep(kept: dict[_Key, _Kept], key: _Key, value: _Kept) -> None:
    """Keep one more value; drop the oldest of too many."""
    if len(kept) >= MAX_KEPT:
        del kept[next(iter(kept))]
    kept[key] = value


class PersistentOps:
    """Makes the persistent operations of one group, and keeps its small reductions."""

    def __init__(self, links: Mapping[int, Link], selector: AlgorithmSelector, generation: int) -> None:
        self.selector = selector
        self.numbers = itertools.count()
        """Numbers of shared buffers: the same on each rank, as all make them together."""
        self.can_share_memory = bool(links) and all(link.checksums is None for link in links.values())
        """Whether operations may use shared memory: there are other ranks, and their frames have no checksums."""
        self._links = links
        self._generation = generation
        self._kept: dict[tuple[Any, ...], SmallReduction] = {}

    def find(self, kind: Kind, tensor: Tensor, reduction: Reduction, root_name: int = NO_ROOT) -> SmallReduction | None:
        """Return the small reduction for a collective of a tensor of this dtype and shape; None if it is not one."""
        if reduction is Reduction.NONE:
            return None
        key = (kind, tensor.dtype, tensor.shape, reduction, root_name)
        kept = self._kept.get(key)
        if kept is not None:
            return kept
        scatters = kind is Kind.REDUCE_SCATTER
        count = tensor.numel()
        if scatters:
            count *= self.selector.world_size
        if count == 0 or not self.selector.is_tiny(count, tensor.element_size()):
            return None
        payload_bytes = count * tensor.element_size()
        operation = self.operation(reduction, tensor.dtype, tuple(tensor.shape), payload_bytes, root_name, kind)
        small = SmallReduction(operation, self.selector, tensor.dtype, scatters=scatters)
        keep(self._kept, key, small)
        return small

    def operation(
        self,
        reduction: Reduction,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        payload_bytes: int,
        root: int = NO_ROOT,
        kind: Kind = Kind.ALL_REDUCE,
    ) -> PersistentOperation:
        """Return a persistent operation with other ranks.

        `root` of an all_reduce is the number of the shared buffer that holds the elements.
        """
        unnumbered = Operation(kind, 0, reduction, dtype_code(dtype), shape, root, self._generation)
        return PersistentOperation(unnumbered, self._links, self.selector, payload_bytes)


class Exchange(NamedTuple):
    """One exchange of a rank: the links that it sends its frame to, and the frames or counters it then waits for."""

    sends: tuple[Link, ...]
    receives: tuple[ExpectedFrame | ProgressCounter, ...]


Rounds = Iterable[Exchange]
"""A rank's part of a persistent operation: it yields each exchange with other ranks."""


class PersistentOperation:
    """The frame of a persistent operation, and exchanges that bring all frames, or rank 0's sum, to all.

    Cost: each sends to all others, in one round; if ranks share cores, each sends to rank 0, and rank 0 to all others.
    """

    def __init__(
        self, operation: Operation, links: Mapping[int, Link], selector: AlgorithmSelector, payload_bytes: int
    ) -> None:
        self._unnumbered = operation
        self.reduction = operation.reduction
        self.payload_bytes = payload_bytes
        self.sequence = 0  # of the running operation
        self._checksums = next(iter(links.values())).checksums
        self._begin = expected_header(operation.identity(), payload_bytes)
        self.frame = _new_frame(payload_bytes)
        """The header and the payload that this rank sends."""
        self.frame[:HEADER_BYTES] = header(self._begin, memoryview(b""), checksums=None)
        self.expected: dict[int, ExpectedFrame] = {}
        """The frames that this rank receives, by rank."""
        collecting, spreading = selector.exchanges()
        self.collecting = self._exchange(collecting, links)
        """After it, the ranks that reduce have every frame."""
        self.spreading = self._exchange(spreading, links)
        """After it, all others have the result. Empty if all ranks sum."""

    def _exchange(self, peers: Peers, links: Mapping[int, Link]) -> Exchange:
        sends = tuple(links[other] for other in peers.to)
        receives = {other: ExpectedFrame(links[other], _new_frame(self.payload_bytes)) for other in peers.sources}
        self.expected.update(receives)
        return Exchange(sends, tuple(receives.values()))

    def counter(self, rank: int, peer: int, words: Sequence[memoryview]) -> ProgressCounter:
        """Return the progress counter of `peer`, as `rank` sees it; `words` has each rank's own words."""
        return ProgressCounter(words[peer], words[rank], rank, peer, self.expected[peer], self.frame)

    @property
    def barrier(self) -> tuple[Exchange, Exchange]:
        """The exchanges after which all ranks know that all others have arrived."""
        return self.collecting, self.spreading

    def identity(self) -> bytes:
        """Return `Operation.identity`."""
        return self._unnumbered._replace(sequence=self.sequence).identity()

    def describe(self) -> str:
        """Return `Operation.describe`."""
        return self._unnumbered._replace(sequence=self.sequence).describe()

    def write_number(self) -> bytes:
        """Write the number into the frame; return how every rank's frame must begin."""
        put_sequence(self.frame, self.sequence)
        return bytes(self.frame[: len(self._begin)])

    def seal(self) -> None:
        """Make the frame ready to send: write the checksums of the payload that it has now, if frames have any."""
        if self._checksums is not None:
            begin = bytes(self.frame[: len(self._begin)])
            self.frame[:HEADER_BYTES] = header(begin, self.frame[HEADER_BYTES:], checksums=self._checksums)


class SmallReduction:
    """A reduction of few elements, summed by `binary_tree` in frames that are reused.

    The payload of the `operation` has all elements. If it `scatters`, each rank takes its own part of the result;
    otherwise, all ranks take the whole.
    """

    def __init__(
        self, operation: PersistentOperation, selector: AlgorithmSelector, dtype: torch.dtype, *, scatters: bool = False
    ) -> None:
        self.operation = operation
        self._averages = operation.reduction is Reduction.AVG
        self._world_size = selector.world_size
        how = calculation_of(operation.reduction, dtype, use_numpy=True)
        self._combine = how.operator
        payloads = {rank: expected.frame[HEADER_BYTES:] for rank, expected in operation.expected.items()}
        payloads[selector.rank] = operation.frame[HEADER_BYTES:]
        with lasting():
            tensors = {rank: torch.frombuffer(payload, dtype=dtype) for rank, payload in payloads.items()}
            terms = {rank: how.view(tensors[rank], payload) for rank, payload in payloads.items()}
        self._additions: list[tuple[Any, Any]] = []
        if selector.is_summing:
            self._additions = [(terms[into], terms[source]) for into, source in binary_tree(self._world_size)]
        # The additions leave the sum in rank 0's frame.
        self._total = tensors[0]
        self._own = address_of(payloads[selector.rank])
        self._result = address_of(payloads[0])
        self._result_bytes = operation.payload_bytes
        if scatters:
            self._result_bytes //= self._world_size
            self._result += selector.rank * self._result_bytes

    def run(self, source: memoryview, target: memoryview) -> Iterator[Exchange]:
        """Reduce the bytes of `source` into `target`; yield each exchange with other ranks."""
        return self.run_at(address_of(source), address_of(target))

    def run_at(self, source: int, target: int) -> Iterator[Exchange]:
        """Reduce from the address `source` to the address `target`; yield each exchange with other ranks."""
        ctypes.memmove(self._own, source, self.operation.payload_bytes)
        yield self.operation.collecting
        for into, other in self._additions:
            self._combine(into, other, out=into)
        yield self.operation.spreading
        if self._averages:
            divide(self._total, self._world_size)
        ctypes.memmove(target, self._result, self._result_bytes)


class ProgressCounter:
    """A peer's progress counter in shared memory; `done` when the peer is as far as awaited.

    A counter sends nothing. So a rank that waits long for a peer to begin sends it a frame, as a probe: the peer
    receives it at the end of the operation, or learns from it that it is in another operation. A peer that has begun is
    not probed: it may have finished. The peer's words are a count, an operation, and by rank the operation in which the
    peer has probed that rank. `probe_frame` receives the peer's probe; `frame` is this rank's probe.
    """

    __slots__ = ("_awaited", "_frame", "_own", "_peer", "_rank", "_theirs", "done", "link", "probe_frame")

    def __init__(
        self,
        theirs: memoryview,
        own: memoryview,
        rank: int,
        peer: int,
        probe_frame: ExpectedFrame,
        frame: memoryview,
    ) -> None:
        self.link = probe_frame.link
        self.probe_frame = probe_frame
        self.done = False
        self._theirs = theirs
        self._own = own
        self._rank = rank
        self._peer = peer
        self._frame = frame
        self._awaited = 0

    def expect_count(self, count: int) -> bool:
        """Let `advance` compare with this count from now on; return whether the peer has reached it."""
        self._awaited = count
        return self.advance()

    def expect(self, expected: bytes) -> None:
        """Do nothing: a counter receives no frame."""

    def advance(self) -> bool:
        """Return whether the peer is that far in the same operation; its earlier writes can then be read."""
        theirs = self._theirs
        is_far = theirs[_COUNT] >= self._awaited
        self.done = is_far and (theirs[_OPERATION] == self._own[_OPERATION] or self._has_begun)
        return self.done

    def probe(self, sequence: int) -> memoryview | None:
        """Return the frame that probes the peer in an operation; None if it was probed, or has begun."""
        word = _probe_word(self._peer, sequence)
        if self._has_begun or self._own[word] == sequence:
            return None
        self._own[word] = sequence
        return self._frame

    @property
    def _has_begun(self) -> bool:
        """Whether the peer has surely begun this operation: it has if an even count is awaited.

        Operations arrive an even number of times. So before an even count, the peer has passed a barrier of this one,
        and its word may already name the next one.
        """
        return self._awaited % 2 == 0

    def has_asked(self, sequence: int) -> bool:
        """Return whether the peer, which has done its part, has probed this rank in an operation."""
        return bool(self._theirs[_probe_word(self._rank, sequence)] == sequence)


def _probe_word(rank: int, sequence: int) -> int:
    """Return the word for the operation in which a rank was probed.

    There are two words: a late rank may look for a probe when the next operation has one already.
    """
    return _FIRST_PROBE + 2 * rank + sequence % 2


def publish(words: memoryview, operation: int) -> int:
    """Count this rank's progress up by one, and return it; a rank that sees the count sees all earlier writes."""
    words[_OPERATION] = operation
    # Last, as a peer that sees the count reads everything before it.
    count = words[_COUNT] + 1
    words[_COUNT] = count
    return int(count)


_COUNT = 0
"""The word that counts this rank's arrivals at barriers."""
_OPERATION = 1
"""The word that tells apart operations on the same memory."""
FINITE = 2
"""The word for whether a rank's chunk of the result is finite."""
WEIGHT = 3
"""The word for a rank's weight, a float64."""
_FIRST_PROBE = 8
"""On another cache line than the first words."""
COUNTER_WORDS = _FIRST_PROBE + 2 * algorithms.FEW_RANKS


def _new_frame(payload_bytes: int) -> memoryview:
    """Return memory for a frame whose payload is aligned for NumPy, as far as Python's own memory is."""
    return memoryview(bytearray(_PADDING + HEADER_BYTES + payload_bytes))[_PADDING:]
