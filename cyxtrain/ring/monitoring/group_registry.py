"""The groups of one world. What one of them learns matters to the others: a rank that has ended has ended for all."""

from __future__ import annotations

import os
import sys
import time
import weakref
from typing import Protocol

from cyxtrain.errors import CyxtrainError

_LOOK_SECONDS = 0.001


class RegisteredMember(Protocol):
    """A group."""

    def loss(self, since: float) -> CyxtrainError | None:
        """Returns the error of a group that lost a rank, if it still stands, or did so after `since`."""

    def abandon(self) -> None:
        """Lets go of every connection without a word."""


class GroupRegistry:
    """The groups of one world in this process, for as long as somebody holds them."""

    def __init__(self) -> None:
        self._groups: weakref.WeakSet[RegisteredMember] = weakref.WeakSet()

    def add(self, group: RegisteredMember) -> None:
        """Takes note of a group."""
        self._groups.add(group)
        _alive.add(group)

    def loss(self, since: float) -> CyxtrainError | None:
        """Returns which rank one of the groups has lost, or None.

        Args:
            since: In seconds of `time.monotonic`: a group that was left before has nothing to say.
        """
        losses = (group.loss(since) for group in list(self._groups))
        return next((loss for loss in losses if loss is not None), None)

    def await_loss(self, seconds: float) -> CyxtrainError | None:
        """Returns `loss` from now on, for which it waits for a moment if there are groups that may hear of one."""
        since = time.monotonic()
        until = since + seconds
        while (loss := self.loss(since)) is None and self._groups and time.monotonic() < until:
            time.sleep(_LOOK_SECONDS)
        return loss


_alive: weakref.WeakSet[RegisteredMember] = weakref.WeakSet()


def _abandon_all() -> None:
    for group in list(_alive):
        group.abandon()


if sys.platform != "win32":
    # A child (a DataLoader's worker, say) that kept the links open would hide the death of its parent.
    os.register_at_fork(after_in_child=_abandon_all)
