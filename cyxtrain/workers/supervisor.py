"""Start a set of ranks, watch them, and leave no process behind.

    start all -> wait -> (a failure: 2 s for the others to print their errors)        -> SIGTERM -> 5 s -> SIGKILL
                      -> (a stop request: a step and a checkpoint may be in progress) -> signal -> grace -> SIGKILL

A policy, a function of a rank's exit, decides whether the others are stopped.
"""

from __future__ import annotations

import math
import queue
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from cyxtrain import errors
from cyxtrain.environment.standard_streams import UNREAD_SECONDS
from cyxtrain.workers.guard import ALONE_SECONDS, GRACE_SECONDS, Guard
from cyxtrain.workers.output import LAST_SECONDS, TRACEBACK, Terminal, is_mistake
from cyxtrain.workers.process import DRAIN_SECONDS, RankExit, RankGone, RankProcess, RankSpec

OWN_END_SECONDS = 2.0
"""Seconds after a failure in which the other ranks may end by themselves and print their errors."""
INTERRUPTED_SECONDS = 0.5
"""Seconds after the second Ctrl-C in which ranks may remove unfinished files."""
KILLED_SECONDS = DRAIN_SECONDS + 3.0
"""Seconds after SIGKILL until a rank counts as one that cannot be ended."""
SLICE_SECONDS = 0.5
"""The longest wait in one piece: on Windows Ctrl-C arrives only between two."""

Policy = Callable[[RankExit], bool]
"""Returns whether the end of one rank stops the others."""


def stop_all_at_first_failure(ended: RankExit) -> bool:
    """Stop all ranks after a failure, not after a success."""
    return ended.code != 0


@dataclass(frozen=True)
class Outcome:
    """How the ranks ended."""

    exits: tuple[RankExit, ...]
    """Sorted by time, stopped ranks included."""
    first_failure: RankExit | None
    """The failure that caused the others (see `find_first_failure`)."""
    last_lines: bytes | None
    """The end of that rank's stderr; None if it shared our terminal."""
    stopped_by: signal.Signals | None
    """The first signal given to `Supervisor.request_stop`, otherwise the one that stopped a rank."""
    unstoppable: tuple[str, ...]
    """Labels of ranks that survived SIGKILL."""


