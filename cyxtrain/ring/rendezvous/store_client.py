"""The store at which ranks meet, asked so that nobody waits for its answer beyond the deadline.

PyTorch's client waits for ever where the store's process is stopped or its machine cut off: it is asked in a thread
that we can leave. Anybody can write at a store of PyTorch's: where the run has a secret, each value carries a proof
that a member wrote it for this key of this group (HMAC-SHA256, RFC 2104), and what carries none counts as absent.
"""

from __future__ import annotations

import hmac
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch.distributed import HashStore, PrefixStore, Store

from cyxtrain.errors import RendezvousError
from cyxtrain.ring.wire.link import Deadline

_log = logging.getLogger("cyxtrain.ring")
_Answer = TypeVar("_Answer")
_GRACE_SECONDS = 0.3
"""How much longer than the deadline an answer is waited for: a store that lives answers in less."""
_PROOF = b"hmac-sha256 "
_PROOF_BYTES = len(_PROOF) + 64 + 1
_TRIES = 100
"""How often a forged value is replaced while somebody writes the next one."""


class StoreLostError(RendezvousError):
    """The store has gone while ranks were meeting; another one may open in its place."""


class StoreClient:
    """The keys of one meeting.

    Args:
        store: Shared by all ranks, with keys of its own for this meeting.
        who: How errors call this rank: "rank 3".
        deadline: When to give up.
        secret: Of the run; None: values carry no proof.
        group: What tells these keys from those of other groups in the same run.

    Attributes:
        lost: Whether the store has gone, or does not answer.
        forged: Keys at which somebody without the secret has written.
    """

    def __init__(
        self, store: Store, who: str, deadline: Deadline, secret: bytes | None = None, group: str = ""
    ) -> None:
        self.lost = False
        self._store: Any = store  # its stubs know text alone, and values are bytes
        self._who = who
        self._deadline = deadline
        self._secret = secret
        self._group = group
        self.forged: set[str] = set()
        self._questions: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._clerk: threading.Thread | None = None

    def has(self, *keys: str) -> bool:
        """Returns whether all of these keys are there."""
        return self._ask(
            lambda: self._store.check([*keys]) and all(self._opened(key, self._found(key)) for key in keys)
        )

    def get(self, key: str) -> bytes | None:
        """Returns what a member has put at a key; None: nothing."""
        return self._ask(lambda: self._opened(key, self._found(key)))

    def set(self, key: str, value: str) -> None:
        """Puts a value at a key."""
        self._ask(lambda: self._store.set(key, self._sealed(key, value)))

    def set_first(self, key: str, value: str) -> bytes:
        """Puts a value at a key, unless a member has done so; returns what is there."""
        return self._ask(lambda: self._set_first(key, value))

    def replace(self, key: str, before: bytes | None, value: str) -> bool:
        """Puts a value at a key where `before` is what members see there; returns whether it was."""
        return self._ask(lambda: self._replace(key, before, value))

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

    def _found(self, key: str) -> bytes:
        """Returns what is at a key; empty: nothing. Who could delete it meanwhile is not waited for."""
        return self._store.compare_set(key, "", "") if self._store.check([key]) else b""

    def _set_first(self, key: str, value: str) -> bytes:
        sealed, before = self._sealed(key, value), b""
        for _ in range(_TRIES):
            found = self._store.compare_set(key, before, sealed)
            opened = self._opened(key, found)
            if opened is not None:
                return opened
            before = found
        return value.encode()

    def _replace(self, key: str, before: bytes | None, value: str) -> bool:
        found = self._found(key)
        if self._opened(key, found) != before:
            return False
        sealed = self._sealed(key, value)
        return bool(self._store.compare_set(key, found, sealed) == sealed)

    def _sealed(self, key: str, value: str) -> bytes:
        """Returns a value with the proof that a member has put it at this key."""
        data = value.encode("utf-8", "surrogatepass")
        return data if self._secret is None else _PROOF + self._proof(key, data) + b"\n" + data

    def _opened(self, key: str, found: bytes) -> bytes | None:
        """Returns the value without its proof; None where there is none, or no member has put it there."""
        proof, data = (found[:_PROOF_BYTES], found[_PROOF_BYTES:]) if found.startswith(_PROOF) else (b"", found)
        if not found or self._secret is None:
            return data if found else None
        if hmac.compare_digest(proof, _PROOF + self._proof(key, data) + b"\n"):
            return data
        if key not in self.forged:
            self.forged.add(key)
            _log.warning(
                "%s ignores what somebody without the secret of this run has written at %s of the store. If that is "
                "one of your ranks, set CYXTRAIN_SECRET to the same value on all of them.",
                self._who,
                key,
            )
        return None

    def _proof(self, key: str, data: bytes) -> bytes:
        assert self._secret is not None
        subject = f"cyxtrain store {self._group} {key}".encode()
        return hmac.digest(self._secret, subject + b"\0" + data, "sha256").hex().encode()

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
