"""What the wire needs to know and report about failures; `monitoring` implements it."""

from __future__ import annotations

import contextlib
from typing import Protocol

from cyxtrain.errors import CyxtrainError
from cyxtrain.ring.wire.frames import Numbered


class PeerFailures(Protocol):
    """The failures of a group's ranks; see `PeerMonitor` for each method."""

    rank: int
    is_raised: bool

    def fail(self, error: CyxtrainError) -> CyxtrainError:
        """End the group because of an error, unless it has failed; return the first error."""

    def explain(self, peer: int, reason: str) -> CyxtrainError:
        """Return why the link to a rank broke."""

    def has_left(self, peer: int) -> bool:
        """Return whether a rank whose link has ended said goodbye."""

    def is_over(self, peer: int) -> bool:
        """Return whether nothing more will arrive from a rank."""

    def waiting(self, operation: Numbered, peer: int, since: float) -> contextlib.AbstractContextManager[None]:
        """Report, within, that this rank has been waiting for another one for long."""

    def blame(self, sequence: int, peer: int) -> int:
        """Return the rank that all wait for in the end."""
