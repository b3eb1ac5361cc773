"""What ranks find and tell each other over the store: where each runs, and how each reaches each other."""

from __future__ import annotations

import dataclasses
import enum
import json
from dataclasses import dataclass

from cyxtrain.doctor.machine_facts import Machine
from cyxtrain.ring import RankRecord


class Cause(str, enum.Enum):
    """Why one rank does not reach another."""

    NONE = ""
    SILENT = "silent"
    """No answer to its connection."""
    REFUSED = "refused"
    """Somebody there said no."""
    NO_WAY = "no way"
    """The system knows no way, or another error of its own."""
    STRANGER = "stranger"
    """Something else answers there."""
    ABSENT = "absent"
    """It did not come to be tried."""
    BROKE = "broke"
    """The connection ended in the middle."""
    LARGE = "large"
    """Short messages arrive, large ones do not."""


@dataclass(frozen=True)
class View:
    """What one rank found of another one.

    Attributes:
        rank: Who looked.
        peer: At whom.
        cause: A `Cause`: why it does not reach it; "": it does.
        detail: The same in words: "no answer within 5 s".
        transport: How the ring would carry data from here: cma, unix or tcp; "": it is on another machine.
        round_trip_seconds: Median; this and the next two only where this rank has measured.
        bytes_per_second: Of the slower direction; 0: not measured.
        skew_seconds: How much later the peer's clock is.
    """

    rank: int
    peer: int
    cause: str = ""
    detail: str = ""
    transport: str = ""
    round_trip_seconds: float = 0.0
    bytes_per_second: float = 0.0
    skew_seconds: float = 0.0


@dataclass(frozen=True)
class Arrival:
    """A rank that came to the store.

    Attributes:
        entry: How the ring would introduce it.
        machine: Where it runs.
    """

    entry: RankRecord
    machine: Machine


@dataclass(frozen=True)
class Pair:
    """What is known of two ranks.

    Attributes:
        low: The lower rank.
        high: The higher rank, which calls the lower one in the ring too, and measures.
        views: What they found; a rank that has ended left none.
    """

    low: int
    high: int
    views: tuple[View, ...]

    @property
    def is_well(self) -> bool:
        """Whether both reach each other, and data travels."""
        return len(self.views) == 2 and not any(view.cause for view in self.views)

    @property
    def measured(self) -> View | None:
        """What was measured; None where that was not possible."""
        return next((view for view in self.views if view.bytes_per_second), None)

    @property
    def transport(self) -> str:
        """How the ring would carry data between them: what works from both sides; "" where nothing does."""
        if not self.is_well:
            return ""
        found = {view.transport for view in self.views}
        return next((name for name in ("tcp", "unix", "cma") if name in found), "tcp")


def to_json(found: View | Machine) -> str:
    """Returns it as text for the store."""
    return json.dumps(dataclasses.asdict(found))
