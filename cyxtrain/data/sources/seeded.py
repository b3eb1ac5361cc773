"""Iterators over data in a pass: with random generators of their own, and the state that a checkpoint keeps of them.

A state is used only if the data then give the last step's samples again. A shuffle buffer is in no state, workers draw
random numbers, a state of other workers does not fit: such data are read again, which keeps the bits.
"""

from __future__ import annotations

import collections
import contextlib
import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from torch.utils.data import DataLoader, IterableDataset

from cyxtrain.data.batches.rows import Rows, sampled_hash
from cyxtrain.data.feed import DataInterruptedError
from cyxtrain.data.order import is_stateful
from cyxtrain.data.rng import (
    CPU,
    Generators,
    as_json,
    begin_pass,
    generators_apart,
    generators_kept,
    generators_of,
    set_generators,
)
from cyxtrain.data.sources.parts import inside_of, is_hugging_face, is_instance
from cyxtrain.environment import loader_workers
from cyxtrain.errors import ConfigError

_Iterator = TypeVar("_Iterator", bound="SeededIterator")
_Read = TypeVar("_Read", bound=Sequence[Any])
Saved = Mapping[str, Any]
"""The state of data before a step, the generators' states, and a digest of the step's samples."""


class SeededIterator(ABC):
    """An iterator over what `make()` returns; its random generators, and its `parts`' own, are not training's.

    They are seeded from the seed, the `number` of the pass, and a `rank` or a reader. If `saved`, it begins there.
    """

    def __init__(
        self,
        make: Callable[[], Iterable[Any]],
        parts: Sequence[Any],
        seed: int,
        number: int,
        rank: int,
        saved: Saved | None = None,
    ) -> None:
        self.number = number
        self._seed = seed
        self._is_over = False
        self._ahead: list[Any] = []  # was read, and is the next
        # Of the latest two steps: one may be read ahead.
        self._marks: collections.deque[dict[str, Any] | None] = collections.deque([None, None], maxlen=2)
        self._others = generators_of(parts)
        with generators_kept(others=self._others):
            begin_pass(parts, self._others, seed, number, rank)
            made = make()
            initial = (made, getattr(made, "dataset", None))
            self._initial: list[tuple[Any, Any]] = [(part, _initial_state(part)) for part in initial]
            self._stateful: Any = _stateful_of(made)
            if saved is not None:
                _load(self._stateful, saved["state"])
            self._items = iter(made)
            if saved is not None:
                set_generators(saved["generators"], CPU)
            # What the data draw next continues from here, whatever training draws meanwhile.
            self._generators = Generators(self._others)

    @abstractmethod
    def _rows(self, read: Sequence[Any]) -> Iterable[Rows]:
        """Return what a step has read as rows."""

    def seed(self, rank: int) -> None:
        """Seed what the data draw from here on as a rank's own."""
        with generators_kept(others=self._others):
            begin_pass([], self._others, self._seed, self.number, rank)
            self._generators = Generators(self._others)

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """Let the data draw from their own generators within; if workers died in a stop, raise that."""
        with generators_apart(self._others):
            self._generators.use()
            try:
                yield
            except loader_workers.DEATHS as error:
                if loader_workers.may_end():
                    raise DataInterruptedError from error
                raise
            finally:
                self._generators = Generators(self._others)

    def marking(self, read: Callable[[], _Read]) -> _Read:
        """Return what `read` reads for a step; `saved` then returns the state before it."""
        mark = None
        state = _state_of(self._stateful)
        if state is not None and not self._ahead:
            mark = {"state": state, "generators": self._generators.states()}
        found = read()
        if mark is not None:
            mark["digest"] = " ".join(sampled_hash(each) for rows in self._rows(found) for each in rows.tensors())
        self._marks.append(mark)
        return found

    def saved(self, ahead: int) -> dict[str, Any] | None:
        """Return the state before the step that is `ahead` steps before the latest one; None: it is not known."""
        mark = self._marks[-1 - ahead]
        if mark is None:
            return None
        return {**mark, "generators": as_json(mark["generators"])}

    def rewind(self) -> None:
        """Let the data begin anew in the next pass, if this one is not read to its end."""
        for part, state in self._initial:
            if state is not None:
                part.load_state_dict(state)


def resume_from(
    saved: Saved, make: Callable[[], _Iterator], read: Callable[[_Iterator], object]
) -> tuple[_Iterator | None, str]:
    """Return what `make` makes of a saved state, after `read` has read a step; otherwise None, and why not."""
    try:
        found = make()
        read(found)
    except DataInterruptedError:
        raise
    except Exception as error:  # of another library
        return None, f"{type(error).__name__}: {error}"
    again = found.saved(0)
    if again is None or again["digest"] != saved["digest"]:
        return None, "it gives other samples then"
    return found, ""


def _stateful_of(made: Any) -> Any:
    """Return what has the position in its `state_dict`: an iterable, or the dataset of a plain DataLoader."""
    # Workers have copies of the dataset, whose positions are theirs.
    if type(made) is DataLoader and made.num_workers == 0 and isinstance(made.dataset, IterableDataset):
        return made.dataset
    return made


def _state_of(part: Any) -> Any:
    """Return a copy of the present state, which may change; None if there is none."""
    if is_stateful(part):
        # Training needs no state: some data have one only while they are iterated.
        with contextlib.suppress(Exception):
            return copy.deepcopy(part.state_dict())
    return None


def _initial_state(part: Any) -> Any:
    """Return the state with which data begin; None if they have none."""
    # Torchdata's loader would start its workers to return it; Hugging Face's dataset returns the one of its last use.
    if is_hugging_face(part) or is_instance(part, "torchdata.stateful_dataloader", "StatefulDataLoader"):
        return {}
    return _state_of(part)


def _load(stateful: Any, state: Any) -> None:
    """Load a copy of a state; raise ConfigError if it lacks rows, because they are in a shuffle buffer."""
    for part in (stateful, getattr(stateful, "dataset", None)):
        if any(type(each).__name__.startswith("BufferShuffled") for each in inside_of(part)):
            raise ConfigError("its state lacks the rows of its shuffle buffer")
    stateful.load_state_dict(copy.deepcopy(state))
