"""No rank outlives its supervisor: a small process that waits for the supervisor's end, however it comes.

A supervisor that is killed by SIGKILL stops nothing any more. So it has started this file as a process of its own,
and has noted in a pipe which process groups are alive. The kernel closes the pipe when the supervisor ends; then
the guard stops the groups that are left.

Linux has PR_SET_PDEATHSIG for this, and we do not use it: it reaches the child and not what the child has started,
it fires when the thread that spawned ends (a notebook's threads do), and it must be set between fork and exec, where
Python code is unsafe once there are threads. A pipe has none of this, and works on every POSIX system.

Not reached: a rank whose supervisor dies in the microseconds between starting it and noting it; what has made a
session of its own; Windows, where there are no process groups to stop.

The guard runs this file by path and isolated, so only the standard library is imported here.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

GRACE_SECONDS = 5.0
"""Seconds between the request to end and SIGKILL."""
_POLL_SECONDS = 0.02
_CLOSE_SECONDS = 2.0


class Guard:
    """The supervisor's end of the pipe; entering starts the guard, leaving ends it and waits for it.

    Args:
        grace_seconds: Between its request to end and SIGKILL, where the supervisor is gone.
    """

    def __init__(self, grace_seconds: float) -> None:
        self._grace_seconds = grace_seconds
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Guard:
        if sys.platform != "win32":
            # Its own session, so that a signal to the launcher's group leaves it; no output, so that it
            # never holds a pipe that somebody reads to the end; "/", so that it holds no folder.
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(Path(__file__).resolve()), str(self._grace_seconds)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                cwd="/",
                start_new_session=True,
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is None or self._process.stdin is None:
            return
        self._process.stdin.close()
        try:
            self._process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:  # somebody has stopped it
            self._process.kill()
            self._process.wait()

    def abandon(self) -> None:
        """Closes a forked child's end of the pipe: the guard waits for the supervisor's end alone."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    def add(self, group: int) -> None:
        """Notes a process group that must not outlive us."""
        self._note(f"+{group}\n")

    def remove(self, group: int) -> None:
        """Notes that a process group has ended; its number may soon be somebody else's."""
        self._note(f"-{group}\n")

    def _note(self, note: str) -> None:
        """Writes one note, from any thread: a write this short to a pipe is never torn."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):  # the guard was killed: the ranks can do without
                self._process.stdin.write(note.encode())


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Returns whether the condition came true within so many seconds; looks 50 times a second."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def signal_group(group: int, number: int) -> None:
    """Sends a signal to every process of a group; a group that has ended is no error."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def group_is_alive(group: int) -> bool:
    """Returns whether a process of the group still runs; one that waits to be reaped does not."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # macOS says so where only zombies are left
        return sys.platform != "darwin"
    try:  # in a container whose first process reaps nobody, orphans stay as zombies for ever
        return any(_runs_in(group, entry.path) for entry in os.scandir("/proc"))
    except OSError:  # only Linux can tell
        return True


def _runs_in(group: int, folder: str) -> bool:
    """Returns whether this folder of /proc is a running process of the group."""
    try:
        with open(f"{folder}/stat", "rb") as stat:
            state, _, member_of = stat.read().rpartition(b")")[2].split()[:3]
    except (OSError, ValueError):  # no process, or one that has just ended
        return False
    return int(member_of) == group and state not in b"ZX"


def end_groups(groups: Iterable[int], grace_seconds: float, *, ask: bool = True) -> None:
    """Ends process groups: SIGTERM (unless they were asked already), `grace_seconds` to end, then SIGKILL."""
    left = [group for group in groups if group_is_alive(group)]
    for group in left if ask else ():
        signal_group(group, signal.SIGTERM)
    if not wait_until(lambda: not any(map(group_is_alive, left)), grace_seconds):
        for group in left:
            signal_group(group, signal.SIGKILL)
        wait_until(lambda: not any(map(group_is_alive, left)), 1.0)


def _guard() -> None:
    """Reads notes until the supervisor has ended, and then ends what it has left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it lives as long as the pipe, neither longer nor shorter
    groups: set[int] = set()
    for note in sys.stdin.buffer:
        group = int(note[1:])
        (groups.add if note.startswith(b"+") else groups.discard)(group)
    end_groups(groups, float(sys.argv[1]))


if __name__ == "__main__":
    _guard()
