"""Which rank waits for which, so that errors and warnings name the rank that blocks all others.

No sockets and no threads: its methods are called with what happened, and when.
"""

from __future__ import annotations

from dataclasses import dataclass

WARN_SECONDS = 30.0
"""Waiting time after which a rank warns; again after twice the time, and so on."""
MESSAGES = 0
"""The sequence number of a wait for a message instead of a collective."""
NOBODY = -1
_ANSWER_SECONDS = 3.0
"""Seconds that a rank may take to report its current activity."""


@dataclass
class _Wait:
    """A wait of one thread of this rank."""

    sequence: int
    peer: int
    operation: str
    since: float
    warn_seconds: float
    asked: float | None = None
    """When the peer was asked for its current activity; None: not since the last warning."""


class WaitGraph:
    """The waits of this rank, and the waits that other ranks have reported. Ranks are global."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._own: dict[int, _Wait] = {}
        self._others: dict[int, tuple[int, int]] = {}

    def begin(self, thread: int, sequence: int, peer: int, operation: str, since: float) -> None:
        """Note that a thread of this rank waits."""
        self._own[thread] = _Wait(sequence, peer, operation, since, WARN_SECONDS)

    def end(self, thread: int) -> None:
        """Note that a thread no longer waits."""
        self._own.pop(thread, None)

    def peer_waits(self, other: int, sequence: int, peer: int) -> None:
        """Note another rank's report that it waits for `peer`, in a collective or for a message."""
        if peer == NOBODY:
            self._others.pop(other, None)
        else:
            self._others[other] = (sequence, peer)

    def find_straggler(self, sequence: int, peer: int) -> int:
        """Return the slow rank: the end of the chain of waits that begins with `peer`."""
        seen = {self._rank}
        straggler = peer
        while straggler not in seen:
            seen.add(straggler)
            reported, waits_for = self._others.get(straggler, (-1, NOBODY))
            if reported not in (sequence, MESSAGES):  # it waits for nobody, or reported an earlier wait
                return straggler
            straggler = waits_for
        return peer  # they wait in a circle

    def question(self, now: float) -> int | None:
        """Return a rank to ask now for its current activity, or None; only ranks that wait for it directly ask."""
        for wait in self._own.values():
            is_due = wait.asked is None and now - wait.since >= wait.warn_seconds
            if is_due and self.find_straggler(wait.sequence, wait.peer) == wait.peer:
                wait.asked = now
                return wait.peer
        return None

    def answered(self, other: int, activity: str, now: float) -> str | None:
        """Return the warning about a rank that has answered; None if nothing waits for it any more."""
        for wait in self._own.values():
            if wait.asked is not None and wait.peer == other:
                return self._warning(wait, f"It reports: {activity}.", now)
        return None

    def unanswered(self, now: float) -> str | None:
        """Return the warning about a rank that was asked and does not answer, or None."""
        for wait in self._own.values():
            if wait.asked is not None and now - wait.asked >= _ANSWER_SECONDS:
                return self._warning(wait, "It does not answer: one call in it may hold the GIL.", now)
        return None

    def _warning(self, wait: _Wait, answer: str, now: float) -> str:
        wait.asked = None
        wait.warn_seconds *= 2
        return (
            f"rank {self._rank} has waited {now - wait.since:.0f} s for rank {wait.peer} in {wait.operation}. {answer} "
            "It is slow, not lost: the wait ends at the deadline (collective_timeout_ms)."
        )
