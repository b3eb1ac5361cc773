"""Faults as data: which link or rank fails, how, when, and until when.

Faults of links are done by the proxy in `chaos.py`, faults of processes by `install` in the process itself.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

ROLES = ("collectives", "messages", "control")


# --- what happens to a link -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Delay:
    """What goes from rank to peer arrives so much later."""

    seconds: float


@dataclass(frozen=True)
class Throttle:
    """From rank to peer goes so much and no more."""

    bytes_per_second: float


@dataclass(frozen=True)
class Slices:
    """What goes from rank to peer is sent in pieces of so many bytes, each in its own system call."""

    size: int = 1


@dataclass(frozen=True)
class Cut:
    """A black hole both ways: nothing arrives, not even the end of the connection. Once it heals, all of it comes."""


@dataclass(frozen=True)
class OneWay:
    """A black hole from rank to peer; the other way goes on."""


@dataclass(frozen=True)
class Close:
    """The connection ends for both sides, in order (FIN), after exactly the bytes that went before."""


@dataclass(frozen=True)
class Reset:
    """The connection is torn down for both sides (RST)."""


@dataclass(frozen=True)
class Flip:
    """One bit of what goes from rank to peer is turned over, counted from the fault's `after_bytes`."""

    bit: int


@dataclass(frozen=True)
class Forge:
    """The last bit of payloads from rank to peer is turned over, and the checksums calculated anew, without a key."""


What = Delay | Throttle | Slices | Cut | OneWay | Close | Reset | Flip | Forge


@dataclass(frozen=True)
class Fault:
    """What happens to which link, and when.

    Attributes:
        what: One of the classes above.
        rank: Who sends in the direction whose bytes are counted, and that `what` is about; None: every rank.
        peer: Who receives; None: every rank.
        role: Of the link, one of `ROLES`; None: all three.
        after_bytes: It begins when exactly so many bytes have gone from rank to peer on that link.
        past_handshake: They are counted from the end of the handshake on, which must be over both ways.
        seconds: It heals so long after it began; None: never.
        times: On how many connections at most; None: on all, also on those that are made anew.
    """

    what: What
    rank: int | None = None
    peer: int | None = None
    role: str | None = None
    after_bytes: int = 0
    past_handshake: bool = False
    seconds: float | None = None
    times: int | None = None

    def __post_init__(self) -> None:
        assert self.role is None or self.role in ROLES, self.role

    def concerns(self, rank: int | None, peer: int | None, role: str | None) -> bool:
        """Returns whether it is about what goes from `rank` to `peer` on the link of that role."""
        return self.rank in (None, rank) and self.peer in (None, peer) and self.role in (None, role)


# --- what happens to a process --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kill:
    """SIGKILL."""


@dataclass(frozen=True)
class Stop:
    """SIGSTOP, and SIGCONT so much later."""

    seconds: float


@dataclass(frozen=True)
class HoldGil:
    """A call into C that does not let go of the interpreter: no thread of the process runs meanwhile."""

    seconds: float


@dataclass(frozen=True)
class ProcessFault:
    """What happens to a rank, and when.

    Attributes:
        what: One of the three classes above.
        rank: To whom.
        at_call: Just before the system call of that number, from 1, of all its links together.
        at_collective: Just before its collective of that number, from 1; either this or `at_call`.
    """

    what: Kill | Stop | HoldGil
    rank: int
    at_call: int | None = None
    at_collective: int | None = None

    def __post_init__(self) -> None:
        assert (self.at_call is None) != (self.at_collective is None), "one of the two"


Faults = Sequence[Fault | ProcessFault]
"""Everything that goes wrong in one test."""


# --- doing it to the own process ------------------------------------------------------------------------------------


def install(faults: Faults, rank: int) -> None:
    """Makes the faults of a process happen to this one, which is `rank`, from the next call on.

    It counts by wrapping the methods of `Link` that move bytes, and those of `Executor` that do a collective, for the
    rest of this process's life: call it in its own process, before it joins.
    """
    from cyxtrain.ring.executor import Executor
    from cyxtrain.ring.wire.link import Link

    mine = [fault for fault in faults if isinstance(fault, ProcessFault) and fault.rank == rank]
    calls = {fault.at_call: fault.what for fault in mine if fault.at_call is not None}
    collectives = {fault.at_collective: fault.what for fault in mine if fault.at_collective is not None}
    if calls:
        count = itertools.count(1)
        for name in ("send", "send_both", "receive", "receive_both"):
            _wrap(Link, name, calls, count)
    if collectives:
        count = itertools.count(1)
        for name in ("run", "run_persistent"):
            _wrap(Executor, name, collectives, count)


def _wrap(owner: Any, name: str, faults: dict[int, Kill | Stop | HoldGil], count: itertools.count[int]) -> None:
    inner: Callable[..., Any] = getattr(owner, name)

    def outer(*args: Any, **kwargs: Any) -> Any:
        what = faults.get(next(count))  # one C call each: right from several threads too
        if what is not None:
            suffer(what)
        return inner(*args, **kwargs)

    setattr(owner, name, outer)


def suffer(what: Kill | Stop | HoldGil) -> None:
    """Does it to this process, now; returns when it is over, if ever."""
    if isinstance(what, Kill):
        os.kill(os.getpid(), signal.SIGKILL)
    elif isinstance(what, Stop):
        waker = wake_after(os.getpid(), what.seconds)
        os.kill(os.getpid(), signal.SIGSTOP)
        waker.wait()
    else:
        hold_gil(what.seconds)


def wake_after(pid: int, seconds: float) -> subprocess.Popen[bytes]:
    """Starts a shell that waits until a process is stopped, and lets it go on so much later; wait for it."""
    script = (
        'until grep -q "^State:.T" "/proc/$1/status"; do [ -d "/proc/$1" ] || exit 1; done; sleep "$2"; kill -CONT "$1"'
    )
    return subprocess.Popen(["sh", "-c", script, "sh", str(pid), str(seconds)], stderr=subprocess.DEVNULL)


def hold_gil(seconds: float) -> None:
    """Holds the interpreter: `ctypes.PyDLL`, unlike `CDLL`, does not let go of it around a call."""
    ctypes.PyDLL(None).usleep(ctypes.c_uint32(round(seconds * 1e6)))
