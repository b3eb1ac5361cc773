"""The store of a run: rank 0 serves keys and values, and every connection authenticates first.

PyTorch's TCPStore trusts everybody who reaches its port, keeps whatever it is sent, and shows it to all. Here a
connection begins with the handshake of `handshake.py`, so that only members read and write. The memory that they can
take is bounded. A request and its answer are a length (u32, big-endian) and a JSON object; values are bytes, one
character each.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import secrets
import selectors
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from cyxtrain.errors import exhausted, reason_of
from cyxtrain.ring.rendezvous.accept import Acceptor
from cyxtrain.ring.rendezvous.handshake import Hello, place_of, take_message
from cyxtrain.ring.wire.frames import PROTOCOL_VERSION, FrameError, json_object
from cyxtrain.ring.wire.link import LOST_PACKETS, Deadline, watch_over

_MAX_FRAME_BYTES = 4 << 20
_MAX_VALUES_BYTES = 16 << 20
"""Of all keys and values together, as Python keeps them."""
_SLOT_BYTES = 100
"""What a dict needs per key, approximately."""
_MAX_CONNECTIONS = 8
"""Of one rank at a time: its own, and the connections of its earlier processes that are about to end."""
_READ_BYTES = 1 << 16
_TICK_SECONDS = 1.0


class KeyValues:
    """Keys and values, with the operations of PyTorch's stores; each is atomic."""

    def __init__(self) -> None:
        self.unauthenticated: Mapping[int, int] = {}  # by rank, how many clients claimed to be it without the secret
        self._values: dict[str, bytes] = {}
        self._size = 0
        self._lock = threading.Lock()

    def answer(self, request: dict[str, Any]) -> Any:
        """Return the answer to a request; raise ValueError if it is invalid, or the store is full."""
        operation = request.get("do")
        keys = request.get("keys")
        if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
            raise ValueError("a request without keys")
        with self._lock:
            if operation == "check":
                return all(key in self._values for key in keys)
            if operation == "count":
                return len(self._values)
            if operation == "unauthenticated":
                return sorted(self.unauthenticated)
            [key] = keys
            if operation == "get":
                return self._get(key)
            if operation == "delete":
                return self._delete(key)
            if operation == "add":
                return self._add(key, int(request["number"]))
            return self._write(operation, key, request)

    def _get(self, key: str) -> str | None:
        value = self._values.get(key)
        return None if value is None else _text(value)

    def _add(self, key: str, number: int) -> int:
        total = int(self._values.get(key) or b"0") + number
        self._put(key, b"%d" % total)
        return total

    def _write(self, operation: object, key: str, request: dict[str, Any]) -> str:
        """Set, append or compare and set; return the value that the key has then."""
        before = self._values.get(key)
        value = _bytes(request["value"])
        if operation == "append":
            value = (before or b"") + value
        elif operation == "compare_set":
            expected = _bytes(request["expected"])
            if before is None and expected:
                return _text(expected)  # as PyTorch's stores do, although the key has no value
            if before is not None and before != expected:
                return _text(before)
        elif operation != "set":
            raise ValueError(f"there is no operation {operation!r}")
        self._put(key, value)
        return _text(value)

    def _put(self, key: str, value: bytes) -> None:
        size = self._size + _size(key, value)
        before = self._values.get(key)
        if before is not None:
            size -= _size(key, before)
        if size > _MAX_VALUES_BYTES:
            raise ValueError(f"the store of rank 0 holds at most {_MAX_VALUES_BYTES >> 20} MiB")
        self._size = size
        self._values[key] = value

    def _delete(self, key: str) -> bool:
        value = self._values.pop(key, None)
        if value is None:
            return False
        self._size -= _size(key, value)
        return True


