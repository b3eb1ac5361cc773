"""Stop the ranks of a supervisor that was killed: a small process waits for the supervisor's end.

The supervisor starts this file as a process and writes to a pipe which process groups are alive. When the supervisor
ends, however it ends, the kernel closes the pipe, and the guard stops the groups that are left.

Why not PR_SET_PDEATHSIG: it reaches only the direct child, fires when the thread that spawned it ends (threads of a
notebook do), must be set between fork and exec, and exists only on Linux.

Not reached: a rank whose supervisor dies in the microseconds between starting it and writing to the pipe; a process
that created its own session; Windows, which has no process groups.

The guard runs this file by path without site-packages: only the standard library is imported at the top.
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
"""Seconds between SIGTERM and SIGKILL, after a failure."""
ALONE_SECONDS = 1.0
"""Seconds in which a rank that is asked to stop may end by itself, before what it has started is asked too."""
_POLL_SECONDS = 0.02
_CLOSE_SECONDS = 2.0


class Guard:
    """The supervisor's end of the pipe: entering starts the guard, leaving ends it."""

    def __init__(self, grace_seconds: float) -> None:
        self._grace_seconds = grace_seconds
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Guard:
        if sys.platform != "win32":
            # A separate session keeps signals to the launcher's group away; no output, so that it never keeps a
            # pipe open that somebody reads to the end; "/", so that it keeps no folder busy.
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
        self.abandon()
        if self._process is None:
            return
        try:
            self._process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:  # somebody has suspended it
            self._process.kill()
            self._process.wait()

    def abandon(self) -> None:
        """Close this process's end of the pipe; in a forked child the guard then waits for the parent alone."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    def add(self, group: int) -> None:
        """Register a process group that must not outlive this process."""
        self._write(f"+{group}\n")

    def remove(self, group: int) -> None:
        """Unregister a process group that has ended: the kernel may reuse its number."""
        self._write(f"-{group}\n")

    def _write(self, line: str) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):  # the guard was killed
                # No lock between threads: the kernel writes so few bytes to a pipe atomically.
                self._process.stdin.write(line.encode())


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Return whether the condition became true in time; it is checked 50 times a second."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def signal_group(group: int, number: int) -> None:
    """Send a signal to every process of a group; ignore a group that has ended."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def members_of(group: int) -> list[int]:
    """Return the processes of a group that still run; zombies do not."""
    import psutil

    ended = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.Error):  # it has just ended
            if os.getpgid(process.pid) == group and process.status() not in ended:
                found.append(process.pid)
    return found


def group_is_alive(group: int) -> bool:
    """Return whether a process of the group still runs; zombies do not count."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # macOS answers so when only zombies are left
        return sys.platform != "darwin"
    try:
        return bool(members_of(group))
    except ImportError:  # in the guard itself: zombies then count, and cost it the grace time
        return True


def end_groups(groups: Iterable[int], grace_seconds: float) -> None:
    """End process groups: SIGTERM, `grace_seconds`, SIGKILL."""
    left = [group for group in groups if group_is_alive(group)]
    for group in left:
        signal_group(group, signal.SIGTERM)
    if not wait_until(lambda: not any(map(group_is_alive, left)), grace_seconds):
        for group in left:
            signal_group(group, signal.SIGKILL)
        wait_until(lambda: not any(map(group_is_alive, left)), 1.0)


def _guard() -> None:
    """Wait for the supervisor's end, then end the process groups that it has left."""
    # Schedulers and people send a signal to every process of a job: the guard must outlive the supervisor.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin.buffer:
        group = int(line[1:])
        if line.startswith(b"+"):
            groups.add(group)
        else:
            groups.discard(group)
    grace_seconds = float(sys.argv[1])
    alone_seconds = min(ALONE_SECONDS, grace_seconds / 2)
    # Each rank alone first: a child that the same signal ends, such as a DataLoader's worker, would fail the rank.
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(group, signal.SIGTERM)
    wait_until(lambda: not any(map(group_is_alive, groups)), alone_seconds)
    end_groups(groups, grace_seconds - alone_seconds)


if __name__ == "__main__":
    _guard()