class Supervisor:
    """Runs ranks until the last has ended.

    Any thread may call `run`; any thread and signal handler may call `request_stop`. Three threads for each rank read
    its output and wait for its end; they have ended when `run` returns, except for the reader of a pipe that a process
    outside the rank's group (a daemon) still holds. After a request to stop, and if this process is killed, the ranks
    have `stop_seconds` until SIGKILL.
    """

    def __init__(
        self,
        specs: Sequence[RankSpec],
        terminal: Terminal,
        policy: Policy = stop_all_at_first_failure,
        stop_seconds: float = GRACE_SECONDS,
    ) -> None:
        self._guard = Guard(stop_seconds)
        self._stop_seconds = stop_seconds
        self._specs = specs
        self._terminal = terminal
        self._policy = policy
        # Unlike `queue.Queue`, it allows a put in a signal handler that interrupts a put or a get.
        self._events: queue.SimpleQueue[RankExit | RankGone | signal.Signals] = queue.SimpleQueue()
        self._ranks: list[RankProcess] = []
        self._alive: set[int] = set()  # indices of ranks of which a process is left
        self._exits: list[RankExit] = []
        self._requests: list[signal.Signals] = []
        self._stop_all = False
        self._stopped_at = math.inf  # when `run` stopped the ranks that were left

    def request_stop(self, number: signal.Signals) -> None:
        """Let `run` stop all ranks with SIGINT, if that is the signal, otherwise SIGTERM.

        SIGUSR1 is passed on, to ranks that may use it in another way. SIGKILL and a second SIGINT kill.
        """
        self._events.put(number)

    def abandon(self) -> None:
        """Release what a forked child has inherited: the ranks belong to its parent."""
        self._guard.abandon()

    def run(self) -> Outcome:
        """Start all ranks and return when no process of them is left.

        Raises OSError if a command cannot be started; ranks that had started are stopped.
        """
        self._terminal.patience_seconds = UNREAD_SECONDS
        with self._guard as guard:
            try:
                for index, spec in enumerate(self._specs):
                    self._ranks.append(RankProcess(index, spec, self._terminal, guard, self._events.put))
                    self._alive.add(index)
                self._wait(math.inf, lambda: self._stop_all or bool(self._requests))
                self._wait(OWN_END_SECONDS, lambda: bool(self._requests))
            finally:
                self._stopped_at = time.monotonic()
                self._end_all()
        return self.outcome()

    def outcome(self) -> Outcome:
        """Return how the ranks ended; after `run`, with the requests to stop since, which reached no rank."""
        while not self._events.empty():
            self._handle(self._events.get())
        return self._outcome()

    def _outcome(self) -> Outcome:
        exits = sorted(self._exits, key=lambda ended: ended.at_seconds)
        last_lines = {rank.index: rank.last_lines() for rank in self._ranks}
        before_stop = [ended for ended in exits if ended.at_seconds < self._stopped_at]
        first = find_first_failure(before_stop, last_lines)
        if first is not None and _blames_another(last_lines[first.index]):
            # The rank at fault may still have been exiting when we stopped it.
            first = _find_late_error(exits[len(before_stop) :], last_lines) or first
        stopped_by = next(iter(self._requests), None)
        if stopped_by is None and first is None:
            stopped_by = find_stop(before_stop)
        labels = {rank.index: rank.label for rank in self._ranks}
        for ended in exits:  # what is left has not ended
            del labels[ended.index]
        return Outcome(
            exits=tuple(exits),
            first_failure=first,
            last_lines=None if first is None else last_lines[first.index],
            stopped_by=stopped_by,
            unstoppable=tuple(labels.values()),
        )

    def _wait(self, seconds: float, until: Callable[[], bool]) -> None:
        """Handle events until the condition holds, the time is up, or no rank is left."""
        deadline = time.monotonic() + seconds
        while self._alive and not until():
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return
            try:
                event = self._events.get(timeout=min(remaining, SLICE_SECONDS))
            except queue.Empty:
                continue
            self._handle(event)

    def _handle(self, event: RankExit | RankGone | signal.Signals) -> None:
        if isinstance(event, RankExit):
            self._exits.append(event)
            if len(self._exits) == len(self._specs):
                self._terminal.patience_seconds = LAST_SECONDS
            self._stop_all |= self._policy(event)
        elif isinstance(event, RankGone):
            self._alive.discard(event.index)
        elif event.name == "SIGUSR1":  # by its name: Windows has no such signal
            for index in self._alive:
                self._ranks[index].stop(event, 0.0)
        else:
            self._requests.append(event)

    def _end_all(self) -> None:
        """Signal the ranks that are left; kill them after the grace time or at the second Ctrl-C."""
        number = signal.SIGTERM
        seconds = GRACE_SECONDS
        interrupts_to_kill = 1
        if self._requests:
            seconds = self._stop_seconds
            interrupts_to_kill = 2
            if self._requests[0] == signal.SIGINT:
                number = signal.SIGINT

        def must_kill() -> bool:
            return signal.SIGKILL in self._requests or self._requests.count(signal.SIGINT) >= interrupts_to_kill

        # Each rank alone first: a child that the same signal ends, such as a DataLoader's worker, would fail the rank.
        for index in self._alive:
            self._ranks[index].stop(number, seconds)
        self._wait(min(ALONE_SECONDS, seconds), must_kill)
        for index in self._alive:
            self._ranks[index].stop_others(number)
        self._wait(seconds - ALONE_SECONDS, must_kill)
        # After a second Ctrl-C, which another SIGINT passes on: ranks may remove unfinished files.
        if signal.SIGKILL not in self._requests and must_kill():
            for index in self._alive:
                self._ranks[index].stop(signal.SIGINT, 0.0)
            self._wait(INTERRUPTED_SECONDS, lambda: False)
        for index in self._alive:
            self._ranks[index].kill()
        self._wait(KILLED_SECONDS, lambda: False)
        for rank in self._ranks:
            rank.join(0.0 if rank.index in self._alive else 1.0)


