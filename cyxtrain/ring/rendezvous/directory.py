"""The directory of one generation of a group, and the comparison that makes it the same on all ranks."""

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
from cyxtrain.ring.rendezvous.record import RankRecord, ended_error
from cyxtrain.ring.wire.checksums import SUM_BYTES, Checksums
from cyxtrain.ring.wire.frames import FrameError, damaged_error, json_object
from cyxtrain.ring.wire.link import LOST_PACKETS, POLL_SECONDS, Deadline, Poller, is_tcp, watch_over

_LENGTH_BYTES = 4
_MAX_BYTES = 1 << 16
_PADDING_BYTES = 10_000
"""More than a packet can have, so that a network which loses large packets is noticed before the first collective."""
_DIGEST_CHARACTERS = 16


@dataclass(frozen=True)
class Directory:
    """The ranks of one generation of a group.

    The first generation's directory comes from the store, each later one from the generation before.
    """

    records: tuple[RankRecord, ...]
    """How each rank is reached, by rank."""
    global_ranks: tuple[int, ...]
    """The launcher's number of each rank, by rank: errors name it, and later generations keep it."""
    generation: int = 0
    run: str = ""
    """The name of the first rendezvous, in hexadecimal."""
    secret: bytes = field(default=b"", repr=False)
    """The secret of the run."""

    def without(self, lost: Container[int]) -> Directory:
        """Return the directory of the next generation, without the `lost` ranks, by the launcher's numbers."""
        kept = [rank for rank, global_rank in enumerate(self.global_ranks) if global_rank not in lost]
        return replace(
            self,
            records=tuple(replace(self.records[rank], world_size=len(kept)) for rank in kept),
            global_ranks=tuple(self.global_ranks[rank] for rank in kept),
            generation=self.generation + 1,
        )

    def compare(
        self,
        rank: int,
        sockets: Mapping[int, socket.socket],
        checksums: Checksums,
        deadline: Deadline,
        check: Callable[[bool], None],
    ) -> bool:
        """Compare with all other ranks; return whether Unix sockets connect all. All ranks call it.

        `check` may raise the reason for a failure: it is called while this waits, and, with True, when a rank has
        ended or the deadline has passed.

        If two ranks have different directories, every rank differs from at least one of them: all raise. Cost: a
        message of about 11 KiB each way between each two ranks. Nothing has been sent on the sockets yet.

        Raises:
            RendezvousError: A rank has a different directory (the error names the fields), has ended or is silent.
            DamagedFrameError: Data was corrupted in transit.
        """
        own = self._digests()
        all_unix = not any(map(is_tcp, sockets.values()))
        padding = " " * _PADDING_BYTES
        body = json.dumps({"all_unix": all_unix, "padding": padding, **own}).encode()
        message = len(body).to_bytes(_LENGTH_BYTES, "big") + body + checksums.of(body)
        for sock in sockets.values():
            watch_over(sock)  # until ranks have joined: a `Link` gives data sockets longer timeouts
            with contextlib.suppress(OSError):  # receiving, below, reports a lost connection
                sock.sendall(message)
        for peer, sock in sorted(sockets.items()):
            received = self._receive(peer, sock, deadline, check)
            body = received[:-SUM_BYTES]
            if checksums.of(body) != received[-SUM_BYTES:]:
                raise damaged_error(self.global_ranks[peer], self.global_ranks[rank], "the comparison of records")
            theirs: dict[str, Any] = {}
            with contextlib.suppress(FrameError):  # then every field differs
                theirs = json_object(body)
            differing = [name for name, digest in own.items() if theirs.get(name) != digest]
            if differing:
                raise self._difference_error(rank, peer, differing)
            all_unix = all_unix and theirs.get("all_unix") is True
        return all_unix

    def _digests(self) -> dict[str, str]:
        """Return a digest of each field over all records, and of the ranks."""
        records = [dataclasses.asdict(record) for record in self.records]
        # One per field, so that an error can name the fields that differ.
        digests = {name: _digest([record[name] for record in records]) for name in records[0]}
        digests["ranks"] = _digest(list(self.global_ranks))
        return digests

    def other_ranks_error(self, rank: int) -> RendezvousError:
        """Return the error for two ranks with different directories of a later generation.

        It does not name the other rank, because the two number their ranks differently.
        """
        return RendezvousError(
            f"rank {self.global_ranks[rank]} and another rank begin generation {self.generation} of their group with "
            "different ranks: all must leave out the same."
        )

    def _difference_error(self, rank: int, peer: int, differing: list[str]) -> RendezvousError:
        if self.generation:
            return self.other_ranks_error(rank)
        other = self.global_ranks[peer]
        return RendezvousError(
            f"rank {self.global_ranks[rank]} and rank {other} have read different values at the store, of: "
            f"{', '.join(differing)}. Another program writes there. Set CYXTRAIN_SECRET to the same value on every "
            "rank, or choose another MASTER_PORT.",
            rank=other,
        )

    def _receive(self, peer: int, sock: socket.socket, deadline: Deadline, check: Callable[[bool], None]) -> bytes:
        """Return one message and its checksum."""
        length = self._receive_exactly(_LENGTH_BYTES, peer, sock, deadline, check)
        # Bounded, as data may be corrupted: then the checksum does not match.
        body_bytes = min(int.from_bytes(length, "big"), _MAX_BYTES)
        return self._receive_exactly(body_bytes + SUM_BYTES, peer, sock, deadline, check)

    def _receive_exactly(
        self, count: int, peer: int, sock: socket.socket, deadline: Deadline, check: Callable[[bool], None]
    ) -> bytes:
        """Return `count` bytes. It reads not a byte more: the frames of the first collective may follow."""
        received = bytearray()
        poller = Poller()
        while len(received) < count:
            if not poller.wait([sock], [], deadline, POLL_SECONDS):
                check(deadline.passed())
                if deadline.passed():
                    raise self._unheard_error(
                        peer,
                        f"did not send its records for comparison within {deadline.seconds:.3g} s: it is not connected "
                        "to all others, or large packets get lost. Look at its output, and at the MTU of the network "
                        "between.",
                    )
                continue
            try:
                part = sock.recv(count - len(received))
            except BlockingIOError:
                continue
            except TimeoutError:  # from the kernel, as the socket does not block
                raise self._unheard_error(peer, f"cannot be reached: {LOST_PACKETS}.") from None
            except OSError:
                part = b""
            if not part:
                check(True)
                raise ended_error(self.global_ranks[peer])
            received += part
        return bytes(received)

    def _unheard_error(self, peer: int, problem: str) -> RendezvousError:
        record = self.records[peer]
        global_rank = self.global_ranks[peer]
        return RendezvousError(f"rank {global_rank} at {record.host}:{record.port} {problem}", rank=global_rank)


def _digest(values: list[Any]) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:_DIGEST_CHARACTERS]