class KeyValueServer:
    """Serves keys to the members of one run, in a thread of rank 0 that sleeps until a request arrives.

    Cost: a thread, a connection per rank, at most 16 MiB of values, and twice 4 MiB for each connection.
    """

    def __init__(self, listener: socket.socket, key: bytes, world_size: int) -> None:
        listener.setblocking(False)
        self.name = secrets.token_hex(16)  # by which rank 0 recognizes its own store
        self.values = KeyValues()
        self._listener = listener
        self._world_size = world_size
        self._members: dict[socket.socket, _Member] = {}
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ, lambda: None)
        self._acceptor = Acceptor([listener], "the store of rank 0", key, self._authorize, self._accept, self._selector)
        self.values.unauthenticated = self._acceptor.unauthenticated
        self._is_closed = False
        self._refusal = ""
        self._thread = threading.Thread(target=self._serve, name="cyxtrain-store-server", daemon=True)
        self._thread.start()

    def ask(self, request: dict[str, Any], seconds: float) -> Any:
        """Return the answer to a request of this process."""
        return self.values.answer(request)

    def close(self) -> None:
        """Free the port, then end all connections, which tells the members. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._wake.send(b"x")
        self._thread.join()
        self._close_files()

    def abandon(self) -> None:
        """Close the files in a forked child, which lacks the thread, without affecting the parent."""
        self._is_closed = True
        self._acceptor.abandon()
        self._close_files()

    def _close_files(self) -> None:
        self._listener.close()
        for sock in (*self._members, self._wake, self._woken):
            sock.close()
        self._selector.close()

    def _serve(self) -> None:
        while not self._is_closed:
            self._acceptor.serve(_TICK_SECONDS)
        # Before the connections end: a member that notices their end looks for the next store at this port.
        self._listener.close()
        self._acceptor.close()

    def _authorize(self, hello: Hello) -> str:
        reason = self._why_foreign(hello)
        if reason:
            self._refusal = f"rank 0 refused a process that claimed to be rank {hello.rank}: {reason}."
            return reason
        connections = sum(member.rank == hello.rank for member in self._members.values())
        if connections >= _MAX_CONNECTIONS:
            return f"too many processes have joined as rank {hello.rank}"
        return ""

    def _why_foreign(self, hello: Hello) -> str:
        """Return why a process that knows the secret is not a rank of this world; "" if it is."""
        if hello.protocol != PROTOCOL_VERSION:
            return (
                f"rank {hello.rank} speaks version {hello.protocol} of the ring's protocol, rank 0 version "
                f"{PROTOCOL_VERSION}. Install the same version of cyxtrain everywhere"
            )
        if hello.rank == 0 and hello.run != self.name:
            return (
                "two processes were started as rank 0. Give every machine its own --node-rank, or every process its "
                "own RANK"
            )
        if hello.world_size != self._world_size or hello.rank >= hello.world_size:
            return (
                f"it was started for a world of {hello.world_size}, rank 0 for a world of {self._world_size}. Start "
                "all ranks with the same WORLD_SIZE (cyxtrain launch: the same --nnodes and -n on every machine)"
            )
        return ""

    def refusal(self) -> str:
        """Return why a process was refused, or "" if none was or all ranks are connected."""
        members = list(self._members.values())  # a copy: the server's thread changes it
        joined = {member.rank for member in members}
        if joined.issuperset(range(1, self._world_size)):
            self._refusal = ""
        elif self._acceptor.failure is not None:
            self._refusal = f"rank 0 cannot join: {exhausted(self._acceptor.failure)}."
        return self._refusal

    def _accept(self, hello: Hello, sock: socket.socket) -> None:
        watch_over(sock)
        member = _Member(hello.rank, sock, self.values)
        self._members[sock] = member
        self._selector.register(sock, selectors.EVENT_READ, functools.partial(self._serve_member, member))

    def _serve_member(self, member: _Member) -> None:
        """Read requests and write answers as far as the socket allows."""
        try:
            events = selectors.EVENT_READ
            if member.serve():
                # Read no more requests until the member reads: its answers would fill the memory of rank 0.
                events = selectors.EVENT_WRITE
            self._selector.modify(member.sock, events, functools.partial(self._serve_member, member))
        except (OSError, FrameError) as error:
            if isinstance(error, TimeoutError):  # from the kernel, as the socket does not block
                self._refusal = f"rank 0 cannot reach rank {member.rank} at {member.place}: {LOST_PACKETS}."
            self._selector.unregister(member.sock)
            del self._members[member.sock]
            member.sock.close()


class _Member:
    """The server's end of a member's connection."""

    def __init__(self, rank: int, sock: socket.socket, values: KeyValues) -> None:
        self.rank = rank
        self.sock = sock
        self.place = place_of(sock.getpeername())
        self._values = values
        self._received = bytearray()
        self._answers = bytearray()

    def serve(self) -> bool:
        """Read what has arrived and answer complete requests; return whether the member has answers to read.

        Raises OSError if the connection has ended, and FrameError if a request is malformed.
        """
        if self._answer_all():
            return True
        with contextlib.suppress(BlockingIOError):
            part = self.sock.recv(_READ_BYTES)
            if not part:
                raise ConnectionError("it has left")
            self._received += part
        return self._answer_all()

    def _answer_all(self) -> bool:
        """Answer complete requests while the member reads the answers; return whether it has answers to read."""
        while not self._write():
            body = take_message(self._received, b"", _MAX_FRAME_BYTES)
            if body is None:
                return False
            self._answers += self._answer(body)
        return True

    def _answer(self, body: bytes) -> bytes:
        try:
            return _frame({"answer": self._values.answer(json_object(body))})
        except FrameError:
            raise
        except Exception as error:  # no request may end the thread that serves all members
            return _frame({"error": f"{type(error).__name__}: {error}"})

    def _write(self) -> bool:
        """Write what fits into the socket; return whether something is left."""
        with contextlib.suppress(BlockingIOError):
            del self._answers[: self.sock.send(self._answers)]
        return bool(self._answers)


class Connection:
    """A member's end of its connection to the store; `sock` is authenticated, and owned from now on."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._place = place_of(sock.getpeername())
        self._lock = threading.Lock()

    def ask(self, request: dict[str, Any], seconds: float) -> Any:
        """Send a request and wait for the answer.

        Raises:
            dist.DistNetworkError: The connection has ended, or there is no answer in time (caused by a TimeoutError).
            ValueError: The store refuses.
        """
        if not self._lock.acquire(timeout=seconds):
            raise dist.DistNetworkError("the store of rank 0: no answer to another thread") from TimeoutError()
        try:
            self._socket.settimeout(max(seconds, 0.001))  # 0 would make the socket non-blocking
            self._socket.sendall(_frame(request))
            received = bytearray()
            while (body := take_message(received, b"", _MAX_FRAME_BYTES)) is None:
                part = self._socket.recv(_READ_BYTES)
                if not part:
                    raise ConnectionError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
                received += part
            found = json_object(body)
        except (OSError, FrameError) as error:
            self._socket.close()  # a late answer must not be taken for the answer to the next request
            raise dist.DistNetworkError(f"the store of rank 0 at {self._place}: {reason_of(error)}") from error
        finally:
            self._lock.release()
        if "error" in found:
            raise ValueError(found["error"])
        return found["answer"]

    def await_end(self, seconds: float) -> bool:
        """Wait until rank 0 has closed the store; return whether it has."""
        deadline = Deadline(seconds)
        with self._lock, contextlib.suppress(OSError):
            self._socket.settimeout(max(deadline.left(), 0.001))
            return not self._socket.recv(1)
        # `ask` may have closed the socket; any error before the deadline is the end of the connection.
        return self._socket.fileno() < 0 or not deadline.passed()

    def close(self) -> None:
        """Close it. Idempotent."""
        self._socket.close()

    abandon = close


