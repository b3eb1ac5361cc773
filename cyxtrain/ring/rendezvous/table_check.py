"""Ranks that have met compare what they decide by, so that none takes another way than the rest and waits for ever."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import socket
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cyxtrain.errors import RendezvousError
from cyxtrain.ring.rendezvous.membership import LOOK_SECONDS, ended
from cyxtrain.ring.rendezvous.record import RankRecord
from cyxtrain.ring.wire.checksums import SUM_BYTES, Checksums
from cyxtrain.ring.wire.frames import FrameError, damaged, json_object
from cyxtrain.ring.wire.link import Deadline, Poller

_LENGTH = struct.Struct(">I")
_MAX_BYTES = 1 << 16
_DIGEST_CHARACTERS = 16


def agree(
    rank: int,
    names: Sequence[int],
    table: Sequence[RankRecord],
    reads: Iterable[int],
    sockets: Mapping[int, socket.socket],
    checksums: Checksums,
    deadline: Deadline,
) -> tuple[list[set[int]], bool]:
    """Tells each other rank whose memory this one can read, and digests of the table that it has. All ranks call it.

    Where two ranks have different tables, every rank differs from at least one of them: all raise. Cost: a message of
    about 1 KiB each way between each two ranks.

    Args:
        rank: This rank.
        names: By rank, how errors call it.
        table: What each rank said of itself, as this one has read it.
        reads: Whose memory this rank can read.
        sockets: To each other rank; nothing has been sent there yet.
        checksums: Of the group: they are always sent with this.
        deadline: When to give up.

    Returns:
        (whose memory each rank can read, by rank; whether all ranks are connected by Unix sockets).

    Raises:
        RendezvousError: A rank has another table; the error names the fields and both ranks. Or it has ended, or says
            nothing.
        DamagedFrameError: Other bytes came from a rank than it sent.
    """
    own = _digests(table)
    all_unix = not any(sock.family in (socket.AF_INET, socket.AF_INET6) for sock in sockets.values())
    body = json.dumps({"reads": sorted(reads), "all_unix": all_unix, **own}).encode()
    for sock in sockets.values():
        with contextlib.suppress(OSError):  # its end is noticed below
            sock.sendall(_LENGTH.pack(len(body)) + body + checksums.of(body))
    readers = [set(reads) for _ in names]
    for peer, sock in sorted(sockets.items()):
        received = _hear(sock, names[peer], deadline)
        if checksums.of(received[:-SUM_BYTES]) != received[-SUM_BYTES:]:
            raise damaged(names[peer], names[rank], "the agreement on how to talk")
        told: dict[str, Any] = {}
        with contextlib.suppress(FrameError):
            told = json_object(received[:-SUM_BYTES])
        differing = [name for name in own if told.get(name) != own[name]]
        if differing:
            raise RendezvousError(
                f"rank {names[rank]} and rank {names[peer]} have read different values at the store at which the ranks "
                f"meet, of: {', '.join(differing)}. Somebody who is no rank of this run writes there. Set "
                "CYXTRAIN_SECRET to the same value on every rank, or choose another MASTER_PORT.",
                rank=names[peer],
            )
        readers[peer] = {other for other in range(len(names)) if other in told.get("reads", [])}
        all_unix = all_unix and told.get("all_unix") is True
    return readers, all_unix


def _digests(table: Sequence[RankRecord]) -> dict[str, str]:
    """Returns a digest of each field, over all ranks."""
    columns: dict[str, Any] = {
        field.name: [_plain(getattr(entry, field.name)) for entry in table] for field in dataclasses.fields(RankRecord)
    }
    return {
        name: hashlib.sha256(json.dumps(column).encode()).hexdigest()[:_DIGEST_CHARACTERS]
        for name, column in columns.items()
    }


def _plain(value: Any) -> Any:
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value


def _hear(sock: socket.socket, name: int, deadline: Deadline) -> bytes:
    """Returns what a rank says, and its checksum; reads not a byte more."""
    received, end, poller = bytearray(), _LENGTH.size, Poller()
    while len(received) < end:
        if not poller.wait([sock], [], deadline, LOOK_SECONDS):
            if deadline.passed():
                raise RendezvousError(
                    f"rank {name} has met all others, and did not say by what it decides within "
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
        if end == len(received) == _LENGTH.size:
            end += min(_LENGTH.unpack(received)[0], _MAX_BYTES) + SUM_BYTES
    return bytes(received[_LENGTH.size :])
