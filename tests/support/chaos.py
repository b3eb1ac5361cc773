"""A proxy that stands between every pair of ranks and does to their links what faults say.

One thread moves all bytes. Each rank has a port here; `ChaosStore`, given to the ranks instead of their store, tells
the proxy where a rank really listens, and leads connections that go there to the proxy: as somebody on the network
path could, and unlike somebody at the store, whom the handshake finds out. The proxy knows a link by the first message
on it, which names the rank that connects and the role; it changes nothing that no fault is about. Ranks must talk over
TCP.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import struct
import threading
import time
import types
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch.distributed as dist
from chaos_links import Connection
from chaos_records import Happened, Traffic
from faults import Fault, Faults

from cyxtrain.ring.rendezvous import dial

FRAME = struct.Struct(">4sI")
"""What every message of the handshake begins with: magic, and the length of the JSON text that follows."""
HELLO = b"CYXT"
_HERE = b"HERE"
"""The magic of what a `ChaosStore` says: where a rank listens."""
_LONGEST_HELLO = 1 << 16
_IDLE_SECONDS = 60.0
_END_SECONDS = 10.0


_redirected: dict[Any, tuple[str, int]] = {}
"""Where connections to ranks lead in this process, by the address at which a rank listens."""


class _Socket(socket.socket):
    def connect_ex(self, address: Any) -> int:
        return super().connect_ex(_redirected.get(address, address))


vars(dial)["socket"] = types.SimpleNamespace(**(vars(socket) | {"socket": _Socket}))


class ChaosStore(dist.Store):
    """A store that passes everything through, and leads connections to the address in `.../entry/<rank>` to the proxy.

    Args:
        store: The store that the ranks share; any, also of another process than the proxy's.
        ports: The proxy's, by rank.
    """

    def __init__(self, store: dist.Store, ports: Sequence[int]) -> None:
        super().__init__()
        self._store = store
        self._ports = list(ports)

    def set(self, key: str, value: str | bytes) -> None:
        entry = self._redirect(key, value)
        if entry is not None:
            body = json.dumps({"host": entry["host"], "port": entry["port"]}).encode()
            with socket.create_connection(("127.0.0.1", self._ports[entry["rank"]]), timeout=_END_SECONDS) as sock:
                sock.sendall(FRAME.pack(_HERE, len(body)) + body)
                assert sock.recv(2) == b"ok"  # only then may others read it
        self._store.set(key, value)  # type: ignore[arg-type]  # the stub omits bytes

    def _redirect(self, key: str, value: str | bytes) -> dict[str, Any] | None:
        """Leads connections to the address in an entry to the proxy; returns the entry and its rank, if it is one."""
        parts = key.split("/")
        if not value or len(parts) < 2 or parts[-2] != "entry" or not parts[-1].isdigit():
            return None
        text = value if isinstance(value, str) else value.decode()
        entry: dict[str, Any] = json.loads(text.rpartition("\n")[2])  # behind the proof that a member wrote it
        rank = int(parts[-1])
        _redirected[entry["host"], entry["port"]] = ("127.0.0.1", self._ports[rank])
        return entry | {"rank": rank}

    def get(self, key: str) -> bytes:
        return self._store.get(key)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def add(self, key: str, value: int) -> int:
        return self._store.add(key, value)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        found = self._store.compare_set(key, expected, desired)
        self._redirect(key, found)
        return found

    def wait(self, keys: list[str], *timeout: Any) -> None:
        self._store.wait(keys, *timeout)

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(key)

    def set_timeout(self, timeout: Any) -> None:
        self._store.set_timeout(timeout)


@dataclass
class _Visitor:
    """Who has connected and not said yet who it is."""

    sock: socket.socket
    rank: int
    received: bytearray

    def message(self) -> tuple[bytes, bytes] | None:
        """Returns (magic, body) of the first message, once it is here; what is no message has no body."""
        if len(self.received) < FRAME.size:
            return None
        magic, length = FRAME.unpack_from(self.received)
        if magic not in (HELLO, _HERE) or length > _LONGEST_HELLO:
            return magic, b""
        end = FRAME.size + length
        return (magic, bytes(self.received[FRAME.size : end])) if len(self.received) >= end else None


class Proxy:
    """Stands before `world_size` ranks, until the end of the `with` block.

    Args:
        world_size: How many ranks.
        faults: What happens to their links; those of processes are none of the proxy's business.

    Attributes:
        ports: Where it stands for each rank, on 127.0.0.1.
        happened: Every fault that has begun, in the order of time.
    """

    def __init__(self, world_size: int, faults: Faults = ()) -> None:
        self.happened: list[Happened] = []
        self._faults = [fault for fault in faults if isinstance(fault, Fault)]
        self._real: dict[int, tuple[str, int]] = {}
        self._listeners = [socket.create_server(("127.0.0.1", 0), backlog=1024) for _ in range(world_size)]
        self.ports = [int(listener.getsockname()[1]) for listener in self._listeners]
        self._visitors: dict[socket.socket, _Visitor] = {}
        self._connections: list[Connection] = []
        self._everyone: list[Connection] = []
        self._selector = selectors.DefaultSelector()
        self._error: BaseException | None = None
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        for rank, listener in enumerate(self._listeners):
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ, rank)
        self._thread = threading.Thread(target=self._run, name="chaos proxy", daemon=True)

    def __enter__(self) -> Proxy:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._wake_writer.close()
        self._thread.join(_END_SECONDS)
        assert not self._thread.is_alive(), "the proxy hangs"
        if self._error is not None:
            raise self._error

    def store(self, store: dist.Store) -> ChaosStore:
        """Returns the store to give to the ranks."""
        return ChaosStore(store, self.ports)

    def traffic(self) -> list[Traffic]:
        """Returns what has gone over each direction of each link so far, in the order in which they connected."""
        return [traffic for connection in list(self._everyone) for traffic in connection.traffic()]

    # All below runs in the proxy's thread.

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:
            self._error = error
        finally:
            self._close()

    def _turn(self) -> bool:
        """Waits until something can move, and moves it; returns whether to go on."""
        now = time.monotonic()
        again = min([connection.pump(now) for connection in self._connections] + [now + _IDLE_SECONDS])
        for connection in [connection for connection in self._connections if connection.over]:
            self._connections.remove(connection)
            connection.close(self._selector)
        for connection in self._connections:
            connection.watch(self._selector)
        for key, ready in self._selector.select(max(again - time.monotonic(), 0.0)):
            if key.fileobj is self._wake_reader:
                return False
            if isinstance(key.data, int):
                self._welcome(self._listeners[key.data], key.data)
            elif isinstance(key.data, _Visitor):
                self._listen_to(key.data)
            else:
                key.data(ready, time.monotonic())
        return True

    def _welcome(self, listener: socket.socket, rank: int) -> None:
        with contextlib.suppress(OSError):  # it has left again
            sock, _ = listener.accept()
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            visitor = self._visitors[sock] = _Visitor(sock, rank, bytearray())
            self._selector.register(sock, selectors.EVENT_READ, visitor)

    def _listen_to(self, visitor: _Visitor) -> None:
        try:
            part = visitor.sock.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        visitor.received += part
        message = visitor.message()
        if part and message is None:
            return
        self._selector.unregister(visitor.sock)
        del self._visitors[visitor.sock]
        if message is not None and message[0] == _HERE:
            entry = json.loads(message[1])
            self._real[visitor.rank] = (entry["host"], entry["port"])
            visitor.sock.send(b"ok")
            visitor.sock.close()
        elif part and visitor.rank in self._real:
            self._connect(visitor, json.loads(message[1]) if message and message[1] else {})
        else:
            visitor.sock.close()

    def _connect(self, visitor: _Visitor, hello: dict[str, Any]) -> None:
        link = (hello.get("rank"), visitor.rank, hello.get("role"))
        try:
            sock = socket.create_connection(self._real[visitor.rank], timeout=_END_SECONDS)
        except OSError:
            visitor.sock.close()  # nobody listens there any more
            return
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = Connection(visitor.sock, sock, link, self._faults, self.happened, bytes(visitor.received))
        self._connections.append(connection)
        self._everyone.append(connection)

    def _close(self) -> None:
        for connection in self._connections:
            connection.close(self._selector)
        for address in self._real.values():
            _redirected.pop(address, None)
        everything: Iterable[socket.socket] = (*self._listeners, *self._visitors, self._wake_reader)
        for sock in everything:
            sock.close()
        self._selector.close()
