"""One rank of what a machine can do at best: bytes through bare sockets, and from memory to memory.

The ranks stand in a ring of connections, TCP or Unix sockets. No torch, no headers, no arithmetic.

- half a round trip: rank 0 and rank 1 send a byte to and fro.
- exchange: every rank sends so many bytes to the next and receives as many from the previous at the same time. Two
  ranks: both ways at once. As a chain: the last sends nothing and the first receives nothing.
- copy: every rank copies so many bytes from one large buffer to another, all at the same time; as a chain all but one.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import launches
import numpy as np

_SOURCE, _TARGET = mmap.mmap(-1, 1 << 20), mmap.mmap(-1, 1 << 20)
"""What is sent, and where it arrives: short enough for a cache, so that the connection is measured and not memory.

They are whole pages: some processors copy four times slower where the target lies 1 to 31 bytes further in its page
than the source, as a `bytearray` of this size does beside the kernel's own pages.
"""
_WAITING_BYTES = 1 << 19
"""What may wait in a connection, as long as it is in a cache too: no size was quicker on loopback."""
_SPIN_SECONDS = 1e-4
"""So long a rank gives way again and again before it sleeps; quicker than to sleep at once."""
_give_way = getattr(os, "sched_yield", lambda: time.sleep(0))
_FITS_BUFFERS = 64 << 10
"""Bytes that a send takes without anybody receiving."""
_LARGE_BYTES = 128 << 20
_CONNECT_SECONDS = 60.0


class Links:
    """The connections of one rank.

    Attributes:
        ahead: To the next rank.
        behind: From the previous one.
    """

    def __init__(self, ahead: socket.socket, behind: socket.socket) -> None:
        self.ahead, self.behind = ahead, behind

    def block(self, blocking: bool) -> None:
        """Sets whether calls wait."""
        self.ahead.setblocking(blocking)
        self.behind.setblocking(blocking)

    def close(self) -> None:
        """Ends both."""
        self.ahead.close()
        self.behind.close()


def connect(rank: int, addresses: list[Any], family: socket.AddressFamily) -> Links:
    """Connects a rank with its neighbours.

    Args:
        rank: Which.
        addresses: Where each rank listens.
        family: TCP or Unix sockets.
    """
    with _new_socket(family) as listener:
        listener.bind(_address(addresses[rank]))
        listener.listen()
        ahead = _connect(_address(addresses[(rank + 1) % len(addresses)]), family)
        behind, _ = listener.accept()
    if family == socket.AF_INET:
        for sock in (ahead, behind):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _WAITING_BYTES)
    return Links(ahead, behind)


def _address(address: Any) -> Any:
    return address if isinstance(address, str) else tuple(address)


def _new_socket(family: socket.AddressFamily) -> socket.socket:
    """Returns a socket. The port of one that connects can be where another rank is about to listen: both may."""
    sock = socket.socket(family)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return sock


def _connect(address: Any, family: socket.AddressFamily) -> socket.socket:
    deadline = time.monotonic() + _CONNECT_SECONDS
    while True:
        sock = _new_socket(family)
        try:
            sock.connect(address)
            if sock.getsockname() == address:  # its own port was the one it looked for
                raise ConnectionRefusedError
        except OSError:  # the other rank does not listen yet
            sock.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
        else:
            return sock


def receive(sock: socket.socket, target: memoryview) -> None:
    """Receives exactly as much as there is room for."""
    got = 0
    while got < len(target):
        count = sock.recv_into(target[got:])
        if not count:
            raise ConnectionError("a rank has gone")
        got += count


def agreement(links: Links, rank: int) -> Callable[[int], int]:
    """Returns a function that sends rank 0's number once around the ring."""

    def agree(count: int) -> int:
        links.block(True)
        incoming = bytearray(8)
        if rank == 0:
            links.ahead.sendall(struct.pack("<q", count))
            receive(links.behind, memoryview(incoming))
        else:
            receive(links.behind, memoryview(incoming))
            links.ahead.sendall(incoming)
        return int(struct.unpack("<q", incoming)[0])

    return agree


