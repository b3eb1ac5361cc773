"""Who waits for whom, so that an error or a warning names the rank that holds all up.

No sockets and no threads: it is told what happened, and when.
"""

from __future__ import annotations

from dataclasses import dataclass

WARN_SECONDS = 30.0
"""After this time somebody who waits for a rank warns about it; again after twice the time, and so on."""
MESSAGES = 0
"""The number of a wait that is for a message and not in a collective."""
NOBODY = -1
_ANSWER_SECONDS = 3.0
"""How long a rank may take to say what it does."""


@dataclass
class _Wait:
    """What this rank waits for.

    Attributes:
        sequence: Number of the collective, or `MESSAGES`.
        peer: The rank.
        text: The collective, for people.
        since: Seconds of `time.monotonic`.
        warn_seconds: After which time to warn.
        asked: When the rank was asked what it does; None: not since the last warning.
    """

    sequence: int
    peer: int
    text: str
    since: float
    warn_seconds: float
    asked: float | None = None


class WaitGraph:
    """What this rank waits for, and what it was told that others wait for.

    Args:
        rank: This rank, as errors name it.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._own: dict[int, _Wait] = {}
        self._others: dict[int, tuple[int, int]] = {}

    def begin(self, thread: int, sequence: int, peer: int, text: str, since: float) -> None:
        """A thread of this rank waits."""
        self._own[thread] = _Wait(sequence, peer, text, since, WARN_SECONDS)

    def end(self, thread: int) -> None:
        """It waits no more."""
        self._own.pop(thread, None)

    def told(self, other: int, sequence: int, peer: int) -> None:
        """Another rank has said that it waits for `peer`, in the collective of that number or for a message."""
        if peer == NOBODY:
            self._others.pop(other, None)
        else:
            self._others[other] = (sequence, peer)

    def blame(self, sequence: int, peer: int) -> int:
        """Returns whom all wait for in the end, where this rank waits for `peer`, and `peer` perhaps for another."""
        seen, found = {self._rank}, peer
        while found not in seen:
            seen.add(found)
            number, waits_for = self._others.get(found, (-1, NOBODY))
            if number not in (sequence, MESSAGES):
                return found
            found = waits_for
        return peer  # they wait in a circle: nobody is more to blame than the next

    def question(self, now: float) -> int | None:
        """Returns the rank to ask now what it does: only those warn who wait for the slow rank directly."""
        for wait in self._own.values():
            due = wait.asked is None and now - wait.since >= wait.warn_seconds
            if due and self.blame(wait.sequence, wait.peer) == wait.peer:
                wait.asked = now
                return wait.peer
        return None

    def answered(self, other: int, doing: str, now: float) -> str | None:
        """Returns the warning about a rank that has said what it does; None where nobody waits for it any more."""
        for wait in self._own.values():
            if wait.asked is not None and wait.peer == other:
                return self._warning(wait, f"It says: {doing}.", now)
        return None

    def unanswered(self, now: float) -> str | None:
        """Returns the warning about a rank that was asked and does not answer; None where there is none."""
        for wait in self._own.values():
            if wait.asked is not None and now - wait.asked >= _ANSWER_SECONDS:
                return self._warning(wait, "It does not answer: one call in it may keep Python's lock (GIL).", now)
        return None

    def _warning(self, wait: _Wait, answer: str, now: float) -> str:
        wait.asked, wait.warn_seconds = None, 2 * wait.warn_seconds
        return (
            f"rank {self._rank} has waited {now - wait.since:.0f} s for rank {wait.peer} in {wait.text}. {answer} "
            "It is slow, not lost: nothing ends before the deadline (collective_timeout_ms)."
        )
