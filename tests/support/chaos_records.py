"""What the proxy writes down: faults that happened, bytes that went, and how far a fault is at one link."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

from faults import Fault

_MESSAGE = struct.Struct(">4sI")
_HANDSHAKE_MESSAGES = 2
"""How many messages each side sends before the stream begins."""
_AGREEMENT = struct.Struct(">I")
"""What links for collectives begin with: the length of what ranks decide by, which a checksum follows."""
_SUM_BYTES = 8


@dataclass(frozen=True)
class Happened:
    """A fault that has begun; a flipped bit once its byte was sent on.

    Attributes:
        fault: Which.
        rank: Who sent in that direction of the link, as its first message said; None: it did not say.
        peer: Who received.
        role: Of the link.
        at_byte: How many bytes had gone in that direction; of a flipped bit, which byte it was.
        at: In seconds of `time.monotonic`.
    """

    fault: Fault
    rank: int | None
    peer: int | None
    role: str | None
    at_byte: int
    at: float


@dataclass(frozen=True)
class Traffic:
    """What went over one direction of a link.

    Attributes:
        rank: Who sent.
        peer: Who received.
        role: Of the link.
        sent: Bytes, all together.
        handshake: How many of them were the handshake; None: it did not come to its end.
    """

    rank: int | None
    peer: int | None
    role: str | None
    sent: int
    handshake: int | None


class Handshake:
    """Finds the end of the handshake in one direction; on links for collectives, of the agreement that follows it.

    Args:
        role: Of the link.
    """

    def __init__(self, role: str | None) -> None:
        self.end: int | None = None
        self._agrees = role == "collectives"
        self._seen = bytearray()

    def feed(self, data: bytes) -> None:
        if self.end is not None:
            return
        self._seen += data
        at = 0
        for _ in range(_HANDSHAKE_MESSAGES):
            if len(self._seen) < at + _MESSAGE.size:
                return
            at += _MESSAGE.size + _MESSAGE.unpack_from(self._seen, at)[1]
        if self._agrees:
            if len(self._seen) < at + _AGREEMENT.size:
                return
            at += _AGREEMENT.size + _AGREEMENT.unpack_from(self._seen, at)[0] + _SUM_BYTES
        if len(self._seen) >= at:
            self.end = at
            self._seen.clear()


class Active:
    """A fault at one flow: whether it has begun, and when it heals."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.begun: float | None = None

    def running(self, now: float) -> bool:
        return self.begun is not None and now < self.heals_at

    @property
    def heals_at(self) -> float:
        return math.inf if self.begun is None or self.fault.seconds is None else self.begun + self.fault.seconds
