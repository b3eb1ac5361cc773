"""Ranks compare the records that they decide by, so that none chooses another algorithm than the rest and hangs."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import socket
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cyxtrain.errors import RendezvousError
from cyxtrain.ring.rendezvous.membership import ended
from cyxtrain.ring.rendezvous.record import RankRecord
from cyxtrain.ring.wire.checksums import SUM_BYTES, Checksums
from cyxtrain.ring.wire.frames import FrameError, damaged, json_object
from cyxtrain.ring.wire.link import POLL_SECONDS, Deadline, Poller

_LENGTH_BYTES = 4
_MAX_BYTES = 1 << 16
_DIGEST_CHARACTERS = 16


def compare_tables(
    rank: int,
    global_ranks: Sequence[int],
    table: Sequence[RankRecord],
    readable: Iterable[int],
    sockets: Mapping[int, socket.socket],
    checksums: Checksums,
    deadline: Deadline,
) -> tuple[list[set[int]], bool]:
    """Compare the table of records with all other ranks, and exchange whose memory each can read. All ranks call it.

    If two ranks have different tables, every rank differs from at least one of them: all raise. Cost: a message of
    about 1 KiB each way between each two ranks. Nothing has been sent on the sockets yet.

    Returns:
        (by rank, whose memory it can read; whether Unix sockets connect all ranks).

    Raises:
        RendezvousError: Another rank has another table (with the fields that differ), has ended or is silent.
        DamagedFrameError: Data was corrupted in transit.
    """
    own = _digests(table)
    all_unix = not any(sock.family in (socket.AF_INET, socket.AF_INET6) for sock in sockets.values())
    body = json.dumps({"reads": sorted(readable), "all_unix": all_unix, **own}).encode()
    for sock in sockets.values():
        with contextlib.suppress(OSError):  # a lost connection is noticed below
            sock.sendall(len(body).to_bytes(_LENGTH_BYTES, "big") + body + checksums.of(body))
    readable_by_rank = [set(readable) for _ in global_ranks]
    for peer, sock in sorted(sockets.items()):
        received = _receive(sock, global_ranks[peer], deadline)
        if checksums.of(received[:-SUM_BYTES]) != received[-SUM_BYTES:]:
            raise damaged(global_ranks[peer], global_ranks[rank], "the comparison of records")
        theirs: dict[str, Any] = {}
        with contextlib.suppress(FrameError):
            theirs = json_object(received[:-SUM_BYTES])
        differing = [name for name in own if theirs.get(name) != own[name]]
        if differing:
            raise RendezvousError(
                f"rank {global_ranks[rank]} and rank {global_ranks[peer]} have read different values at the store, "
                f"of: {', '.join(differing)}. Another program writes there. Set CYXTRAIN_SECRET to the same "
                "value on every rank, or choose another MASTER_PORT.",
                rank=global_ranks[peer],
            )
        readable_by_rank[peer] = {other for other in range(len(global_ranks)) if other in theirs.get("reads", [])}
        all_unix = all_unix and theirs.get("all_unix") is True
    return readable_by_rank, all_unix


def _digests(table: Sequence[RankRecord]) -> dict[str, str]:
    """Return a digest of each field, over all ranks."""
    rows = [dataclasses.asdict(record) for record in table]
    return {
        name: hashlib.sha256(json.dumps([row[name] for row in rows]).encode()).hexdigest()[:_DIGEST_CHARACTERS]
        for name in rows[0]
    }


def _receive(sock: socket.socket, name: int, deadline: Deadline) -> bytes:
    """Return one message and its checksum; read not a byte more."""
    received, end, poller = bytearray(), _LENGTH_BYTES, Poller()
    while len(received) < end:
        if not poller.wait([sock], [], deadline, POLL_SECONDS):
            if deadline.passed():
                raise RendezvousError(
                    f"rank {name} is connected to all others, and did not send its records for comparison within "
                    f"{deadline.seconds:g} s. Look at its output.",
                    rank=name,
                )
            continue
        try:
            part = sock.recv(end - len(received))
        except BlockingIOError:
            continue
        except OSError:
            part = b""
        if not part:
            raise ended(name)
        received += part
        if end == len(received) == _LENGTH_BYTES:
            end += min(int.from_bytes(received, "big"), _MAX_BYTES) + SUM_BYTES
    return bytes(received[_LENGTH_BYTES:])
