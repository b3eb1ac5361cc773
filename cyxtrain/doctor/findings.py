"""What ranks find and send each other through the store: where each runs, and whether it reaches each other rank."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from cyxtrain.doctor.machine_facts import Machine
from cyxtrain.ring import RankRecord


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
    """The cause in words: "no answer within 5 s"."""
    transport: str = ""
    """How the ring would send data from here: cma, unix or tcp; empty: the peer is on another machine."""
    round_trip_seconds: float = 0.0
    """Median; this and the next two only if this rank has measured."""
    bytes_per_second: float = 0.0
    """Of the slower direction; 0: not measured."""
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
    """The ranks that registered in time, rank 0's world size, and a token (hexadecimal) that only they know."""

    ranks: list[int]
    world_size: int
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
        found = {result.transport for result in self.results}
        return next((name for name in ("tcp", "unix", "cma") if name in found), "tcp")
