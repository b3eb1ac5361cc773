"""Messages of ranks through the store: where each runs, which are there, and which it can reach.

/cyxtrain/doctor/record/R      how to reach rank R, by the first process that registered as R
                 machine/R     where it runs; set last
                 roster        by rank 0: the ranks that registered in time, and a token that only they know
                 ready/R/P     R is ready to test the connection to P
                 result/R/P    R's result for P
    heartbeat/R                changes while R works
                 done/R        R has tested all its pairs; the token, with a proof of R's secret
                 over          rank 0 has read all results
                 left/R        R no longer needs the store
"""

from __future__ import annotations

import enum
import secrets
from dataclasses import dataclass

from cyxtrain.doctor.local_checks import Machine
from cyxtrain.errors import RendezvousError
from cyxtrain.ring import Deadline, RankRecord, StoreClient


class Cause(str, enum.Enum):
    """Why one rank does not reach another."""

    NONE = ""
    SILENT = "silent"
    REFUSED = "refused"
    NO_WAY = "no way"
    """No route, or another error of this machine."""
    STRANGER = "stranger"
    """Another program answers there."""
    ABSENT = "absent"
    """The rank did not take part in the test."""
    BROKE = "broke"
    """The connection was closed."""
    LARGE = "large"
    """Short messages arrive, large ones do not."""


@dataclass(frozen=True)
class PeerResult:
    """What one rank found of another one."""

    rank: int
    peer: int
    cause: str = ""
    """A `Cause`; empty: reachable."""
    detail: str = ""
    """Details of the cause, such as "no answer within 5 s"."""
    transport: str = ""
    """How the ring would send data from here: unix or tcp; empty: the peer is on another machine."""
    round_trip_seconds: float = 0.0
    """Median; this and the next two only if this rank has measured."""
    bytes_per_second: float = 0.0
    """Of the slower direction; 0 if not measured."""
    skew_seconds: float = 0.0
    """How far the peer's clock is ahead."""


@dataclass(frozen=True)
class RankInfo:
    """A rank that registered at the store."""

    record: RankRecord
    """How the ring would announce it."""
    machine: Machine


@dataclass(frozen=True)
class Roster:
    """The ranks that registered in time, and a token (hexadecimal) that only they know."""

    ranks: list[int]
    token: str

    def __post_init__(self) -> None:
        """Raise ValueError or TypeError if another program has written it."""
        bytes.fromhex(self.token)
        sum(self.ranks)


@dataclass(frozen=True)
class Pair:
    """Two ranks; the higher one connects to the lower one in the ring too, and measures."""

    low: int
    high: int
    results: tuple[PeerResult, ...]
    """Of both ranks; a rank that has exited left none."""

    @property
    def is_ok(self) -> bool:
        """Whether both reach each other and data arrives."""
        return len(self.results) == 2 and not any(result.cause for result in self.results)

    @property
    def measured(self) -> PeerResult | None:
        """The result with measurements, if there is one."""
        return next((result for result in self.results if result.bytes_per_second), None)

    @property
    def transport(self) -> str:
        """How the ring would send data between them: what works from both sides; empty: nothing does."""
        if not self.is_ok:
            return ""
        return "unix" if all(result.transport == "unix" for result in self.results) else "tcp"


class AnswerDeadline(Deadline):
    """A deadline for every answer of the store, from its request on: a store that runs answers at once."""

    __slots__ = ()

    def left(self) -> float:
        """Return the same at any time."""
        return self.seconds


def register(store: StoreClient, rank: int, record: RankRecord, machine: Machine) -> None:
    """Register this rank; raise RendezvousError if another process registered as this rank."""
    own = record.to_json()
    if store.set_first(f"record/{rank}", own) != own.encode():  # the first to come keeps the rank
        raise RendezvousError(
            f"rank {rank} is taken: another process has registered as rank {rank}. Give every process its own RANK; if "
            "that process is left from an earlier run, end it.",
            rank=rank,
        )
    store.write(f"machine/{rank}", machine)  # last: with it the rank has registered


def publish_roster(store: StoreClient, world_size: int, deadline: Deadline) -> Roster:
    """Wait on rank 0 until all ranks have registered, or for the deadline; publish which have.

    Raises RendezvousError if a process of another world has tried to join.
    """
    ranks: set[int] = set()

    def all_have_registered() -> bool:
        refusal = store.refusal()
        if refusal:
            raise RendezvousError(refusal, rank=0)
        ranks.update(rank for rank in range(world_size) if rank not in ranks and store.has(f"machine/{rank}"))
        return len(ranks) == world_size

    deadline.poll_until(all_have_registered)
    roster = Roster(sorted(ranks), secrets.token_hex(32))
    store.write("roster", roster)
    return roster


def read_roster(store: StoreClient, rank: int, deadline: Deadline) -> Roster:
    """Wait until rank 0 publishes the roster; raise RendezvousError if it does not, or lists others only."""
    if not deadline.poll_until(lambda: store.has("roster")):
        raise RendezvousError(
            f"rank {rank} waited for rank 0, which did not register in time. Was it started? Look at its output; "
            "timeout_ms (DISTRIBUTED_TIMEOUT_MS) sets how long to wait.",
            rank=0,
        )
    roster = store.read(Roster, "roster")
    if rank not in roster.ranks:
        raise RendezvousError(
            f"rank {rank} registered after rank 0 had stopped waiting. Start all ranks within DISTRIBUTED_TIMEOUT_MS "
            "(timeout_ms), or increase it.",
            rank=rank,
        )
    return roster


def read_infos(store: StoreClient, ranks: list[int]) -> dict[int, RankInfo]:
    """Return what each rank of the roster has registered."""
    return {
        rank: RankInfo(RankRecord.from_json(store.get(f"record/{rank}") or b""), store.read(Machine, f"machine/{rank}"))
        for rank in ranks
    }
