"""A key-value store for the members of one run: rank 0 serves it, and every connection proves the secret first.

PyTorch's TCPStore believes everybody who reaches its port, keeps whatever it is sent, and shows it to all. Here a
connection begins with the handshake of `handshake.py`, so that only members read and write; the memory that they can
take is bounded.

A question and its answer are frames of a length (u32, big-endian) and a JSON object; values are bytes, one character
each.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import selectors
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from cyxtrain.ring.rendezvous.accept import Acceptor
from cyxtrain.ring.rendezvous.handshake import Claim
from cyxtrain.ring.wire.frames import PROTOCOL_VERSION, FrameError, json_object
from cyxtrain.ring.wire.link import Deadline

_LENGTH = struct.Struct(">I")
_MAX_FRAME_BYTES = 4 << 20
_MAX_VALUES_BYTES = 16 << 20
"""Of all keys and values together, as Python keeps them."""
_SLOT_BYTES = 100
"""Of a dict for each key, about."""
_MAX_CONNECTIONS = 8
"""Of one rank at a time: one, and those of ranks of before that end."""
_READ_BYTES = 1 << 16
_TICK_SECONDS = 1.0
_SHORTEST_NAP_SECONDS, _LONGEST_NAP_SECONDS = 0.001, 0.05

Ask = Callable[[dict[str, Any]], Any]
"""Answers a question: in the process of rank 0 directly, in others over a connection."""


class KeyValues:
    """Keys and their values, with the operations of PyTorch's stores; each is atomic."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._size = 0
        self._lock = threading.Lock()

    def answer(self, question: dict[str, Any]) -> Any:
        """Returns the answer to a question.

        Raises:
            ValueError: It is none of these operations, or the store is full.
        """
        operation, keys = question.get("do"), question.get("keys")
        if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
            raise ValueError("a question without keys")
        with self._lock:
            if operation == "check":
                return all(key in self._values for key in keys)
            if operation == "count":
                return len(self._values)
            [key] = keys
            before = self._values.get(key)
            if operation == "get":
                return None if before is None else _text(before)
            if operation == "delete":
                return self._delete(key)
            if operation == "add":
                return int(self._put(key, b"%d" % (int(before or b"0") + int(question["number"]))))
            value = _bytes(question["value"])
            if operation == "append":
                return _text(self._put(key, (before or b"") + value))
            if operation == "compare_set":
                expected = _bytes(question["expected"])
                if before != expected and (before is not None or expected):
                    return _text(expected if before is None else before)
            elif operation != "set":
                raise ValueError(f"there is no operation {operation!r}")
            return _text(self._put(key, value))

    def _put(self, key: str, value: bytes) -> bytes:
        before = self._values.get(key)
        size = self._size + _size(key, value) - (0 if before is None else _size(key, before))
        if size > _MAX_VALUES_BYTES:
            raise ValueError(f"the store of rank 0 holds at most {_MAX_VALUES_BYTES >> 20} MiB")
        self._size = size
        self._values[key] = value
        return value

    def _delete(self, key: str) -> bool:
        value = self._values.pop(key, None)
        if value is None:
            return False
        self._size -= _size(key, value)
        return True


