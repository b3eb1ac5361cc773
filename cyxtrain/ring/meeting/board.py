"""The store at which ranks meet, asked so that nobody waits for its answer beyond the deadline.

PyTorch's client waits for ever where the store's process is stopped or its machine cut off: it is asked in a thread
that we can leave.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeVar, cast

from torch.distributed import HashStore, PrefixStore, Store

from cyxtrain.errors import RendezvousError
from cyxtrain.ring.link import Deadline

_Answer = TypeVar("_Answer")
_GRACE_SECONDS = 0.3
"""How much longer than the deadline an answer is waited for: a store that lives answers in less."""


class StoreLostError(RendezvousError):
    """The store has gone while ranks were meeting; another one may open in its place."""


class Board:
    """The keys of one meeting.

    Args:
        store: Shared by all ranks, with keys of its own for this meeting.
        who: How errors call this rank: "rank 3".
        deadline: When to give up.

    Attributes:
        lost: Whether the store has gone, or does not answer.
    """

    def __init__(self, store: Store, who: str, deadline: Deadline) -> None:
        self.lost = False
        self._store = store
        self._who = who
        self._deadline = deadline
        self._questions: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._clerk: threading.Thread | None = None

    def has(self, *keys: str) -> bool:
        """Returns whether all of these keys are there."""
        return self._ask(lambda: self._store.check(list(keys)))

    def get(self, key: str) -> bytes:
        """Returns what is at a key that is there."""
        return self._ask(lambda: self._store.get(key))

    def set(self, key: str, value: str) -> None:
        """Puts a value at a key."""
        self._ask(lambda: self._store.set(key, value))

    def set_first(self, key: str, value: str) -> bytes:
        """Puts a value at a key, unless there is one; returns what is there."""
        return self._ask(lambda: self._store.compare_set(key, "", value))

    def add(self, key: str, number: int) -> int:
        """Adds to the number at a key, and returns it."""
        return self._ask(lambda: self._store.add(key, number))

    def delete(self, key: str) -> None:
        """Takes a key away, if it is there."""
        self._ask(lambda: self._store.delete_key(key))

    def close(self) -> None:
        """Ends the thread; harmless twice. One that gets no answer ends when its store does."""
        if self._clerk is not None:
            self._questions.put(None)
            if not self.lost:
                self._clerk.join()
            self._clerk = None

    def _ask(self, question: Callable[[], _Answer]) -> _Answer:
        """Asks the store.

        Raises:
            StoreLostError: It has gone.
            RendezvousError: It does not answer.
        """
        answer = _tried(question) if isinstance(root_of(self._store), HashStore) else self._ask_patiently(question)
        if isinstance(answer, RuntimeError):  # PyTorch's DistNetworkError, DistStoreError and their kind
            self.lost = True
            raise StoreLostError(
                f"{self._who} lost the store at which the ranks meet ({first_line(answer)}): "
                "has the process of rank 0, or the launcher, ended? Look at its output first.",
                rank=0,
            ) from answer
        if isinstance(answer, Exception):
            raise answer
        return cast("_Answer", answer)

    def _ask_patiently(self, question: Callable[[], object]) -> object:
        if self._clerk is None:
            self._clerk = threading.Thread(target=self._serve, name="cyxtrain-store", daemon=True)
            self._clerk.start()
        self._questions.put(question)
        try:
            return self._answers.get(timeout=self._deadline.left() + _GRACE_SECONDS)
        except queue.Empty:
            self.lost = True
            raise RendezvousError(
                f"{self._who} gets no answer from the store at which the ranks meet: the process of rank 0, or the "
                "launcher, is stopped, or the network to it is cut off. Look at both.",
                rank=0,
            ) from None

    def _serve(self) -> None:
        while (question := self._questions.get()) is not None:
            self._answers.put(_tried(question))


def _tried(question: Callable[[], object]) -> object:
    """Returns the answer, or the error."""
    try:
        return question()
    except Exception as error:
        return error


def first_line(error: Exception) -> str:
    """Returns what PyTorch says of an error; what follows is where in its own code."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def root_of(store: Store) -> Store:
    """Returns the store under all prefixes."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store