def _lines_naming(*kinds: type[errors.CyxtrainError]) -> re.Pattern[bytes]:
    """Return a pattern for the line of a traceback that names one of these errors."""
    names = b"|".join(kind.__name__.encode() for kind in kinds)
    # PyTorch puts "[rank0]: " before each line of a traceback, once for each group that a program has made.
    return re.compile(rb"^(?:\[rank\d+\]: *)*(?:\w+\.)*(?:%s)\b" % names, re.MULTILINE)


_BLAMES_ANOTHER = _lines_naming(*errors.BLAMING_ANOTHER)
_WOULD_RECUR = _lines_naming(errors.ConfigError, errors.BackendUnavailableError, errors.NonFiniteError)
_NAMES = {"SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"}
# By exit code: signals with which somebody stops a rank; it is not a failure.
_STOPS = {128 + number: number for number in signal.Signals if number.name in _NAMES}


def find_first_failure(exits: Sequence[RankExit], last_lines: Mapping[int, bytes | None]) -> RankExit | None:
    """Return the failure that caused the others.

    `exits` are sorted by time, and end before we stopped anything. The failure is the earliest whose stderr blames no
    other rank; if all do, the earliest. If somebody stopped a rank and no other has its own error, nothing has failed.
    """
    failures = [ended for ended in exits if ended.code != 0 and ended.code not in _STOPS]
    # Time alone does not tell: a rank that raises informs the others, which may leave the interpreter before it does.
    blaming_nobody = _find_own_failures(failures, last_lines)
    if blaming_nobody:
        return blaming_nobody[0]
    if not failures or find_stop(exits) is not None:
        return None
    return failures[0]


def _find_own_failures(failures: Sequence[RankExit], last_lines: Mapping[int, bytes | None]) -> list[RankExit]:
    """Return the failures whose stderr blames no other rank."""
    blaming_nobody = [ended for ended in failures if not _blames_another(last_lines[ended.index])]
    mistakes = [ended for ended in failures if is_mistake(last_lines[ended.index])]
    if not mistakes:
        return blaming_nobody
    # The other ranks may have made the same mistake and print nothing; those with another error have a traceback.
    others = [ended for ended in blaming_nobody if ended.killed_by or TRACEBACK in (last_lines[ended.index] or b"")]
    return others or mistakes


def _find_late_error(exits: Sequence[RankExit], last_lines: Mapping[int, bytes | None]) -> RankExit | None:
    """Return the first stopped rank that was still exiting after its own error, with that error's code."""
    for ended in exits:
        _, _, last_traceback = (last_lines[ended.index] or b"").rpartition(TRACEBACK)
        is_interrupt = b"\nKeyboardInterrupt" in last_traceback
        if last_traceback and not is_interrupt and not _blames_another(last_traceback):
            return replace(ended, code=1, killed_by=None)
    return None


def _blames_another(stderr: bytes | None) -> bool:
    return _BLAMES_ANOTHER.search(stderr or b"") is not None


def would_recur(outcome: Outcome) -> bool:
    """Return whether restarted ranks would fail with the same error, as far as stderr tells."""
    first = outcome.first_failure
    if first is None or first.killed_by is not None:
        return False
    # A chain of exceptions has several; the last one ended the rank.
    _, _, last_traceback = (outcome.last_lines or b"").rpartition(b"Traceback (")
    return _WOULD_RECUR.search(last_traceback) is not None


def find_stop(exits: Sequence[RankExit]) -> signal.Signals | None:
    """Return the signal that ended the first stopped rank, if there is one."""
    for ended in exits:
        if ended.code in _STOPS:
            return _STOPS[ended.code]
    return None
