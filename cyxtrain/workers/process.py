"""One rank's process: what starts it, its process group, its end."""

from __future__ import annotations

import contextlib
import enum
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cyxtrain.workers.guard import GRACE_SECONDS, Guard, end_groups, signal_group
from cyxtrain.workers.output import Terminal, read_output

DRAIN_SECONDS = 2.0
"""Seconds that a pipe may stay open after the last process of the rank has ended."""

if sys.platform == "win32":
    _CREATION_FLAGS = subprocess.CREATE_NEW_PROCESS_GROUP  # so that CTRL_BREAK reaches the rank and not us
else:
    _CREATION_FLAGS = 0


@dataclass(frozen=True)
class RankSpec:
    """What to start."""

    label: str
    """Names the rank before each of its lines and in reports, such as "rank 1"."""
    command: tuple[str, ...]
    """The program and its arguments; no shell reads them."""
    environment: Mapping[str, str]
    """All of its environment; nothing is inherited."""
    shares_terminal: bool = False
    """Give it our own stdin, stdout and stderr: no labels, no last words, and progress bars work."""
    inherits: tuple[int, ...] = ()
    """File descriptors (handles on Windows) that it is given, under the same numbers."""
    log: Path | None = None
    """File to which its lines are added, without labels; not with `shares_terminal`."""


@dataclass(frozen=True)
class RankExit:
    """How a rank's process ended."""

    index: int
    """Its place in the list of specs."""
    label: str
    code: int
    """Its exit code; 128 + n where signal n killed it, as a shell says."""
    killed_by: int | None
    """The number of the signal that killed it."""
    at_seconds: float
    """When it ended, on the clock of `time.monotonic`."""

    def describe(self) -> str:
        """Returns the exit code, with the name of the signal behind it."""
        if self.killed_by is None:
            return f"exit code {self.code}"
        with contextlib.suppress(ValueError):  # real-time signals have no names
            name = signal.Signals(self.killed_by).name
            hint = ", often because memory was full" if name == "SIGKILL" else ""
            return f"exit code {self.code} ({name}{hint})"
        return f"exit code {self.code} (signal {self.killed_by})"


@dataclass(frozen=True)
class RankGone:
    """Nothing of the rank is left: its group has ended, and all that it wrote is shown."""

    index: int


class Stop(enum.Enum):
    """How a rank is told to end."""

    INTERRUPT = enum.auto()
    """As Ctrl-C does: SIGINT."""
    TERMINATE = enum.auto()
    """SIGTERM."""
    KILL = enum.auto()
    """SIGKILL: nothing can refuse it."""


class RankProcess:
    """A running rank, in a session and process group of its own, so that a stop reaches what it has started.

    One thread waits for its end and posts two events: `RankExit` at once, and `RankGone` when what the process
    left behind in its group has ended too (SIGTERM, the grace, SIGKILL) and its output has been read.

    Args:
        index: Its place in the list of specs.
        spec: What to start.
        terminal: Where its lines go.
        guard: Ends it where we cannot.
        post: Takes the two events, from the thread.

    Raises:
        OSError: The command cannot be started.
    """

    def __init__(
        self,
        index: int,
        spec: RankSpec,
        terminal: Terminal,
        guard: Guard,
        post: Callable[[RankExit | RankGone], None],
    ) -> None:
        self.index = index
        self.label = spec.label
        self._guard = guard
        self._post = post
        self._told = False
        self._ended = False
        self._log = None if spec.log is None else open(spec.log, "ab", buffering=0)  # noqa: SIM115 - _attend closes it
        self._process = _spawn(spec)
        guard.add(self._process.pid)
        self._readers = read_output(self._process, spec.label, terminal, self._log)
        self._thread = threading.Thread(target=self._attend, name=f"end of {spec.label}", daemon=True)
        self._thread.start()

    def tell(self, how: Stop) -> None:
        """Tells the process and all of its group to end; one that has ended is no error."""
        if self._ended:
            return
        self._told = True
        if sys.platform == "win32":
            if how is Stop.KILL:
                self._process.terminate()
            else:
                self._process.send_signal(signal.CTRL_BREAK_EVENT)
        else:
            numbers = {Stop.INTERRUPT: signal.SIGINT, Stop.TERMINATE: signal.SIGTERM, Stop.KILL: signal.SIGKILL}
            signal_group(self._process.pid, numbers[how])

    def join(self, seconds: float) -> None:
        """Waits until the thread has ended, which it does right after `RankGone`."""
        self._thread.join(seconds)

    def last_words(self) -> bytes | None:
        """Returns the last lines of its stderr; None where it shares our terminal, and they are there already."""
        return self._readers[1].last_lines() if self._readers else None

    def _attend(self) -> None:
        """Waits for the end of the process, then for the end of all that is left of it."""
        returned = self._process.wait()
        at_seconds = time.monotonic()
        killed_by = -returned if returned < 0 else None
        code = returned if killed_by is None else 128 + killed_by
        self._post(RankExit(self.index, self.label, code, killed_by, at_seconds))
        if sys.platform != "win32":
            end_groups([self._process.pid], GRACE_SECONDS, ask=not self._told)
        # The number of a group belongs to it as long as it has members. From here on we forget it.
        self._ended = True
        self._guard.remove(self._process.pid)
        for reader in self._readers:
            reader.join(DRAIN_SECONDS)
        if self._log is not None:
            self._log.close()
        self._post(RankGone(self.index))


def _spawn(spec: RankSpec) -> subprocess.Popen[bytes]:
    """Starts the process; without our terminal, its stdin is empty and its output comes through pipes."""
    pipe = None if spec.shares_terminal else subprocess.PIPE
    inherited: dict[str, Any] = {"pass_fds": spec.inherits}
    if sys.platform == "win32":
        handles = list(spec.inherits)
        for handle in handles:
            os.set_handle_inheritable(handle, True)
        inherited = {"startupinfo": subprocess.STARTUPINFO(lpAttributeList={"handle_list": handles})} if handles else {}
    return subprocess.Popen(
        spec.command,
        env=dict(spec.environment),
        stdin=None if spec.shares_terminal else subprocess.DEVNULL,
        stdout=pipe,
        stderr=pipe,
        bufsize=0,
        start_new_session=sys.platform != "win32",
        creationflags=_CREATION_FLAGS,
        **inherited,
    )
