"""One rank's process: its start, its process group, its end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

from cyxtrain.workers.guard import GRACE_SECONDS, Guard, end_groups, members_of, signal_group
from cyxtrain.workers.output import ErrorFilter, OutputReader, Terminal

DRAIN_SECONDS = 2.0
"""Seconds that a pipe may stay open after the last process of the rank has ended."""


@dataclass(frozen=True)
class RankSpec:
    """What to start."""

    label: str
    """Printed before each of its lines, such as "rank 1"."""
    command: tuple[str, ...]
    environment: Mapping[str, str]
    """All of its environment; nothing is inherited."""
    shares_terminal: bool = False
    """Give it our own stdin and stdout: no labels, and progress bars work. Its stderr is copied unchanged, without
    tracebacks of Ctrl-C, from a separate terminal if ours is one."""
    inherits: tuple[int, ...] = ()
    """File descriptors (handles on Windows) that it gets under the same numbers."""
    shows_bar: bool = False
    """Keep the unfinished line of its stdout, which it rewrites, below the lines of all ranks."""
    log: Path | None = None
    """File to which its lines are appended, without labels; not with `shares_terminal`."""


@dataclass(frozen=True)
class RankExit:
    """How a rank's process ended."""

    index: int
    """In the list of specs."""
    label: str
    code: int
    """Its exit code; 128 + n if signal n killed it, as in a shell."""
    killed_by: int | None
    at_seconds: float
    """On the clock of `time.monotonic`."""

    def describe(self) -> str:
        """Return the exit code and the name of the signal behind it."""
        if self.killed_by is None:
            return f"exit code {self.code}"
        name = f"signal {self.killed_by}"
        with contextlib.suppress(ValueError):  # real-time signals have no names
            name = signal.Signals(self.killed_by).name
        if name == "SIGKILL":
            name += ", often out of memory"
        return f"exit code {self.code}: {name}"


@dataclass(frozen=True)
class RankGone:
    """Event: the rank's process group has ended and all of its output is printed."""

    index: int


class RankProcess:
    """A running rank in its own session and process group, so that a stop reaches what it has started.

    One thread waits for its end and posts two events: `RankExit` at once, and `RankGone` when what the process left
    behind in its group has ended too (SIGTERM, the grace time, SIGKILL) and its output has been read. The guard ends it
    if this process is killed. Raises OSError if the command cannot be started.
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
        self._ends_by = 0.0
        self._has_ended = False
        self._process, copied = _spawn(spec)
        guard.add(self._process.pid)  # at once: until then nobody ends the rank if this process is killed
        self._errors = ErrorFilter(spec.label, terminal.mistakes)
        self._shares_terminal = spec.shares_terminal
        label = "" if spec.shares_terminal else spec.label
        show_bar = terminal.show_bar if spec.shows_bar else None
        log = None if spec.log is None else partial(terminal.append, spec.log)
        self._readers: list[OutputReader] = []
        stdout = self._process.stdout
        if stdout is not None:
            self._readers.append(OutputReader(stdout, label, terminal.write_out, log, show_bar))
        stderr = self._process.stderr or copied
        if stderr is not None:
            self._readers.append(OutputReader(stderr, label, terminal.write_err, log, errors=self._errors))
        self._thread = threading.Thread(target=self._wait_for_end, name=f"end of {spec.label}", daemon=True)
        self._thread.start()

    def stop(self, number: int, seconds: float) -> None:
        """Send a signal to its process alone, on Windows CTRL_BREAK; what it has started gets as many seconds."""
        self._ends_by = time.monotonic() + seconds
        self._errors.hides_interrupts |= number == signal.SIGINT
        if sys.platform == "win32":
            number = signal.CTRL_BREAK_EVENT
        self._process.send_signal(number)

    def stop_others(self, number: int) -> None:
        """Send a signal to what its process has started: a shell, say, does not pass it on."""
        if self._has_ended or sys.platform == "win32":
            return
        for pid in members_of(self._process.pid):
            if pid != self._process.pid:
                with contextlib.suppress(ProcessLookupError, PermissionError):  # it has just ended
                    os.kill(pid, number)

    def kill(self) -> None:
        """Kill it, and what it has started."""
        if sys.platform == "win32":
            self._process.kill()
        elif not self._has_ended:
            signal_group(self._process.pid, signal.SIGKILL)

    def join(self, seconds: float) -> None:
        """Wait until the thread has ended, which happens right after `RankGone`."""
        self._thread.join(seconds)

    def last_lines(self) -> bytes | None:
        """Return the last lines of its stderr; None if it shares our terminal."""
        return None if self._shares_terminal else self._readers[1].last_lines()

    def _wait_for_end(self) -> None:
        code = self._process.wait()
        at_seconds = time.monotonic()
        killed_by = None
        if code < 0:  # subprocess reports a signal as a negative code
            killed_by = -code
            code = 128 + killed_by
        self._post(RankExit(self.index, self.label, code, killed_by, at_seconds))
        if sys.platform != "win32":
            # A stop has its own deadline; without one, what the process has left gets the time after a failure.
            grace_seconds = max(GRACE_SECONDS, self._ends_by - time.monotonic())
            end_groups([self._process.pid], grace_seconds)
        self._has_ended = True  # the kernel may reuse the group's number from here on
        self._guard.remove(self._process.pid)
        for reader in self._readers:
            reader.join(DRAIN_SECONDS)
        self._post(RankGone(self.index))


def _spawn(spec: RankSpec) -> tuple[subprocess.Popen[bytes], IO[bytes] | None]:
    """Start the process; return it and, if its stderr is a separate terminal, our end of that terminal."""
    stdin: int | None = subprocess.DEVNULL
    stdout: int | None = subprocess.PIPE
    stderr: int | None = subprocess.PIPE
    copied: IO[bytes] | None = None
    if spec.shares_terminal:
        stdin = None
        stdout = None
        if sys.platform == "win32":
            stderr = None
        elif os.isatty(2):
            copied, stderr = _open_terminal()
    try:
        process = subprocess.Popen(
            spec.command,
            env=dict(spec.environment),
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            bufsize=0,
            **_options_of_system(spec),
        )
    finally:
        # As long as we hold the process's end too, our end never sees the end of its output.
        if copied is not None and stderr is not None:
            os.close(stderr)
    return process, copied


def _options_of_system(spec: RankSpec) -> dict[str, Any]:
    """Return options of Popen that give the process its own group and what it inherits."""
    if sys.platform != "win32":
        # In a session of its own, Ctrl-C in our terminal does not reach it: the supervisor passes it on.
        return {"pass_fds": spec.inherits, "start_new_session": True}
    options: dict[str, Any] = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}  # CTRL_BREAK must not reach us
    for handle in spec.inherits:
        os.set_handle_inheritable(handle, True)
    if spec.inherits:
        options["startupinfo"] = subprocess.STARTUPINFO(lpAttributeList={"handle_list": [*spec.inherits]})
    return options


def _open_terminal() -> tuple[IO[bytes], int]:
    """Return our end of a new terminal, as wide as the terminal on our stderr, and the process's end."""
    import fcntl
    import termios

    ours, theirs = os.openpty()
    attributes = termios.tcgetattr(theirs)
    attributes[1] &= ~termios.OPOST  # our own terminal adds the carriage returns
    termios.tcsetattr(theirs, termios.TCSANOW, attributes)
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, fcntl.ioctl(2, termios.TIOCGWINSZ, bytes(8)))
    return open(ours, "rb", buffering=0), theirs
