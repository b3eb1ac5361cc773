"""Which rank waits for which, so that an error or a warning names the rank that all of them wait for.

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
"""How long a rank may take to answer what it is doing."""


@dataclass
class _Wait:
    """A wait of one thread of this rank."""

    sequence: int
    peer: int
    text: str
    since: float
    warn_seconds: float
    asked: float | None = None
    """When the peer was asked what it is doing; None: not since the last warning."""


class WaitGraph:
    """The waits of this rank, and those that other ranks have reported."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._own: dict[int, _Wait] = {}
        self._others: dict[int, tuple[int, int]] = {}

    def begin(self, thread: int, sequence: int, peer: int, text: str, since: float) -> None:
        """Note that a thread of this rank waits."""
        self._own[thread] = _Wait(sequence, peer, text, since, WARN_SECONDS)

    def end(self, thread: int) -> None:
        """Note that it no longer waits."""
        self._own.pop(thread, None)

    def peer_waits(self, other: int, sequence: int, peer: int) -> None:
        """Note that another rank has reported that it waits for `peer`, in that collective or for a message."""
        if peer == NOBODY:
            self._others.pop(other, None)
        else:
            self._others[other] = (sequence, peer)

    def find_straggler(self, sequence: int, peer: int) -> int:
        """Return the slow rank: the end of the chain of waits that begins with `peer`."""
        seen, found = {self._rank}, peer
        while found not in seen:
            seen.add(found)
            number, waits_for = self._others.get(found, (-1, NOBODY))
            if number not in (sequence, MESSAGES):
                return found
            found = waits_for
        return peer  # they wait in a circle

    def question(self, now: float) -> int | None:
        """Return a rank to ask now what it is doing: only ranks that wait for it directly warn."""
        for wait in self._own.values():
            due = wait.asked is None and now - wait.since >= wait.warn_seconds
            if due and self.find_straggler(wait.sequence, wait.peer) == wait.peer:
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
        wait.asked, wait.warn_seconds = None, 2 * wait.warn_seconds
        return (
            f"rank {self._rank} has waited {now - wait.since:.0f} s for rank {wait.peer} in {wait.text}. {answer} "
            "It is slow, not lost: the wait ends at the deadline (collective_timeout_ms)."
        )
