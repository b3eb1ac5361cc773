"""A client of the store at which ranks meet; no call outlasts the deadline.

PyTorch's client waits for ever if the process of the store is stopped or its machine cut off, so calls to it run in a
thread that can be left behind. Anybody can write to a store of PyTorch: if the run has a secret, each value carries a
proof that a member wrote it for this key of this group (HMAC-SHA256, RFC 2104), and a value without one is ignored.
"""

from __future__ import annotations

import dataclasses
import hmac
import json
import logging
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from torch.distributed import HashStore, PrefixStore, Store

from cyxtrain.errors import RendezvousError, reason_of
from cyxtrain.ring.rendezvous.key_values import KeyValueServer, KeyValueStore
from cyxtrain.ring.rendezvous.record import parse_record
from cyxtrain.ring.wire.link import Deadline

_log = logging.getLogger("cyxtrain.ring")
_Answer = TypeVar("_Answer")
_GRACE_SECONDS = 0.3
"""How long after the deadline an answer is awaited: a store that is alive needs less."""
_PROOF = b"hmac-sha256 "
_PROOF_BYTES = len(_PROOF) + 64 + 1
_TRIES = 100
"""How often a forged value is replaced while another program writes the next one."""


class StoreLostError(RendezvousError):
    """The store has ended during rendezvous; another one may replace it."""


class StoreClient:
    """The keys of one `group`, distinct from those of others of the same run; `who` is for errors: "rank 3".

    Without a `secret`, values carry no proof.
    """

    def __init__(
        self, store: Store, who: str, deadline: Deadline, secret: bytes | None = None, group: str = ""
    ) -> None:
        self.lost = False  # whether the store has ended, or does not answer
        self._store: Any = store  # its stubs know only str, and values are bytes
        self._root = root_of(store)
        self._who = who
        self._deadline = deadline
        self._secret = secret
        self._group = group
        self.forged: set[str] = set()  # keys that a program without the secret has written

    def has(self, *keys: str) -> bool:
        """Return whether all of these keys have a value of a member."""
        return self._call(
            lambda: self._store.check([*keys]) and all(self._open(key, self._read(key)) is not None for key in keys)
        )

    def get(self, key: str) -> bytes | None:
        """Return the value that a member has set; None: there is none."""
        return self._call(lambda: self._open(key, self._read(key)))

    def read(self, kind: type[_Answer], key: str) -> _Answer:
        """Return the dataclass with fields of plain types that a rank has written there as JSON; see `parse_record`."""
        return parse_record(kind, self.get(key) or b"")

    def write(self, key: str, record: Any) -> None:
        """Set a dataclass for others to `read`."""
        self.set(key, json.dumps(dataclasses.asdict(record)))

    def set(self, key: str, value: str) -> None:
        """Set a value."""
        self._call(lambda: self._store.set(key, self._seal(key, value)))

    def set_first(self, key: str, value: str) -> bytes:
        """Set a value unless a member has set one; return the value that is there then."""
        return self._call(lambda: self._set_first(key, value))

    def replace(self, key: str, before: bytes | None, value: str) -> bool:
        """Set a value if the present one is `before`; return whether it was."""
        return self._call(lambda: self._replace(key, before, value))

    def unauthenticated(self) -> list[int]:
        """Return the ranks that clients claimed to be without knowing the secret, if our own store counts them."""
        return self._call(self._root.unauthenticated) if isinstance(self._root, KeyValueStore) else []

    def refusal(self) -> str:
        """Return why a process cannot join, on rank 0, while ranks are missing; "": there is none."""
        if isinstance(self._root, KeyValueStore) and isinstance(self._root.source, KeyValueServer):
            return self._root.source.refusal()
        return ""

    def delete(self, key: str) -> None:
        """Delete a key, if it exists."""
        self._call(lambda: self._store.delete_key(key))

    def _read(self, key: str) -> bytes:
        """Return the stored value, empty if there is none; never wait for a key that is deleted meanwhile."""
        return self._store.compare_set(key, "", "") if self._store.check([key]) else b""

    def _set_first(self, key: str, value: str) -> bytes:
        sealed, before = self._seal(key, value), b""
        for _ in range(_TRIES):
            found = self._store.compare_set(key, before, sealed)
            opened = self._open(key, found)
            if opened is not None:
                return opened
            before = found
        return value.encode()

    def _replace(self, key: str, before: bytes | None, value: str) -> bool:
        found = self._read(key)
        if self._open(key, found) != before:
            return False
        sealed = self._seal(key, value)
        return bool(self._store.compare_set(key, found, sealed) == sealed)

    def _seal(self, key: str, value: str) -> bytes:
        """Return a value with the proof that a member wrote it for this key."""
        data = value.encode("utf-8", "surrogatepass")
        return data if self._secret is None else _PROOF + self._proof(key, data) + b"\n" + data

    def _open(self, key: str, found: bytes) -> bytes | None:
        """Return a value without its proof; None if there is none, or if no member has written it."""
        proof, data = (found[:_PROOF_BYTES], found[_PROOF_BYTES:]) if found.startswith(_PROOF) else (b"", found)
        if not found or self._secret is None:
            return data if found else None
        if hmac.compare_digest(proof, _PROOF + self._proof(key, data) + b"\n"):
            return data
        if key not in self.forged:
            self.forged.add(key)
            _log.warning(
                "%s ignores a value at %s of the store that was written without the secret of this run. If one of "
                "your ranks wrote it, set CYXTRAIN_SECRET to the same value on all of them.",
                self._who,
                key,
            )
        return None

    def _proof(self, key: str, data: bytes) -> bytes:
        assert self._secret is not None
        subject = f"cyxtrain store {self._group} {key}".encode()
        return hmac.digest(self._secret, subject + b"\0" + data, "sha256").hex().encode()

    def _call(self, call: Callable[[], _Answer]) -> _Answer:
        """Call the store.

        Raises StoreLostError if it has ended, and RendezvousError if it does not answer before the deadline.
        """
        seconds = self._deadline.left() + _GRACE_SECONDS
        if isinstance(self._root, KeyValueStore):
            with self._root.answering_within(seconds):
                result = _attempt(call)
        else:
            result = _attempt(call) if isinstance(self._root, HashStore) else attempt_in_thread(call, seconds)
        if isinstance(result, TimeoutError) or isinstance(getattr(result, "__cause__", None), TimeoutError):
            self.lost = True
            raise RendezvousError(
                f"{self._who} gets no answer from the store at which the ranks meet ({result!s}): the process of rank "
                "0, or the launcher, is suspended, or the network is cut off or loses large packets (path MTU).",
                rank=0,
            ) from None
        if isinstance(result, RuntimeError):  # PyTorch's DistNetworkError, DistStoreError and the like
            self.lost = True
            raise StoreLostError(
                f"{self._who} lost the store at which the ranks meet ({reason_of(result)}): "
                "has the process of rank 0, or the launcher, ended? Look at its output first.",
                rank=0,
            ) from result
        if isinstance(result, Exception):
            raise result
        return result


def _attempt(call: Callable[[], _Answer]) -> _Answer | Exception:
    try:
        return call()
    except Exception as error:
        return error


def attempt_in_thread(call: Callable[[], _Answer], seconds: float) -> _Answer | Exception:
    """Return the result, the error, or a TimeoutError: PyTorch's clients can wait for ever, so a thread waits there."""
    results: list[_Answer | Exception] = []
    thread = threading.Thread(target=lambda: results.append(_attempt(call)), name="cyxtrain-store", daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else TimeoutError()


def root_of(store: Store) -> Store:
    """Return the store below all prefixes."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store
