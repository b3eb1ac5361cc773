"""Ranks say at the store that they are there, and rank 0 says who was: all within one deadline.

/cyxtrain/doctor/claims/R     how many processes came as rank R
                 machine/R    where it runs
                 entry/R      how it is reached; set last
                 roster       rank 0: who came in time, and a token that only they know
                 ready/R/P    R is ready to be tried with P
                 view/R/P     what R found of P
    pulse/R      counts up while R works
                 proof/R      R knows which secret
                 done/R       R has tried all
                 over         rank 0 has read all
                 left/R       R needs the store no more
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass

from cyxtrain.config import DistributedConfig
from cyxtrain.doctor.findings import Arrival, to_json
from cyxtrain.doctor.machine_facts import Machine
from cyxtrain.errors import RendezvousError
from cyxtrain.ring import Deadline, RankRecord, StoreClient, foreign_value, parse_record, poll_until

_ANSWER_SECONDS = 10.0
_GRACE_SECONDS = 5.0
"""How much longer than rank 0, which decides, the others wait for its word."""


class AnswerDeadline(Deadline):
    """For every answer of the store as long, from when it is asked: one that lives answers at once.

    Where rank 0 is stopped, or the network to it is cut, that must not take until the end of everything.
    """

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(_ANSWER_SECONDS)

    def left(self) -> float:
        """Returns the same at any time."""
        return _ANSWER_SECONDS


@dataclass(frozen=True)
class Roster:
    """Who came in time, as rank 0 saw it.

    Attributes:
        ranks: In order.
        world_size: Of rank 0.
        token: That only they know; in hexadecimal.
    """

    ranks: list[int]
    world_size: int
    token: str


def arrive(board: StoreClient, rank: int, entry: RankRecord, machine: Machine) -> None:
    """Says that this rank is there.

    Raises:
        RendezvousError: Another process came as this rank.
    """
    token = secrets.token_hex(8)
    if board.set_first(f"claims/{rank}", token) != token.encode():
        raise RendezvousError(
            f"rank {rank} is taken: another process has come as rank {rank} already. Give every process a RANK of its "
            "own; where that one is left from an earlier run, end it.",
            rank=rank,
        )
    board.set(f"machine/{rank}", to_json(machine))
    board.set(f"entry/{rank}", entry.to_json())


def await_all(board: StoreClient, world_size: int, deadline: Deadline) -> list[int]:
    """Returns who is there, once all are, or at the deadline."""
    here: set[int] = set()

    def all_are_here() -> bool:
        here.update(rank for rank in range(world_size) if rank not in here and board.has(f"entry/{rank}"))
        return len(here) == world_size

    poll_until(all_are_here, deadline)
    return sorted(here)


def call_roster(board: StoreClient, roster: Roster) -> None:
    """Says who has come: rank 0 alone does so."""
    board.set("roster", json.dumps([roster.ranks, roster.world_size, roster.token]))


def hear_roster(board: StoreClient, rank: int, world_size: int, deadline: Deadline) -> Roster:
    """Waits until rank 0 says who has come, and returns it.

    Raises:
        RendezvousError: Rank 0 says nothing, or does without this rank.
    """
    if not poll_until(lambda: board.has("roster"), deadline):
        raise RendezvousError(
            f"rank {rank} came, and rank 0 did not, within the time that ranks wait for each other. Was it started? "
            "Look at its output; timeout_ms (DISTRIBUTED_TIMEOUT_MS) sets how long to wait.",
            rank=0,
        )
    try:
        roster = Roster(*json.loads(board.get("roster") or b""))
        bytes.fromhex(roster.token)
    except (ValueError, TypeError) as error:
        raise foreign_value(error) from None
    if rank not in roster.ranks and roster.world_size != world_size:
        raise RendezvousError(
            f"rank {rank} was started for a world of {world_size}, rank 0 for a world of {roster.world_size}. Start "
            "all ranks with the same WORLD_SIZE.",
            rank=rank,
        )
    if rank not in roster.ranks:
        raise RendezvousError(
            f"rank {rank} came when rank 0 had ceased to wait. Start all ranks within the time that "
            "DISTRIBUTED_TIMEOUT_MS (timeout_ms) sets, or set it higher.",
            rank=rank,
        )
    return roster


def read_arrivals(board: StoreClient, ranks: list[int]) -> dict[int, Arrival]:
    """Returns what each of those who came has said of itself.

    Raises:
        RendezvousError: It is something else.
    """
    return {
        rank: Arrival(
            RankRecord.from_json(board.get(f"entry/{rank}") or b""),
            parse_record(Machine, board.get(f"machine/{rank}") or b""),
        )
        for rank in ranks
    }


def others_patience(config: DistributedConfig) -> Deadline:
    """Returns until when the ranks that rank 0 waits for wait for its word."""
    return Deadline(config.timeout_ms / 1000 + _GRACE_SECONDS)