class KeyValueStore(dist.Store):
    """The store of a run as a `torch.distributed.Store`.

    `source`, owned from now on, is the server on rank 0, elsewhere a connection; `host` is rank 0's name or address.
    `get` and `wait` poll, so that other threads can use the store meanwhile. `timeout` limits them, until
    `set_timeout`, and every answer, which rank 0 gives at once.
    """

    timeout: timedelta  # a property of PyTorch's that its stubs lack

    def __init__(self, source: KeyValueServer | Connection, host: str, timeout: timedelta) -> None:
        super().__init__()
        self.set_timeout(timeout)
        self._answer_seconds = timeout.total_seconds()
        self._thread = threading.local()
        self.host = host
        self.source = source

    def unauthenticated(self) -> list[int]:
        """Return the ranks that clients claimed to be without knowing the secret, as rank 0 has seen them."""
        return [int(rank) for rank in self._ask("unauthenticated")]

    @contextlib.contextmanager
    def answering_within(self, seconds: float) -> Iterator[None]:
        """Limit the wait for each answer to this thread to `seconds`."""
        self._thread.answer_seconds = seconds
        try:
            yield
        finally:
            del self._thread.answer_seconds

    def await_end(self, seconds: float) -> bool:
        """Wait until rank 0 has closed the store; return whether it has. On rank 0, return True at once."""
        return not isinstance(self.source, Connection) or self.source.await_end(seconds)

    def close(self) -> None:
        """Close the store. On rank 0, this frees the port and tells the other ranks. Idempotent."""
        self.source.close()

    def set(self, key: str, value: str | bytes) -> None:
        """Set the value of a key."""
        self._ask("set", key, value=_text(value))

    def get(self, key: str) -> bytes:
        """Wait for a key, and return its value."""
        found = self._ask("get", key)
        if found is None:
            self.wait([key])
            found = self._ask("get", key)
        return _bytes(found or "")

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Set the value of a key if it has the expected value ("": none); return the value that it has then."""
        return _bytes(self._ask("compare_set", key, expected=_text(expected_value), value=_text(desired_value)))

    def add(self, key: str, amount: int) -> int:
        """Add to a number, and return it."""
        return int(self._ask("add", key, number=amount))

    def append(self, key: str, value: str | bytes) -> None:
        """Append to the value of a key."""
        self._ask("append", key, value=_text(value))

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys exist."""
        return bool(self._ask("check", *keys))

    def delete_key(self, key: str) -> bool:
        """Delete a key; return whether it existed."""
        return bool(self._ask("delete", key))

    def num_keys(self) -> int:
        """Return the number of keys."""
        return int(self._ask("count"))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys exist; raise DistStoreError if they do not within the timeout."""
        if timeout is None:
            timeout = self.timeout
        seconds = timeout.total_seconds()
        if not Deadline(seconds).poll_until(lambda: self.check(keys)):
            raise dist.DistStoreError(f"wait timeout after {seconds * 1000:.0f} ms, keys: {', '.join(keys)}")

    def clone(self) -> KeyValueStore:
        """Return this store, which many threads can use."""
        return self

    # PyTorch's C++ looks for these two under its own names.
    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815

    def _ask(self, operation: str, *keys: str, **fields: Any) -> Any:
        seconds = getattr(self._thread, "answer_seconds", self._answer_seconds)
        return self.source.ask({"do": operation, "keys": [*keys], **fields}, seconds)


def _frame(facts: dict[str, Any]) -> bytes:
    body = json.dumps(facts, ensure_ascii=False).encode()
    if len(body) > _MAX_FRAME_BYTES:
        raise ValueError(f"the store of rank 0 takes values of at most {_MAX_FRAME_BYTES >> 21} MiB")
    return len(body).to_bytes(4, "big") + body


def _size(key: str, value: bytes) -> int:
    return sys.getsizeof(key) + sys.getsizeof(value) + _SLOT_BYTES


def _text(value: str | bytes) -> str:
    if isinstance(value, str):
        value = value.encode()
    return bytes(value).decode("latin-1")


def _bytes(text: str) -> bytes:
    return text.encode("latin-1")
