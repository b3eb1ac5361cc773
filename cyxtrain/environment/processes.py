"""Processes of this machine as the operating system sees them: only it can tell a stopped process from a busy one.

If it cannot be asked, on another machine or in another container, heartbeats decide.
"""

from __future__ import annotations

import enum
import os
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path


class State(enum.Enum):
    """The state of a process."""

    ALIVE = "alive"
    STOPPED = "stopped"
    GONE = "gone"


@dataclass(frozen=True)
class Process:
    """The identity of a process."""

    machine: str
    """The same for processes that one operating system can see; "" if it cannot be asked."""
    pid: int
    started: int
    """psutil's hash of the pid and the start time, which tells a later process with the same pid apart."""


def this_process(address: str) -> Process:
    """Return the identity of this process; only its address tells copies of one virtual machine apart."""
    import psutil  # takes 20 ms to import, which a single process saves

    machine = _machine()
    if not machine:
        return Process("", os.getpid(), 0)
    return Process(f"{machine} {address}", os.getpid(), hash(psutil.Process()))


def _machine() -> str:
    """Return a name that processes share if one operating system knows their states; "": unknown."""
    if sys.platform != "linux":
        return f"{sys.platform} {uuid.getnode()}"
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespaces = os.readlink("/proc/self/ns/pid")
        if os.path.lexists("/proc/self/ns/time"):  # Linux 5.6 and later: start times are relative to it
            namespaces += " " + os.readlink("/proc/self/ns/time")
        if os.readlink("/proc/self") != str(os.getpid()):  # /proc of another namespace, as in some containers
            return ""
    except OSError:
        return ""  # not Linux, or its /proc is hidden
    return f"{boot} {namespaces}"


def state_of(process: Process, asking: Process) -> State | None:
    """Return a process's state, or None if this one cannot know it. Cost: two files of /proc, about 60 us."""
    import psutil

    if not asking.machine or process.machine != asking.machine:
        return None
    try:
        found = psutil.Process(process.pid)
        if hash(found) != process.started:
            return State.GONE
        status = found.status()
    except (psutil.AccessDenied, OSError):  # OSError: this process has no file descriptor left to read /proc with
        return None
    except psutil.NoSuchProcess:
        return None if _is_hidden(process.pid) else State.GONE
    if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):  # a zombie has ended: its parent has not read its exit
        return State.GONE
    return State.STOPPED if status == psutil.STATUS_STOPPED else State.ALIVE


def has_native_handler(number: int) -> bool:
    """Return whether this process handles a signal, also outside of Python, as `faulthandler` does."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:  # not Linux
        return False
    caught = int(status.partition("SigCgt:")[2].split()[0], 16)
    return bool(caught >> (number - 1) & 1)


def _is_hidden(pid: int) -> bool:
    """Return whether a process exists that /proc does not show: some systems hide other users' processes."""
    if sys.platform != "linux":
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # another user's process is alive, too
    return True
