"""A client of the store at which ranks meet; no call outlasts the deadline.

PyTorch's client waits for ever if the process of the store is stopped or its machine cut off, so calls to it run in a
thread that can be left behind. Anybody can write to a store of PyTorch's. So, if the run has a secret, each value
carries a proof that a member wrote it for this key of this group (HMAC-SHA256, RFC 2104). The client ignores a value
without a proof.
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
_PROOF_PREFIX = b"hmac-sha256 "
_PROOF_BYTES = len(_PROOF_PREFIX) + 64 + 1
"""Of the prefix, a digest in hexadecimal, and a line feed."""
_TRIES = 100
"""How often a forged value is replaced while another program writes the next one."""


class StoreLostError(RendezvousError):
    """The store has ended during rendezvous; another one may replace it."""


class StoreClient:
    """The values of one `group` at the store, with the proofs that its members wrote them.

    Without a `secret`, values carry no proof. `who` is for errors: "rank 3".
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
        return self._call(lambda: self._has(keys))

    def _has(self, keys: tuple[str, ...]) -> bool:
        if not self._store.check([*keys]):
            return False
        return all(self._get(key) is not None for key in keys)

    def get(self, key: str) -> bytes | None:
        """Return the value that a member has set, or None."""
        return self._call(lambda: self._get(key))

    def _get(self, key: str) -> bytes | None:
        return self._open(key, self._read(key))

    def read(self, kind: type[_Answer], key: str) -> _Answer:
        """Return the dataclass that a rank has written there, as `parse_record` reads it."""
        return parse_record(kind, self.get(key) or b"")

    def write(self, key: str, record: Any) -> None:
        """Set a dataclass, with fields of plain types, for others to `read`."""
        self.set(key, json.dumps(dataclasses.asdict(record)))

    def set(self, key: str, value: str) -> None:
        """Set a value."""
        self._call(lambda: self._store.set(key, self._seal(key, value)))

    def set_first(self, key: str, value: str) -> bytes:
        """Set a value unless a member has set one; return the value that the key has then."""
        return self._call(lambda: self._set_first(key, value))

    def replace(self, key: str, before: bytes | None, value: str) -> bool:
        """Set a value if the present one is `before`; return whether it was."""
        return self._call(lambda: self._replace(key, before, value))

    def unauthenticated(self) -> list[int]:
        """Return the ranks that clients claimed to be without knowing the secret."""
        if not isinstance(self._root, KeyValueStore):  # PyTorch's stores do not count them
            return []
        return self._call(self._root.unauthenticated)

    def refusal(self) -> str:
        """Return, on rank 0, why a process was refused, or ""; see `KeyValueServer.refusal`."""
        if isinstance(self._root, KeyValueStore) and isinstance(self._root.source, KeyValueServer):
            return self._root.source.refusal()
        return ""

    def delete(self, key: str) -> None:
        """Delete a key, if it exists."""
        self._call(lambda: self._store.delete_key(key))

    def _read(self, key: str) -> bytes:
        """Return the stored value, or b""."""
        if not self._store.check([key]):
            return b""
        # Not `get`, which would wait for the key if another program deletes it now.
        value: bytes = self._store.compare_set(key, "", "")
        return value

    def _set_first(self, key: str, value: str) -> bytes:
        sealed = self._seal(key, value)
        before = b""
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
        if self._secret is None:
            return data
        return self._proof(self._secret, key, data) + data

    def _open(self, key: str, found: bytes) -> bytes | None:
        """Return a value without its proof; None if it is empty, or if no member has written it."""
        if not found:
            return None
        proof, data = _split_proof(found)
        if self._secret is None or hmac.compare_digest(proof, self._proof(self._secret, key, data)):
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

    def _proof(self, secret: bytes, key: str, data: bytes) -> bytes:
        subject = f"cyxtrain store {self._group} {key}".encode()
        digest = hmac.digest(secret, subject + b"\0" + data, "sha256")
        return _PROOF_PREFIX + digest.hex().encode() + b"\n"

    def _call(self, call: Callable[[], _Answer]) -> _Answer:
        """Call the store.

        Raises StoreLostError if it has ended, and RendezvousError if it does not answer before the deadline.
        """
        result = self._attempt_before_deadline(call)
        if not isinstance(result, Exception):
            return result
        if isinstance(result, TimeoutError) or isinstance(result.__cause__, TimeoutError):
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
        raise result

    def _attempt_before_deadline(self, call: Callable[[], _Answer]) -> _Answer | Exception:
        """Return the result of a call of the store, or the error that it raised."""
        seconds = self._deadline.left() + _GRACE_SECONDS
        if isinstance(self._root, KeyValueStore):
            with self._root.answering_within(seconds):
                return _attempt(call)
        if isinstance(self._root, HashStore):  # in the memory of this process: it always answers
            return _attempt(call)
        return attempt_in_thread(call, seconds)


def _split_proof(found: bytes) -> tuple[bytes, bytes]:
    """Return the proof of a value, b"" without one, and the value."""
    if not found.startswith(_PROOF_PREFIX):
        return b"", found
    return found[:_PROOF_BYTES], found[_PROOF_BYTES:]


def _attempt(call: Callable[[], _Answer]) -> _Answer | Exception:
    try:
        return call()
    except Exception as error:
        return error


def attempt_in_thread(call: Callable[[], _Answer], seconds: float) -> _Answer | Exception:
    """Return the result of a call, the error that it raised, or a TimeoutError after `seconds`."""
    results: list[_Answer | Exception] = []
    # In a thread that can be left behind, because PyTorch's clients can wait for ever.
    thread = threading.Thread(target=lambda: results.append(_attempt(call)), name="cyxtrain-store", daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else TimeoutError()


def root_of(store: Store) -> Store:
    """Return the store below all prefixes."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store
