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
    """Return what no other process has; forked ones share our memory, and have their own pid."""
    return f"{_IMPORTED}-{os.getpid()}"


@dataclass(frozen=True)
class RankRecord:
    """How a rank can be reached, and the settings that ranks must have in common."""

    world_size: int
    process: Process = _NO_PROCESS
    host: str = ""
    """Address at which it listens; empty if it does not."""
    port: int = 0
    unix: str = ""
    """Abstract Unix socket at which it listens too, for ranks of its machine, as "@name"; empty: none."""
    transport: str = "auto"
    room: int = 0
    """How many ranks like it its machine can run with a core free for each."""
    cores: int = 0
    has_secret: bool = False
    checksums: bool = False
    heartbeat_timeout_seconds: float = 30.0
    devices: str = ""
    """The accelerators that it sees, as text."""
    run: str = ""
    """Rank 0 only: the name of this rendezvous, in hexadecimal."""
    key: str = dataclasses.field(default="", repr=False)
    """Rank 0 only, and only without CYXTRAIN_SECRET: the secret that it made, in hexadecimal."""
    protocol: int = PROTOCOL_VERSION
    token: str = dataclasses.field(default_factory=_token)
    """Tells processes apart, also across machines."""

    @property
    def machine(self) -> str:
        """The same for ranks of one machine."""
        return self.process.machine or self.host

    def to_json(self) -> str:
        """Return the record as text."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> RankRecord:
        """Read a record; from another version of the protocol, only the fields that this one knows.

        Raises RendezvousError if it is none.
        """
        try:
            facts = json_object(text.encode() if isinstance(text, str) else text)
            record = _from_facts(cls, facts | {"process": _from_facts(Process, facts["process"])})
            for field in dataclasses.fields(record):
                _check_range(field.name, getattr(record, field.name))
            if not 0 <= record.process.pid < 2**31:
                raise ValueError("an invalid pid")
            if not (record.host.isascii() and record.host.isprintable()):
                raise ValueError("an invalid host")
            if record.host:
                ipaddress.ip_address(record.host)  # a name could lead anywhere
            bytes.fromhex(record.run + record.key)
        except (FrameError, ValueError, TypeError, KeyError) as error:
            raise foreign_value(error) from None
        return record

    def why_incompatible(self, name: int, other: RankRecord, other_name: int) -> str:
        """Return why the rank of that name and another one cannot be in one group; "" if they can."""
        if self.protocol != other.protocol:
            return (
                f"rank {name} speaks version {self.protocol} of the ring's protocol, rank {other_name} version "
                f"{other.protocol}. Install the same version of cyxtrain everywhere."
            )
        if self.world_size != other.world_size:
            return (
                f"rank {name} was started for a world of {self.world_size}, rank {other_name} for a world of "
                f"{other.world_size}. Start all ranks with the same WORLD_SIZE."
            )
        if self.transport != other.transport:
            return (
                f"rank {name} was started with CYXTRAIN_TRANSPORT={self.transport} and rank {other_name} with "
                f"{other.transport}. Set it to the same value in the environment of every rank."
            )
        for what, variable, mine, its in (
            ("a secret", "CYXTRAIN_SECRET", self.has_secret, other.has_secret),
            ("checksums", "CYXTRAIN_CHECKSUMS", self.checksums, other.checksums),
        ):
            if mine != its:
                with_it, without = (name, other_name) if mine else (other_name, name)
                return (
                    f"rank {with_it} was started with {what} and rank {without} without. Set {variable} to the same "
                    "value in the environment of every rank."
                )
        return ""


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
    """Read a dataclass with fields of plain types that a rank has written as JSON; text becomes printable.

    Raises RendezvousError if it is something else.
    """
    try:
        facts = json_object(text)
        return _from_facts(
            kind, {name: printable(fact) if isinstance(fact, str) else fact for name, fact in facts.items()}
        )
    except (FrameError, ValueError, TypeError, KeyError) as error:
        raise foreign_value(error) from None


def _from_facts(kind: type[_Record], facts: dict[str, Any]) -> _Record:
    """Return a dataclass with those facts that it knows, after a check of their types."""
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    made = kind(**{field.name: facts[field.name] for field in fields if field.name in facts})
    for field in fields:
        found, expected = type(getattr(made, field.name)).__name__, str(field.type).partition("[")[0]
        if found != expected and (found, expected) != ("int", "float"):
            raise TypeError(f"its {field.name} has the wrong type")
    return made


def foreign_value(error: Exception) -> RendezvousError:
    """Return the error for a value in the store that no rank can have written."""
    return RendezvousError(
        f"the store at which the ranks meet holds what no rank has written ({error!r}). Does another program "
        "use it? Choose another MASTER_PORT, the same on every rank."
    )


def ended(name: int) -> RendezvousError:
    """Return the error for a rank whose process has ended during rendezvous."""
    return RendezvousError(
        f"rank {name} died: its process ended during rendezvous (killed, or out of memory?). "
        f"Look at the output of rank {name}, and start all ranks again.",
        rank=name,
    )


def cannot_join(name: int, error: BaseException) -> RendezvousError:
    """Return what a rank tells the others of a foreign error: only its type, as its text may hold private data."""
    reason = exhausted(error) or type(error).__name__
    return RendezvousError(f"rank {name} cannot join: {reason}. Look at its output.", rank=name)


def refuse_ended(own: RankRecord, others: Mapping[int, RankRecord]) -> None:
    """Raise the error for a rank, by its name, whose process has ended. Cost: about 60 us for each on this machine."""
    for name, record in others.items():
        if state_of(record.process, own.process) is State.GONE:
            raise ended(name)


def refuse_exited(awaited: Container[int], world_size: int) -> None:
    """Raise if the launcher has seen one of these ranks exit: it will not join."""
    rank = next((rank for rank in process_env.exited_ranks(world_size) if rank in awaited), None)
    if rank is not None:
        raise RendezvousError(
            f"rank {rank} has exited with code 0 without joining, while others of the {world_size} ranks wait for it: "
            "every rank must call cyxtrain.init() or fit.",
            rank=rank,
        )
