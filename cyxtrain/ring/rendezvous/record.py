"""The record that each rank writes to the store, and whether two ranks are compatible."""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import os
import secrets
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from cyxtrain.environment import process_env
from cyxtrain.environment.processes import Process, State, state_of
from cyxtrain.errors import RendezvousError, exhausted, printable
from cyxtrain.ring.wire.frames import PROTOCOL_VERSION, FrameError, json_object

_Record = TypeVar("_Record")
_IMPORTED = secrets.token_hex(8)
_NO_PROCESS = Process("", 0, 0)


def _token() -> str:
    """Return a string that no other process has."""
    return f"{_IMPORTED}-{os.getpid()}"  # the pid: forked processes share our memory


@dataclass(frozen=True)
class RankRecord:
    """How a rank can be reached, and the settings that must be the same on all ranks."""

    world_size: int
    process: Process = _NO_PROCESS
    host: str = ""
    """Address at which it listens; empty if it does not."""
    port: int = 0
    unix: str = ""
    """Abstract Unix socket at which it listens too, for ranks of its machine, as "@name"; empty: none."""
    transport: str = "auto"
    room: int = 0
    """How many ranks like this one its machine can run, each with one core more than it has threads."""
    cores: int = 0
    has_secret: bool = False
    checksums: bool = False
    heartbeat_timeout_seconds: float = 30.0
    devices: str = ""
    """The accelerators that it sees, as a string."""
    run: str = ""
    """Rank 0 only: the name of this rendezvous, in hexadecimal."""
    key: str = dataclasses.field(default="", repr=False)
    """Rank 0 only, and only without CYXTRAIN_SECRET: the secret that it made, in hexadecimal."""
    protocol: int = PROTOCOL_VERSION
    token: str = dataclasses.field(default_factory=_token)
    """Tells processes apart, also across machines."""

    @property
    def machine(self) -> str:
        """A name that only ranks of one machine share."""
        return self.process.machine or self.host

    def to_json(self) -> str:
        """Return the record as JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> RankRecord:
        """Read a record; from another version of the protocol, only the fields that this version knows.

        Raises RendezvousError if `text` is not a valid record.
        """
        if isinstance(text, str):
            text = text.encode()
        try:
            facts = json_object(text)
            process = _from_facts(Process, facts["process"])
            record = _from_facts(cls, facts | {"process": process})
            record._check_values()
        except (FrameError, ValueError, TypeError, KeyError) as error:
            raise foreign_error(error) from None
        return record

    def _check_values(self) -> None:
        """Raise ValueError unless every value is one that a rank can have."""
        for field in dataclasses.fields(self):
            _check_range(field.name, getattr(self, field.name))
        if not 0 <= self.process.pid < 2**31:
            raise ValueError("an invalid pid")
        if not (self.host.isascii() and self.host.isprintable()):
            raise ValueError("an invalid host")
        if self.host:
            ipaddress.ip_address(self.host)  # a name could lead anywhere
        bytes.fromhex(self.run + self.key)

    def why_incompatible(self, rank: int, other: RankRecord, other_rank: int) -> str:
        """Return why two ranks, by the launcher's numbers, cannot be in one group; "" if they can."""
        if self.protocol != other.protocol:
            return (
                f"rank {rank} speaks version {self.protocol} of the ring's protocol, rank {other_rank} version "
                f"{other.protocol}. Install the same version of cyxtrain everywhere."
            )
        if self.world_size != other.world_size:
            return (
                f"rank {rank} was started for a world of {self.world_size}, rank {other_rank} for a world of "
                f"{other.world_size}. Start all ranks with the same WORLD_SIZE."
            )
        if self.transport != other.transport:
            return (
                f"rank {rank} was started with CYXTRAIN_TRANSPORT={self.transport} and rank {other_rank} with "
                f"{other.transport}. Set it to the same value in the environment of every rank."
            )
        for what, variable, own_has, other_has in (
            ("a secret", "CYXTRAIN_SECRET", self.has_secret, other.has_secret),
            ("checksums", "CYXTRAIN_CHECKSUMS", self.checksums, other.checksums),
        ):
            if own_has and not other_has:
                return _only_one_has(what, variable, rank, other_rank)
            if other_has and not own_has:
                return _only_one_has(what, variable, other_rank, rank)
        return ""