class KeyValueServer:
    """Serves keys to the members of one run, in a thread of rank 0 that sleeps until somebody asks.

    Cost: a thread, a connection per rank, at most 16 MiB of values, and twice 4 MiB for each connection.

    Args:
        listener: Owned from now on.
        key: What members know.
        world_size: How many ranks there are.
    """

    def __init__(self, listener: socket.socket, key: bytes, world_size: int) -> None:
        listener.setblocking(False)
        self.values = KeyValues()
        self._listener = listener
        self._world_size = world_size
        self._members: dict[socket.socket, _Member] = {}
        self._selector = selectors.DefaultSelector()
        self._wake, woken = socket.socketpair()
        self._woken = woken
        self._selector.register(woken, selectors.EVENT_READ)
        self._door = Acceptor([listener], "the store of rank 0", key, self._judge, self._admit, self._selector)
        self._ends = False
        self._thread = threading.Thread(target=self._serve, name="cyxtrain-store-server", daemon=True)
        self._thread.start()

    @property
    def unproven(self) -> Counter[int]:
        """For each rank, how many claimed to be it and did not know the secret."""
        return self._door.unproven

    def close(self) -> None:
        """Frees the port, then ends all connections, which tells the members; harmless twice."""
        if self._ends:
            return
        self._ends = True
        self._wake.send(b"x")
        self._thread.join()
        self._close_files()

    def abandon(self) -> None:
        """Closes the files in a forked child, which has no such thread: the parent must not notice."""
        self._ends = True
        self._door.abandon()
        self._close_files()

    def _close_files(self) -> None:
        self._listener.close()
        for sock in (*self._members, self._wake, self._woken):
            sock.close()
        self._selector.close()

    def _serve(self) -> None:
        while not self._ends:
            for found, _ in self._selector.select(_TICK_SECONDS):
                if found.data is not None:
                    found.data()
            self._door.expire(time.monotonic())
        self._listener.close()
        self._door.close()

    def _judge(self, claim: Claim) -> str:
        if claim.protocol != PROTOCOL_VERSION:
            return (
                f"rank {claim.rank} speaks version {claim.protocol} of the ring's protocol, rank 0 version "
                f"{PROTOCOL_VERSION}. Install the same version of cyxtrain everywhere"
            )
        if claim.rank >= self._world_size:
            return (
                f"it was started for a world of {claim.world_size}, rank 0 for a world of {self._world_size}. Start "
                "all ranks with the same WORLD_SIZE"
            )
        if Counter(member.rank for member in self._members.values())[claim.rank] >= _MAX_CONNECTIONS:
            return f"too many processes have joined as rank {claim.rank}"
        return ""

    def _admit(self, claim: Claim, sock: socket.socket) -> None:
        member = _Member(claim.rank, sock, self.values)
        self._members[sock] = member
        self._selector.register(sock, selectors.EVENT_READ, lambda: self._attend(member))

    def _attend(self, member: _Member) -> None:
        """Reads questions and writes answers, as far as the socket lets us; whoever does not read is not read."""
        try:
            events = selectors.EVENT_WRITE if member.attend() else selectors.EVENT_READ
            self._selector.modify(member.sock, events, lambda: self._attend(member))
        except (OSError, FrameError):
            self._selector.unregister(member.sock)
            del self._members[member.sock]
            member.sock.close()


class _Member:
    """A member's connection, on the side of rank 0."""

    def __init__(self, rank: int, sock: socket.socket, values: KeyValues) -> None:
        self.rank = rank
        self.sock = sock
        self._values = values
        self._heard = bytearray()
        self._answers = bytearray()

    def attend(self) -> bool:
        """Reads what has come, and answers what is whole; returns whether an answer waits until the member reads.

        Raises:
            OSError: The connection has ended.
            FrameError: What came is no question.
        """
        if self._answer_all():
            return True
        with contextlib.suppress(BlockingIOError):
            part = self.sock.recv(_READ_BYTES)
            if not part:
                raise ConnectionError("it has left")
            self._heard += part
        return self._answer_all()

    def _answer_all(self) -> bool:
        while not self._write() and (body := _take(self._heard)) is not None:
            self._answers += self._answer(json_object(body))
        return bool(self._answers)

    def _write(self) -> bool:
        """Writes what fits; returns whether something is left."""
        with contextlib.suppress(BlockingIOError):
            del self._answers[: self.sock.send(self._answers)]
        return bool(self._answers)

    def _answer(self, question: dict[str, Any]) -> bytes:
        try:
            return _frame({"answer": self._values.answer(question)})
        except Exception as error:  # nothing that a member says may end the thread that serves all
            return _frame({"error": f"{type(error).__name__}: {error}"})


class Connection:
    """A member's connection to the store, on the side of the member.

    Args:
        sock: After its handshake; owned from now on.
        seconds: How long to wait for an answer; rank 0 gives it at once.
    """

    def __init__(self, sock: socket.socket, seconds: float) -> None:
        self._socket = sock
        self._seconds = seconds
        self._lock = threading.Lock()

    def ask(self, question: dict[str, Any]) -> Any:
        """Asks, and waits for the answer.

        Raises:
            dist.DistNetworkError: The connection has ended, or there is no answer in time.
            ValueError: The store refuses.
        """
        with self._lock:
            try:
                self._socket.settimeout(self._seconds)
                self._socket.sendall(_frame(question))
                received = bytearray()
                while (body := _take(received)) is None:
                    part = self._socket.recv(_READ_BYTES)
                    if not part:
                        raise ConnectionError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
                    received += part
                found = json_object(body)
            except (OSError, FrameError) as error:
                self._socket.close()  # an answer that comes later must not be taken for that to another question
                raise dist.DistNetworkError(f"the store of rank 0: {_reason(error)}") from None
        if "error" in found:
            raise ValueError(found["error"])
        return found["answer"]

    def await_end(self, seconds: float) -> bool:
        """Waits until rank 0 has closed the store; returns whether it has."""
        deadline = Deadline(seconds)
        with self._lock, contextlib.suppress(OSError):
            self._socket.settimeout(max(deadline.left(), 0.001))
            return not self._socket.recv(1)
        return self._socket.fileno() < 0 or not deadline.passed()

    def close(self) -> None:
        """Closes it; harmless twice."""
        self._socket.close()


