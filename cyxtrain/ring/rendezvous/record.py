"""What a rank says of itself where ranks meet, and whether two of them fit together."""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import os
import secrets
from dataclasses import dataclass
from typing import Any

from cyxtrain.errors import RendezvousError
from cyxtrain.ring.monitoring.process_state import Process
from cyxtrain.ring.wire.frames import PROTOCOL_VERSION, FrameError, json_object

_IMPORTED = secrets.token_hex(8)
_NO_PROCESS = Process("", 0, 0)


def _token() -> str:
    """Returns what no other process has; forked ones have our memory, and a number of their own."""
    return f"{_IMPORTED}-{os.getpid()}"


@dataclass(frozen=True)
class RankRecord:
    """What a rank says of itself at the store, for the others to read.

    Attributes:
        world_size: How many ranks it looks for.
        process: Which it is, on its machine.
        host: Address at which it listens; empty where it does not.
        port: TCP port at which it listens.
        unix: Abstract Unix socket at which it listens too, for ranks of its machine, as "@name"; empty: none.
        memory: What ranks of its machine need to try to read its memory; empty where they shall not.
        transport: What it was told to use, as CYXTRAIN_TRANSPORT.
        room: How many ranks like it its machine can run with a core free for each.
        cores: On how many cores it may run.
        has_secret: Whether it knows one from its environment.
        checksums: Whether its frames carry checksums.
        heartbeat_timeout_seconds: How long it lets others say nothing.
        devices: What it sees of accelerators, as text.
        run: Rank 0 only: the name of this meeting, in hexadecimal.
        key: Rank 0 only, where it has no secret: the one that it made, in hexadecimal.
        protocol: The version that it speaks.
        token: Tells processes apart, also over machines.
    """

    world_size: int
    process: Process = _NO_PROCESS
    host: str = ""
    port: int = 0
    unix: str = ""
    memory: str = ""
    transport: str = "auto"
    room: int = 0
    cores: int = 0
    has_secret: bool = False
    checksums: bool = False
    heartbeat_timeout_seconds: float = 30.0
    devices: str = ""
    run: str = ""
    key: str = dataclasses.field(default="", repr=False)
    protocol: int = PROTOCOL_VERSION
    token: str = dataclasses.field(default_factory=_token)

    @property
    def machine(self) -> str:
        """What ranks of one machine have in common."""
        return self.process.machine or self.host

    def to_json(self) -> str:
        """Returns the entry as text."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> RankRecord:
        """Reads an entry; of one of another protocol only what this one knows.

        Raises:
            RendezvousError: It is none.
        """
        try:
            facts = json_object(text.encode() if isinstance(text, str) else text)
            entry: RankRecord = made(cls, facts | {"process": made(Process, facts["process"])})
            for field in dataclasses.fields(entry):
                _check_range(field.name, getattr(entry, field.name))
            if not 0 <= entry.process.pid < 2**31:
                raise ValueError("a pid that cannot be")
            if not (entry.host.isascii() and entry.host.isprintable()):
                raise ValueError("a host that cannot be")
            if entry.host:
                ipaddress.ip_address(entry.host)  # a name could lead anywhere
            bytes.fromhex(entry.run + entry.key)
        except (FrameError, ValueError, TypeError, KeyError) as error:
            raise not_ours(error) from None
        return entry


_RANGES: dict[str, tuple[float, float]] = {
    "world_size": (1, 2**32),
    "port": (0, 2**16 - 1),
    "room": (0, 2**20),
    "cores": (0, 2**20),
    "heartbeat_timeout_seconds": (0.01, 1e9),  # others beat as often as it wants to hear
    "protocol": (0, 2**32),
}
_MAX_CHARACTERS = 4096


def _check_range(name: str, value: object) -> None:
    """Refuses a value that no rank can have written.

    Raises:
        ValueError: With its name.
    """
    if isinstance(value, str) and not (len(value) <= _MAX_CHARACTERS and value.isprintable()):
        raise ValueError(f"its {name} is too long, or no text")
    if name in _RANGES:
        lowest, highest = _RANGES[name]
        if not (isinstance(value, (int, float)) and lowest <= value <= highest):
            raise ValueError(f"a {name} that cannot be")


def made(kind: type[Any], facts: dict[str, Any]) -> Any:
    """Returns a dataclass with those facts that it knows; its fields are of plain types.

    Raises:
        TypeError: One is missing, or of another type.
    """
    fields = dataclasses.fields(kind)
    made = kind(**{field.name: facts[field.name] for field in fields if field.name in facts})
    for field in fields:
        found = type(getattr(made, field.name)).__name__
        if found != field.type and (found, field.type) != ("int", "float"):
            raise TypeError(f"its {field.name} is none")
    return made


def not_ours(error: Exception) -> RendezvousError:
    """Returns the error for what no rank can have written."""
    return RendezvousError(
        f"the store at which the ranks meet holds what no rank has written ({error!r}). Does another program "
        "use it? Choose another MASTER_PORT, the same on every rank."
    )


def misfit(name: int, theirs: RankRecord, own_name: int, ours: RankRecord) -> str:
    """Returns why two ranks cannot be in one group; "" where they can."""
    if theirs.protocol != ours.protocol:
        return (
            f"rank {name} speaks version {theirs.protocol} of the ring's protocol, rank {own_name} version "
            f"{ours.protocol}. Install the same version of cyxtrain everywhere."
        )
    if theirs.world_size != ours.world_size:
        return (
            f"rank {name} was started for a world of {theirs.world_size}, rank {own_name} for a world of "
            f"{ours.world_size}. Start all ranks with the same WORLD_SIZE."
        )
    if theirs.transport != ours.transport:
        return (
            f"rank {name} was started with CYXTRAIN_TRANSPORT={theirs.transport} and rank {own_name} with "
            f"{ours.transport}. Set it to the same value in the environment of every rank."
        )
    for what, variable, they, we in (
        ("a secret", "CYXTRAIN_SECRET", theirs.has_secret, ours.has_secret),
        ("checksums", "CYXTRAIN_CHECKSUMS", theirs.checksums, ours.checksums),
    ):
        if they != we:
            with_it, without = (name, own_name) if they else (own_name, name)
            return (
                f"rank {with_it} was started with {what} and rank {without} without. Set {variable} to the same "
                "value in the environment of every rank."
            )
    return ""