def half_round_trip(links: Links, rank: int, seconds: float, agree: Callable[[int], int]) -> dict[str, Any]:
    """Measures with two ranks, while the others wait."""
    byte = bytearray(1)

    def ping() -> None:
        links.ahead.sendall(byte)
        receive(links.ahead, memoryview(byte))

    def pong() -> None:
        receive(links.behind, memoryview(byte))
        links.behind.sendall(byte)

    figures = launches.repeat([ping, pong, lambda: None][min(rank, 2)], seconds, agree)
    return {name: value if name == "calls" else value / 2 for name, value in figures.items()}


def exchange(links: Links, outgoing: int, incoming: int) -> None:
    """Sends so many bytes to the next rank and receives so many from the previous one, both at once."""
    source, target, spin_until = memoryview(_SOURCE), memoryview(_TARGET), 0.0
    while outgoing or incoming:
        before = outgoing + incoming
        with contextlib.suppress(BlockingIOError):
            outgoing -= links.ahead.send(source[:outgoing]) if outgoing else 0
        with contextlib.suppress(BlockingIOError):
            incoming -= links.behind.recv_into(target[:incoming]) if incoming else 0
        if outgoing + incoming < before:
            spin_until = 0.0
            continue
        spin_until = spin_until or time.monotonic() + _SPIN_SECONDS
        if time.monotonic() < spin_until:
            _give_way()
        else:
            select.select([links.behind] if incoming else [], [links.ahead] if outgoing else [], [])


class Buffers:
    """Two large buffers; each call moves another part of them, so that what is copied comes from memory, not a cache.

    Args:
        size: Bytes that a call moves at most.
    """

    def __init__(self, size: int) -> None:
        self._bytes = max(size, _LARGE_BYTES)
        self.source, self.target = np.ones(self._bytes, np.uint8), np.ones(self._bytes, np.uint8)
        self._begin = 0

    def next_part(self, size: int) -> slice:
        """Returns where the next call works."""
        begin = self._begin if self._begin + size <= self._bytes else 0
        self._begin = begin + size
        return slice(begin, begin + size)


def measure(links: Links, task: dict[str, Any], rank: int, seconds: float, buffers: Buffers) -> dict[str, Any]:
    """Returns the figures of one way of moving one number of bytes."""
    size, chain, last = task["bytes"], task["chain"], task["world_size"] - 1
    agree = agreement(links, rank)
    if task["kind"] == "half round trip":
        return task | half_round_trip(links, rank, seconds, agree)
    outgoing = 0 if chain and rank == last else size
    incoming = 0 if chain and rank == 0 else size

    def nothing() -> None:
        pass

    def copy() -> None:
        part = buffers.next_part(size)
        np.copyto(buffers.target[part], buffers.source[part])

    def small() -> None:
        links.ahead.sendall(memoryview(_SOURCE)[:outgoing])
        receive(links.behind, memoryview(_TARGET)[:incoming])

    def large() -> None:
        links.block(False)
        exchange(links, outgoing, incoming)

    call = small if size <= _FITS_BUFFERS else large
    if task["kind"] == "copy":
        # As a chain one rank has nothing to copy: not rank 0, which counts the calls.
        call = nothing if chain and rank == last else copy
    call()
    return task | launches.repeat(call, seconds, agree)


def main() -> None:
    task = launches.given()
    rank = int(os.environ["RANK"])
    families = {"tcp": socket.AF_INET, "unix": getattr(socket, "AF_UNIX", None)}
    buffers = Buffers(max(row["bytes"] for row in task["rows"]))
    rows = []
    for kind, addresses in task["addresses"].items():
        links = connect(rank, addresses, families[kind])
        for row in task["rows"]:
            if row["over"] == kind:
                rows.append(measure(links, row, rank, task["seconds"], buffers))
                links.block(True)
        links.close()
        if kind == "unix":
            Path(addresses[rank]).unlink()
    launches.report(rows)


if __name__ == "__main__":
    main()