class KeyValueStore(dist.Store):
    """The store as PyTorch takes it.

    `get` and `wait` ask again and again until the keys are there, so that other threads can ask meanwhile.

    Args:
        ask: Answers questions.
        host: Host name or address of rank 0.
        timeout: Of `get` and `wait`, until `set_timeout`.
        unproven: For each rank, how many claimed to be it and did not know the secret; rank 0 alone knows.
    """

    timeout: timedelta  # a property of PyTorch's that its stubs do not know

    def __init__(self, ask: Ask, host: str, timeout: timedelta, unproven: Mapping[int, int] | None = None) -> None:
        super().__init__()
        self.unproven = {} if unproven is None else unproven
        self.set_timeout(timeout)
        self.host = host
        self._ask = ask

    def set(self, key: str, value: str | bytes) -> None:
        """Sets the value of a key."""
        self._do("set", key, value=_text(value))

    def get(self, key: str) -> bytes:
        """Waits for a key, and returns its value."""
        found = self._do("get", key)
        if found is None:
            self.wait([key])
            found = self._do("get", key)
        return _bytes(found or "")

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Sets the value of a key that has the expected one, "" for none; returns the value that it has then."""
        return _bytes(self._do("compare_set", key, expected=_text(expected_value), value=_text(desired_value)))

    def add(self, key: str, amount: int) -> int:
        """Adds to a number, and returns it."""
        return int(self._do("add", key, number=amount))

    def append(self, key: str, value: str | bytes) -> None:
        """Appends to the value of a key."""
        self._do("append", key, value=_text(value))

    def check(self, keys: list[str]) -> bool:
        """Returns whether all keys are there."""
        return bool(self._ask({"do": "check", "keys": [*keys]}))

    def delete_key(self, key: str) -> bool:
        """Deletes a key; returns whether it was there."""
        return bool(self._do("delete", key))

    def num_keys(self) -> int:
        """Returns how many keys there are."""
        return int(self._ask({"do": "count", "keys": []}))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Waits until all keys are there.

        Raises:
            dist.DistStoreError: They are not within the timeout.
        """
        seconds = (self.timeout if timeout is None else timeout).total_seconds()
        deadline, nap = Deadline(seconds), _SHORTEST_NAP_SECONDS
        while not self.check(keys):
            if deadline.passed():
                raise dist.DistStoreError(f"wait timeout after {seconds * 1000:.0f} ms, keys: {', '.join(keys)}")
            time.sleep(min(nap, max(deadline.left(), 0.0)))
            nap = min(2 * nap, _LONGEST_NAP_SECONDS)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Waits for keys, and returns their values."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        """Sets values of keys."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def clone(self) -> KeyValueStore:
        """Returns this store, which many threads can use."""
        return self

    # PyTorch's C++ looks for these two under its own names.
    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815

    def _do(self, operation: str, key: str, **fields: Any) -> Any:
        return self._ask({"do": operation, "keys": [key], **fields})


def _frame(facts: dict[str, Any]) -> bytes:
    body = json.dumps(facts, ensure_ascii=False).encode()
    if len(body) > _MAX_FRAME_BYTES:
        raise ValueError(f"the store of rank 0 takes values of at most {_MAX_FRAME_BYTES >> 21} MiB")
    return _LENGTH.pack(len(body)) + body


def _take(received: bytearray) -> bytes | None:
    """Takes the first frame's body out of what has been heard; None where it is not whole yet.

    Raises:
        FrameError: It announces one that is too long.
    """
    if len(received) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack_from(received)
    if length > _MAX_FRAME_BYTES:
        raise FrameError(f"it announced {length} bytes")
    end = _LENGTH.size + length
    if len(received) < end:
        return None
    body = bytes(received[_LENGTH.size : end])
    del received[:end]
    return body


def _size(key: str, value: bytes) -> int:
    return sys.getsizeof(key) + sys.getsizeof(value) + _SLOT_BYTES


def _text(value: str | bytes) -> str:
    return (value.encode() if isinstance(value, str) else bytes(value)).decode("latin-1")


def _bytes(text: str) -> bytes:
    return text.encode("latin-1")


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
