"""Batches on the device, and this rank's share of a global batch."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor
from typing_extensions import override

from cyxtrain.data.batches.collate import labels_of
from cyxtrain.data.batches.prefetch import DeviceCopier, call_early, prefetch_one
from cyxtrain.data.batches.rows import Rows
from cyxtrain.data.batches.structure import Tree, num_rows
from cyxtrain.data.sampler import Indices
from cyxtrain.errors import shortened
from cyxtrain.world.slices import Slices


@dataclass
class Batch:
    """Rows that go through the model at once."""

    number: int  # of the batch in its epoch, from 0; the same on every rank
    inputs: Tree  # shape (rows, ...), or several such
    targets: Tree | None
    weights: Tensor | None = None  # shape (rows,), or None: all samples have weight 1
    items: Tensor | int | None = None  # items, such as tokens, in a step over all ranks; None: this batch's

    @property
    def rows(self) -> int:
        """The number of samples."""
        return num_rows(self.inputs)

    @property
    def labels(self) -> Tree | None:
        """What metrics compare outputs with: the targets, or labels among inputs by name."""
        return labels_of(self.inputs, self.targets)


class Part(NamedTuple):
    """One slice of a step: its number, and which of the rank's micro-batches it has."""

    number: int
    batches: range


class Share(ABC):
    """This rank's part of a step, micro-batch by micro-batch. It can be iterated again."""

    def __init__(self, number: int, global_rows: int, copier: DeviceCopier) -> None:
        self.number = number
        self.global_rows = global_rows
        self.next: Share | None = None
        """The share of the next step, if its samples may be fetched before this step is complete."""
        self.count_ranks: Callable[[], int] | None = None
        """Returns how many ranks, from 0, have samples in this step; None: no rank knows before they communicate."""
        self.is_read_again = False
        """Whether the step reads the samples more than once: it gets copies, as a model may change them in place."""
        self._copier = copier
        self._latest = -1
        self._early: tuple[int, Callable[[], Callable[[], Rows] | None]] | None = None

    @property
    @abstractmethod
    def rows(self) -> int:
        """The number of samples on this rank; 0 is possible at the tail of an epoch."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of micro-batches."""

    @property
    @abstractmethod
    def parts(self) -> Sequence[Part]:
        """The slices of this rank: without virtual ranks, one."""

    @abstractmethod
    def _fetch(self, index: int) -> Rows:
        """Return the samples of a micro-batch, before they are placed on the device."""

    @abstractmethod
    def describe(self, rows: Sequence[int]) -> str:
        """Describe some samples of this share, counted from 0 over its micro-batches, as users know them."""

    def __iter__(self) -> Iterator[Batch]:
        return self.batches(range(len(self)))

    def batches(self, numbers: range) -> Iterator[Batch]:
        """Yield some micro-batches, one after the other."""
        for index in numbers:
            self._latest = index
            receive = self._begun_or_sent(index)
            assert receive is not None
            yield Batch(self.number, *receive())

    def _copied(self, kept: Rows) -> Rows:
        """Return samples that this share keeps, to be given to the model."""
        if not self.is_read_again:
            return kept
        return kept.mapped(self._copier.clone)

    def _begun_or_sent(self, index: int) -> Callable[[], Rows] | None:
        """Return what receives a micro-batch, whose copy may have begun early."""
        early = self._early
        self._early = None
        if early is not None and early[0] == index:
            return early[1]()
        return self._send(index)

    def prefetch_next(self, timed: AbstractContextManager[object]) -> None:
        """Begin to copy the micro-batch after the latest one to the accelerator; on a CPU, do nothing.

        Call it when the backward of the latest one has been launched: the accelerator is busy while the host fetches.
        An error in the data is raised when that micro-batch is needed.
        """
        if not self._copier.prefetches:
            return
        with timed:
            share: Share | None = self
            index = self._latest + 1
            if index >= len(self):
                share = self.next
                index = 0
            if share is not None and share._early is None:
                share._early = index, call_early(functools.partial(share._send, index))

    def _send(self, index: int) -> Callable[[], Rows] | None:
        """Begin to copy a micro-batch; None if it does not exist: a rank may have no samples in the next step."""
        if index >= len(self):
            return None
        return self._copier.send(self._fetch(index))


