"""Starts a set of ranks, watches them, and leaves nothing of them behind.

    start all -> wait -> (a failure: 2 s for the others to say what they think) -> ask -> 5 s -> SIGKILL -> all gone
                      -> (asked to stop: a step and a checkpoint may be under way)  -> ask -> 9 s -> SIGKILL -> all gone

What happens when a rank ends is a policy: a function from the exit to a `Reaction`. A new reaction, such as
starting the rank again, is a member of `Reaction` and a branch in `Supervisor._take`.
"""

from __future__ import annotations

import enum
import math
import queue
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cyxtrain import errors
from cyxtrain.workers.guard import GRACE_SECONDS, Guard
from cyxtrain.workers.output import Terminal
from cyxtrain.workers.process import DRAIN_SECONDS, RankExit, RankGone, RankProcess, RankSpec, Stop

OWN_END_SECONDS = 2.0
"""Seconds after a failure in which the other ranks may end by themselves, so that their own errors appear."""
ASKED_SECONDS = 9.0
"""Seconds for ranks that a user stops: they end their step and write a checkpoint; within 10 s nothing is left."""
KILLED_SECONDS = DRAIN_SECONDS + 3.0
"""Seconds after SIGKILL until a rank counts as one that cannot be ended."""
SLICE_SECONDS = 0.5
"""The longest wait in one piece: Windows hands us a Ctrl-C only between two."""


class Reaction(enum.Enum):
    """What the end of one rank means for the others."""

    KEEP_GOING = enum.auto()
    """Nothing."""
    STOP_ALL = enum.auto()
    """They are stopped."""


Policy = Callable[[RankExit], Reaction]


def stop_all_at_first_failure(ended: RankExit) -> Reaction:
    """Lets a rank that has done its work go; the failure of one is the end of all."""
    return Reaction.KEEP_GOING if ended.code == 0 else Reaction.STOP_ALL


@dataclass(frozen=True)
class Outcome:
    """What became of the ranks."""

    exits: tuple[RankExit, ...]
    """In the order of time, those of stopped ranks too."""
    first_failure: RankExit | None
    """The failure that caused the others (see `find_first_failure`)."""
    last_words: bytes | None
    """The last lines of that rank's stderr; None where it shared our terminal."""
    stopped_by: signal.Signals | None
    """The first signal given to `Supervisor.request_stop`, else the one for which the ranks have stopped."""
    unstoppable: tuple[str, ...]
    """Labels of ranks that not even SIGKILL has ended."""


@dataclass(frozen=True)
class _StopRequest:
    number: signal.Signals


