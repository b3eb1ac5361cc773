"""Who is where in one generation of a group, and the comparison by which all ranks have the same directory."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import socket
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from cyxtrain.errors import RendezvousError
from cyxtrain.ring.rendezvous.record import RankRecord, ended
from cyxtrain.ring.wire.checksums import SUM_BYTES, Checksums
from cyxtrain.ring.wire.frames import FrameError, damaged, json_object
from cyxtrain.ring.wire.link import LOST_PACKETS, POLL_SECONDS, Deadline, Poller, watch_over

_LENGTH_BYTES = 4
_MAX_BYTES = 1 << 16
_PADDING_BYTES = 10_000
"""More than a packet can have, so that a network which loses large packets is noticed before the first collective."""
_DIGEST_CHARACTERS = 16


@dataclass(frozen=True)
class Directory:
    """The ranks of one generation of a group. The first one comes from the store; later ones from the one before."""

    records: tuple[RankRecord, ...]
    """How each rank is reached, by rank."""
    names: tuple[int, ...]
    """The launcher's number of each rank, which errors name; it stays in later generations."""
    generation: int = 0
    run: str = ""
    """The name of the first rendezvous, in hexadecimal."""
    secret: bytes = field(default=b"", repr=False)
    """The secret of the run."""

    def without(self, names: Container[int]) -> Directory:
        """Return the directory of the next generation, without these ranks, by their launcher's numbers."""
        left = [rank for rank, name in enumerate(self.names) if name not in names]
        return replace(
            self,
            records=tuple(replace(self.records[rank], world_size=len(left)) for rank in left),
            names=tuple(self.names[rank] for rank in left),
            generation=self.generation + 1,
        )

    def compare(
        self,
        rank: int,
        sockets: Mapping[int, socket.socket],
        checksums: Checksums,
        deadline: Deadline,
        explain: Callable[[bool], None],
    ) -> bool:
        """Compare with all other ranks; return whether Unix sockets connect all. All ranks call it.

        `explain` may raise why it fails: it is called while this waits, and, with True, when a rank has ended or the
        deadline has passed.

        If two ranks have different directories, every rank differs from at least one of them: all raise. Cost: a
        message of about 11 KiB each way between each two ranks. Nothing has been sent on the sockets yet.

        Raises:
            RendezvousError: Another rank has another directory (with what differs), has ended or is silent.
            DamagedFrameError: Data was corrupted in transit.
        """
        own = self._digests()
        all_unix = not any(sock.family in (socket.AF_INET, socket.AF_INET6) for sock in sockets.values())
        padding = " " * _PADDING_BYTES
        body = json.dumps({"all_unix": all_unix, "padding": padding, **own}).encode()
        for sock in sockets.values():
            watch_over(sock)
            with contextlib.suppress(OSError):  # a lost connection is noticed below
                sock.sendall(len(body).to_bytes(_LENGTH_BYTES, "big") + body + checksums.of(body))
        for peer, sock in sorted(sockets.items()):
            received = self._receive(peer, sock, deadline, explain)
            if checksums.of(received[:-SUM_BYTES]) != received[-SUM_BYTES:]:
                raise damaged(self.names[peer], self.names[rank], "the comparison of records")
            theirs: dict[str, Any] = {}
            with contextlib.suppress(FrameError):
                theirs = json_object(received[:-SUM_BYTES])
            differing = [name for name in own if theirs.get(name) != own[name]]
            if differing:
                raise self._difference(rank, peer, differing)
            all_unix = all_unix and theirs.get("all_unix") is True
        return all_unix

    def _digests(self) -> dict[str, str]:
        rows = [dataclasses.asdict(record) for record in self.records]
        columns = {name: [row[name] for row in rows] for name in rows[0]} | {"ranks": list(self.names)}
        return {
            name: hashlib.sha256(json.dumps(column).encode()).hexdigest()[:_DIGEST_CHARACTERS]
            for name, column in columns.items()
        }

    def other_ranks(self, rank: int) -> RendezvousError:
        """Return the error where a rank and another one have different directories of a later generation.

        It names no other rank: the two number their ranks differently.
        """
        return RendezvousError(
            f"rank {self.names[rank]} and another rank begin generation {self.generation} of their group with "
            "different ranks: all must leave out the same."
        )

    def _difference(self, rank: int, peer: int, differing: list[str]) -> RendezvousError:
        if self.generation:
            return self.other_ranks(rank)
        own, other = self.names[rank], self.names[peer]
        return RendezvousError(
            f"rank {own} and rank {other} have read different values at the store, of: {', '.join(differing)}. Another "
            "program writes there. Set CYXTRAIN_SECRET to the same value on every rank, or choose another MASTER_PORT.",
            rank=other,
        )

    def _receive(self, peer: int, sock: socket.socket, deadline: Deadline, explain: Callable[[bool], None]) -> bytes:
        """Return one message and its checksum; read not a byte more."""
        name, place = self.names[peer], f"{self.records[peer].host}:{self.records[peer].port}"
        received, end, poller = bytearray(), _LENGTH_BYTES, Poller()
        while len(received) < end:
            if not poller.wait([sock], [], deadline, POLL_SECONDS):
                explain(deadline.passed())
                if deadline.passed():
                    raise RendezvousError(
                        f"rank {name} at {place} did not send its records for comparison within "
                        f"{deadline.seconds:.3g} s: it is not connected to all others, or large packets get lost. Look "
                        "at its output, and at the MTU of the network between.",
                        rank=name,
                    )
                continue
            try:
                part = sock.recv(end - len(received))
            except BlockingIOError:
                continue
            except TimeoutError:  # the kernel's: the socket does not block
                raise RendezvousError(f"rank {name} at {place} cannot be reached: {LOST_PACKETS}.", rank=name) from None
            except OSError:
                part = b""
            if not part:
                explain(True)
                raise ended(name)
            received += part
            if end == len(received) == _LENGTH_BYTES:
                end += min(int.from_bytes(received, "big"), _MAX_BYTES) + SUM_BYTES
        return bytes(received[_LENGTH_BYTES:])
