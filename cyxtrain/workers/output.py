"""From the pipes of many ranks to one terminal: whole lines, each with the name of its rank."""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import IO, Protocol

KEPT_LINES = 100
"""Lines of a rank's stderr that are kept for its last words."""
REFRESH_SECONDS = 10.0
"""Seconds between two states of a progress bar that are shown."""
_KEPT_BYTES = 8192  # of each kept line
_LINE_BYTES = 4 << 20  # a longer line is shown in pieces, so that memory stays bounded
_READ_BYTES = 1 << 16


class Stream(Protocol):
    """Where bytes go: an unbuffered binary file."""

    def write(self, data: bytes, /) -> int | None:
        """Writes some of the bytes, and returns how many; None where it would have to wait."""


class Terminal:
    """Where the lines of all ranks meet: one lock over both streams, because both may be the same screen."""

    def __init__(self, out: Stream, err: Stream) -> None:
        self._out = out
        self._err = err
        self._lock = threading.Lock()

    @classmethod
    def standard(cls) -> Terminal:
        """Returns this process's own stdout and stderr, without the buffers of `sys.stdout`.

        A buffer would keep what a closed pipe has refused, and complain once more when the interpreter ends.
        """
        out = open(1, "wb", buffering=0, closefd=False)  # noqa: SIM115 - not ours to close
        err = open(2, "wb", buffering=0, closefd=False)  # noqa: SIM115
        return cls(out, err)

    def write_out(self, data: bytes) -> None:
        """Writes all of it to stdout, unmixed with what others write; raises OSError where nobody reads."""
        self._write(self._out, data)

    def write_err(self, data: bytes) -> None:
        """Writes all of it to stderr, unmixed with what others write; raises OSError where nobody reads."""
        self._write(self._err, data)

    def _write(self, stream: Stream, data: bytes) -> None:
        with self._lock:
            while data:
                written = stream.write(data)
                if written is None:  # a full terminal that was set not to block
                    time.sleep(0.01)
                data = data[written or 0 :]


class LineAssembler:
    r"""Cuts bytes into whole lines, and a progress bar into what a terminal would show of it.

    A bar rewrites its line after a carriage return. Of a finished line the last state is shown; of one that is
    being rewritten, a state every `REFRESH_SECONDS`, as a line of its own. Bytes are never decoded.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rest = b""
        self._shown_at = clock()

    def feed(self, data: bytes) -> list[bytes]:
        """Returns the lines, without their ends, that these bytes complete."""
        *whole, rest = (self._rest + data).split(b"\n")
        lines = [(_states(line) or [b""])[-1] for line in whole]
        states = _states(rest)
        if len(states) > 1:
            if self._clock() - self._shown_at >= REFRESH_SECONDS:
                lines.append(states[-2])
            rest = states[-1] + (b"\r" if rest.endswith(b"\r") else b"")
        if len(rest) > _LINE_BYTES:
            lines.append(rest)
            rest = b""
        if lines:
            self._shown_at = self._clock()
        self._rest = rest
        return lines

    def finish(self) -> list[bytes]:
        """Returns the last line, where it had no end."""
        states, self._rest = _states(self._rest), b""
        return states[-1:]


def _states(line: bytes) -> list[bytes]:
    """Returns what a line has shown, one rewriting after the other."""
    return [state for state in line.split(b"\r") if state]


class OutputReader:
    """Reads one stream of one process to its end, in a thread, and writes it on line by line.

    The thread is a daemon, because its end is not in our hands: a process that has left the rank's group may
    keep the pipe open for as long as it lives.
    """

    def __init__(self, source: IO[bytes], label: str, write: Callable[[bytes], None], log: Stream | None) -> None:
        self._source = source
        self._log = log
        self._prefix = f"[{label}] ".encode()
        self._write = write
        self._kept: deque[bytes] = deque(maxlen=KEPT_LINES)
        self._showing = False
        self._thread = threading.Thread(target=self._read, name=f"output of {label}", daemon=True)
        self._thread.start()

    def join(self, seconds: float) -> None:
        """Waits until all is shown: so many seconds for what comes, and as long as it takes for a slow terminal."""
        self._thread.join(seconds)
        while self._thread.is_alive() and self._showing:
            self._thread.join(seconds)

    def last_lines(self) -> bytes:
        """Returns the last `KEPT_LINES` lines, without the label."""
        return b"".join(line + b"\n" for line in list(self._kept))

    def _read(self) -> None:
        # Where nobody reads our own output any more, leaving closes the pipe: the rank then meets
        # the same broken pipe as if it had been started alone.
        with self._source:
            assembler = LineAssembler()
            try:
                while data := self._source.read(_READ_BYTES):
                    self._show(assembler.feed(data))
                self._show(assembler.finish())
            except OSError:
                return

    def _show(self, lines: list[bytes]) -> None:
        self._kept.extend(line[:_KEPT_BYTES] for line in lines)
        if lines:
            if self._log is not None:
                with contextlib.suppress(OSError, ValueError):  # the disk is full; or it is closed: a daemon writes on
                    self._log.write(b"".join(line + b"\n" for line in lines))
            self._showing = True
            self._write(b"".join(self._prefix + line + b"\n" for line in lines))
            self._showing = False


def read_output(
    process: subprocess.Popen[bytes], label: str, terminal: Terminal, log: Stream | None
) -> list[OutputReader]:
    """Starts to show what a process writes; returns the readers of its stdout and stderr, or none without pipes."""
    pairs = ((process.stdout, terminal.write_out), (process.stderr, terminal.write_err))
    return [OutputReader(source, label, write, log) for source, write in pairs if source is not None]
