"""A step as a transaction: what it changes besides parameters is put back if it is not taken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

Undo = Callable[[], None]


class Participant(Protocol):
    """What a step changes before the optimizer steps."""

    def keep(self) -> Undo:
        """Return what puts back the present state."""


class StepTransaction:
    """What steps change, as it was before the running one.

    The verdict on a step comes before its optimizer steps, or the device skips that: parameters need no copy.

    Args:
        buffers: Those of the model, which a forward changes.
        others: What is put back as well if the step is not taken at all: what it has logged; if the verdict comes a
            step late, what has followed the step.
    """

    def __init__(self, buffers: Participant | None = None, others: Sequence[Participant] = ()) -> None:
        self._buffers = buffers
        self._others = others
        # puts back the buffers alone: the numbers of a step are right, or it continues
        self.put_back_buffers: Undo = _nothing
        self._undo_others: list[Undo] = []

    def begin(self) -> None:
        """Begin a step."""
        self.put_back_buffers = _nothing if self._buffers is None else self._buffers.keep()
        self._undo_others = [each.keep() for each in self._others]

    def roll_back(self) -> None:
        """Put back everything."""
        self.kept_undo()()

    def kept_undo(self) -> Undo:
        """Return what puts back everything that the running step changes, also when the next step has begun."""
        undo = [self.put_back_buffers, *self._undo_others]

        def put_back() -> None:
            for each in undo:
                each()

        return put_back


def _nothing() -> None:
    pass