def _only_one_has(what: str, variable: str, with_it: int, without: int) -> str:
    return (
        f"rank {with_it} was started with {what} and rank {without} without. Set {variable} to the same value in the "
        "environment of every rank."
    )


_RANGES: dict[str, tuple[float, float]] = {
    "world_size": (1, 2**32),
    "port": (0, 2**16 - 1),
    "room": (0, 2**20),
    "cores": (0, 2**20),
    "heartbeat_timeout_seconds": (0.01, 1e9),  # others send heartbeats as often as it wants them
    "protocol": (0, 2**32),
}
_MAX_CHARACTERS = 4096


def _check_range(name: str, value: object) -> None:
    if isinstance(value, str) and not (len(value) <= _MAX_CHARACTERS and value.isprintable()):
        raise ValueError(f"its {name} is too long, or not printable")
    if name in _RANGES:
        lowest, highest = _RANGES[name]
        if not (isinstance(value, (int, float)) and lowest <= value <= highest):
            raise ValueError(f"an invalid {name}")


def parse_record(kind: type[_Record], text: bytes) -> _Record:
    """Read a dataclass with fields of plain types from a rank's JSON; its strings become printable.

    Raises RendezvousError if `text` is anything else.
    """
    try:
        facts = json_object(text)
        for name, fact in facts.items():
            if isinstance(fact, str):
                facts[name] = printable(fact)
        return _from_facts(kind, facts)
    except (FrameError, ValueError, TypeError, KeyError) as error:
        raise foreign_error(error) from None


def _from_facts(kind: type[_Record], facts: dict[str, Any]) -> _Record:
    """Return a dataclass with the facts that it knows, after a check of their types."""
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    known = {field.name: facts[field.name] for field in fields if field.name in facts}
    made = kind(**known)
    for field in fields:
        found = type(getattr(made, field.name)).__name__
        expected = str(field.type).partition("[")[0]  # "list" of "list[int]"
        if found != expected and (found, expected) != ("int", "float"):
            raise TypeError(f"its {field.name} has the wrong type")
    return made


def foreign_error(error: Exception) -> RendezvousError:
    """Return the error for a value in the store that no rank can have written."""
    return RendezvousError(
        f"the store at which the ranks meet holds what no rank has written ({error!r}). Does another program "
        "use it? Choose another MASTER_PORT, the same on every rank."
    )


def ended_error(global_rank: int) -> RendezvousError:
    """Return the error for a rank whose process has ended during rendezvous."""
    return RendezvousError(
        f"rank {global_rank} died: its process ended during rendezvous (killed, or out of memory?). "
        f"Look at the output of rank {global_rank}, and start all ranks again.",
        rank=global_rank,
    )


def cannot_join_error(global_rank: int, error: BaseException) -> RendezvousError:
    """Return the error that tells the others of an exception that is not cyxtrain's."""
    reason = exhausted(error) or type(error).__name__  # only the type: the message may contain private data
    return RendezvousError(f"rank {global_rank} cannot join: {reason}. Look at its output.", rank=global_rank)


def check_alive(own: RankRecord, others: Mapping[int, RankRecord]) -> None:
    """Raise the error for a rank whose process has ended; `others` is by global rank.

    Cost: about 60 us for each rank on this machine.
    """
    for global_rank, record in others.items():
        if state_of(record.process, own.process) is State.GONE:
            raise ended_error(global_rank)


def check_not_exited(awaited: Container[int], world_size: int) -> None:
    """Raise if the launcher has seen one of these ranks, which are global, exit: it will not join."""
    for rank in process_env.exited_ranks(world_size):
        if rank in awaited:
            raise RendezvousError(
                f"rank {rank} has exited with code 0 without joining, while others of the {world_size} ranks wait for "
                "it: every rank must call cyxtrain.init() or fit.",
                rank=rank,
            )
