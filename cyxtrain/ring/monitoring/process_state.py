"""Processes of this machine as its kernel sees them: only it can tell a stopped process from a busy one.

Linux only (`/proc`). Where the kernel cannot be asked, on another machine or in another container, heartbeats decide.
"""

from __future__ import annotations

import enum
import os
from dataclasses import dataclass
from pathlib import Path

_STOPPED = "T"
_ENDED = "ZX"
"""A zombie has ended: its parent has not asked how."""


class State(enum.Enum):
    """What the kernel says of a process."""

    ALIVE = "alive"
    STOPPED = "stopped"
    GONE = "gone"


@dataclass(frozen=True)
class Process:
    """A process, told from all others.

    Attributes:
        machine: The same for processes that can ask one kernel about each other; empty where none can be asked.
        pid: Its number there.
        started: When it began, in the kernel's ticks: a later process may get the same number.
    """

    machine: str
    pid: int
    started: int


def this_process(address: str) -> Process:
    """Returns this process.

    Args:
        address: Where it listens: copies of one virtual machine can look alike in all but their address.
    """
    pid = os.getpid()
    found = _read_stat(pid)
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespaces = os.readlink("/proc/self/ns/pid")
        if os.path.lexists("/proc/self/ns/time"):  # Linux 5.6 and later: start times count from another moment
            namespaces += " " + os.readlink("/proc/self/ns/time")
        if os.readlink("/proc/self") != str(pid):  # the files of another namespace, as in some containers
            found = None
    except OSError:
        found = None
    if found is None:
        return Process("", pid, 0)
    return Process(f"{boot} {namespaces} {address}", pid, found[1])


def state_of(process: Process, asking: Process) -> State | None:
    """Returns what the kernel says of a process; None where it cannot be asked.

    Cost: one file of /proc, about 20 us.

    Args:
        process: Whom it is about.
        asking: This process.
    """
    if not asking.machine or process.machine != asking.machine:
        return None
    found = _read_stat(process.pid)
    if found is None:
        return _exists(process.pid)
    letter, started = found
    if started != process.started or letter in _ENDED:
        return State.GONE
    return State.STOPPED if letter == _STOPPED else State.ALIVE


def _read_stat(pid: int) -> tuple[str, int] | None:
    """Returns (state letter, start time) from /proc/pid/stat; see proc_pid_stat(5)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")  # the name in it may be any bytes
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may have spaces and brackets of its own
    return fields[0], int(fields[19])


def _exists(pid: int) -> State | None:
    """Some systems hide the files of other users' processes, which live on all the same."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return State.GONE
    except OSError:
        return None
    return None