class Supervisor:
    """Runs ranks until the last has ended.

    `run` may be called in any thread, `request_stop` in any thread and in signal handlers. Three threads for each
    rank read its output and wait for its end; all have ended when `run` returns, but for the reader of a pipe that a
    process outside of the rank's group (a daemon) still holds.

    Args:
        specs: What to start, rank 0 first.
        terminal: Where the lines of all ranks go.
        policy: What the end of one rank means for the others.
        orphan_seconds: How long the ranks may take to end where this process has ended without a word.
    """

    def __init__(
        self,
        specs: Sequence[RankSpec],
        terminal: Terminal,
        policy: Policy = stop_all_at_first_failure,
        orphan_seconds: float = GRACE_SECONDS,
    ) -> None:
        self._guard = Guard(orphan_seconds)
        self._specs = specs
        self._terminal = terminal
        self._policy = policy
        # Unlike `queue.Queue`, this one takes a put in a signal handler that interrupts a put or a get.
        self._events: queue.SimpleQueue[RankExit | RankGone | _StopRequest] = queue.SimpleQueue()
        self._ranks: list[RankProcess] = []
        self._here: set[int] = set()  # indices of ranks of which something is left
        self._exits: list[RankExit] = []
        self._requests: list[signal.Signals] = []
        self._stop_all = False

    def request_stop(self, number: signal.Signals) -> None:
        """Asks `run` to stop all ranks: by SIGINT for SIGINT, else by SIGTERM; the second request kills them."""
        self._events.put(_StopRequest(number))

    def abandon(self) -> None:
        """Lets a forked child of this process forget the ranks, which are its parent's."""
        self._guard.abandon()

    def run(self) -> Outcome:
        """Starts all ranks, and returns when nothing of them is left.

        Raises:
            OSError: A command cannot be started; ranks that had started are stopped.
        """
        stopped_at = math.inf
        with self._guard as guard:
            try:
                for index, spec in enumerate(self._specs):
                    self._ranks.append(RankProcess(index, spec, self._terminal, guard, self._events.put))
                    self._here.add(index)
                self._wait(math.inf, lambda: self._stop_all or bool(self._requests))
                self._wait(OWN_END_SECONDS, lambda: bool(self._requests))
            finally:
                stopped_at = time.monotonic()
                self._end_all()
        return self._outcome(stopped_at)

    def _wait(self, seconds: float, until: Callable[[], bool]) -> None:
        """Takes events until the condition holds, the time is over, or nothing of any rank is left."""
        deadline = time.monotonic() + seconds
        while self._here and not until():
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return
            try:
                event = self._events.get(timeout=min(remaining, SLICE_SECONDS))
            except queue.Empty:
                continue
            self._take(event)

    def _take(self, event: RankExit | RankGone | _StopRequest) -> None:
        """Does what an event asks for."""
        if isinstance(event, _StopRequest):
            self._requests.append(event.number)
        elif isinstance(event, RankGone):
            self._here.discard(event.index)
        else:
            self._exits.append(event)
            if self._policy(event) is Reaction.STOP_ALL:
                self._stop_all = True

    def _end_all(self) -> None:
        """Asks what is left to end; kills it when the grace is over, or at the next request."""
        received = len(self._requests)
        interrupted = self._requests[:1] == [signal.SIGINT]
        self._tell(Stop.INTERRUPT if interrupted else Stop.TERMINATE)
        self._wait(ASKED_SECONDS if received else GRACE_SECONDS, lambda: len(self._requests) > received)
        self._tell(Stop.KILL)
        self._wait(KILLED_SECONDS, lambda: False)
        for rank in self._ranks:
            rank.join(0.0 if rank.index in self._here else 1.0)

    def _tell(self, how: Stop) -> None:
        for index in self._here:
            self._ranks[index].tell(how)

    def _outcome(self, stopped_at: float) -> Outcome:
        exits = tuple(sorted(self._exits, key=lambda ended: ended.at_seconds))
        words = {rank.index: rank.last_words() for rank in self._ranks}
        own = [ended for ended in exits if ended.at_seconds < stopped_at]
        first = find_first_failure(own, words)
        return Outcome(
            exits=exits,
            first_failure=first,
            last_words=words[first.index] if first else None,
            stopped_by=self._requests[0] if self._requests else None if first else find_stop(own),
            unstoppable=tuple(rank.label for rank in self._ranks if rank.index not in {each.index for each in exits}),
        )


def _lines_of(*kinds: type[errors.CyxtrainError]) -> re.Pattern[bytes]:
    """Returns what finds the line of a traceback that tells of such an error."""
    names = b"|".join(kind.__name__.encode() for kind in kinds)
    # PyTorch puts "[rank0]: " before each line of a traceback, once for each group that a program has made.
    return re.compile(rb"^(?:\[rank\d+\]: *)*(?:\w+\.)*(?:%s)\b" % names, re.MULTILINE)


_BLAMES_ANOTHER = _lines_of(*errors.BLAMING_ANOTHER)
_COMES_AGAIN = _lines_of(errors.ConfigError, errors.BackendUnavailableError, errors.NonFiniteError)


_STOPS = {128 + number: number for number in (signal.SIGINT, signal.SIGTERM)}
"""By exit code: the signals with which somebody stops a rank, whether it dies of them or leaves in good order."""


def find_first_failure(exits: Sequence[RankExit], last_words: Mapping[int, bytes | None]) -> RankExit | None:
    """Returns the failure that caused the others, out of those that came before we stopped anything.

    It is the earliest one of a rank whose last words hold no line with an error about the other ranks; where all
    have such a line, the earliest. The clock alone would not do: a rank that raises tells the others, and then takes
    its time to leave the interpreter; one of those that it told may be gone before. Where somebody has stopped a
    rank, and no other has an error of its own, nothing has failed.

    Args:
        exits: In the order of time.
        last_words: The end of each rank's stderr, by index.
    """
    failures = [ended for ended in exits if ended.code != 0 and ended.code not in _STOPS]
    own = [ended for ended in failures if not _BLAMES_ANOTHER.search(last_words[ended.index] or b"")]
    return next(iter(own if find_stop(exits) else own or failures), None)


def comes_again(outcome: Outcome) -> bool:
    """Returns whether ranks that are started again would fail in the same way, as far as their last words tell."""
    raised = outcome.first_failure is not None and outcome.first_failure.killed_by is None
    _, _, last = (outcome.last_words or b"").rpartition(b"Traceback (most recent call last)")
    return raised and bool(_COMES_AGAIN.search(last))


def find_stop(exits: Sequence[RankExit]) -> signal.Signals | None:
    """Returns the signal by which the first rank that somebody has stopped has ended; None: there is no such rank."""
    return next((_STOPS[ended.code] for ended in exits if ended.code in _STOPS), None)