class RowShare(Share):
    """Rows by number: `pieces` has the micro-batches of each slice of this rank.

    If `keeps`, `fetch` gives each micro-batch once, in order, otherwise in each iteration.
    """

    def __init__(
        self,
        number: int,
        global_rows: int,
        pieces: Mapping[int, Sequence[Indices]],
        fetch: Callable[[Indices], Rows],
        copier: DeviceCopier,
        *,
        keeps: bool,
    ) -> None:
        super().__init__(number, global_rows, copier)
        self._pieces = [piece for of_slice in pieces.values() for piece in of_slice]
        self._parts = parts_of(pieces)
        self._fetch_rows = fetch
        self._keeps = keeps
        self._kept: list[Rows] = []

    @property
    @override
    def rows(self) -> int:
        return sum(map(len, self._pieces))

    @override
    def __len__(self) -> int:
        return len(self._pieces)

    @property
    @override
    def parts(self) -> Sequence[Part]:
        return self._parts

    @override
    def _fetch(self, index: int) -> Rows:
        if not self._keeps:
            return self._fetch_rows(self._pieces[index])
        if index == len(self._kept):
            self._kept.append(self._fetch_rows(self._pieces[index]))
        return self._copied(self._kept[index])

    @override
    def describe(self, rows: Sequence[int]) -> str:
        indices = np.concatenate(self._pieces)
        return _numbered([int(indices[row]) for row in rows])


class StreamStep(NamedTuple):
    """What was read of a stream for one step."""

    batches: Mapping[int, Sequence[Rows]]  # of each slice of this rank
    num_read: int  # batches that were read for it, by all ranks that share the data


class StreamShare(Share):
    """Batches of a stream for one step: `read` is called once."""

    def __init__(self, number: int, read: Callable[[], StreamStep], copier: DeviceCopier) -> None:
        super().__init__(number, 0, copier)
        self._read = read
        self._result: Callable[[], StreamStep] | None = None

    def _get(self) -> StreamStep:
        if self._result is None:
            self._result = call_early(self._read)
        return self._result()

    def _rows(self) -> list[Rows]:
        return [rows for of_slice in self._get().batches.values() for rows in of_slice]

    @property
    def batches_read(self) -> int:
        """How many batches were read for this step, by all ranks that share the data."""
        return self._get().num_read

    @property
    @override
    def rows(self) -> int:
        return sum(num_rows(rows.inputs) for rows in self._rows())

    @override
    def __len__(self) -> int:
        return len(self._rows())

    @property
    @override
    def parts(self) -> Sequence[Part]:
        return parts_of(self._get().batches)

    @override
    def _fetch(self, index: int) -> Rows:
        return self._copied(self._rows()[index])

    @override
    def describe(self, rows: Sequence[int]) -> str:
        return f"{_numbered(rows)} of this rank's part of the step"  # a stream numbers no samples


def parts_of(batches: Mapping[int, Sequence[object]]) -> list[Part]:
    """Return the parts of a step that has these micro-batches of each slice."""
    parts = []
    first = 0
    for number, of_slice in batches.items():
        parts.append(Part(number, range(first, first + len(of_slice))))
        first += len(of_slice)
    return parts


def _numbered(samples: Sequence[int]) -> str:
    word = "sample" if len(samples) == 1 else "samples"
    return f"{word} {shortened(map(str, samples))}"


def on_device(batches: Iterator[tuple[int, Rows]], copier: DeviceCopier, *, prefetches: bool = True) -> Iterator[Batch]:
    """Yield batches on the device; if `prefetches`, each after the copy of the next one has begun."""
    sent: Iterator[tuple[int, Callable[[], Rows]]] = ((number, copier.send(rows)) for number, rows in batches)
    if prefetches and copier.prefetches:
        sent = prefetch_one(sent)
    for number, receive in sent:
        yield Batch(number, *receive())


class BatchShare(NamedTuple):
    """The batches that a rank evaluates."""

    slices: Slices = Slices()
    group: int = 0  # neighboring batches of a rank before it is the next one's turn; 0: all of its, if the end is known
    done: frozenset[int] = frozenset()  # groups that are left out

    def has(self, number: int) -> bool:
        """Return whether it is the rank's turn to evaluate a batch."""
        group = number // max(self.group, 1)
        return group % self.slices.count in self.slices.owned and group not in self.done

    def of(self, num_batches: int) -> list[int]:
        """Return the numbers of the rank's batches."""
        if self.group:
            return [number for number in range(num_batches) if self.has(number)]
        count = self.slices.count
        owned = self.slices.owned
        return list(range(num_batches * owned.start // count, num_batches * owned.stop // count))
