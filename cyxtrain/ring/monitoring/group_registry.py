"""The groups of one world in this process: if one of them has lost a rank, all have."""

from __future__ import annotations

import os
import sys
import time
import weakref
from typing import Protocol

from cyxtrain.errors import CyxtrainError
from cyxtrain.ring.wire.link import Deadline


class RegisteredMember(Protocol):
    """A group that can be registered."""

    def peer_failure(self, since: float) -> CyxtrainError | None:
        """Return the error of a group that lost a rank, unless it failed before `since` and this rank has left it."""

    def abandon(self) -> None:
        """Close every connection without telling the peers."""


class GroupRegistry:
    """Weak references to the groups of one world."""

    def __init__(self) -> None:
        self._groups: weakref.WeakSet[RegisteredMember] = weakref.WeakSet()

    def add(self, group: RegisteredMember) -> None:
        """Register a group."""
        self._groups.add(group)
        _alive.add(group)

    def peer_failure(self, since: float) -> CyxtrainError | None:
        """Return the error of a group that has lost a rank, or None; see `RegisteredMember.peer_failure`."""
        for group in list(self._groups):  # a copy: another thread may add a group meanwhile
            failure = group.peer_failure(since)
            if failure is not None:
                return failure
        return None

    def await_peer_failure(self, seconds: float) -> CyxtrainError | None:
        """Wait up to `seconds` until a group loses a rank, and return its error; None if no group does."""
        since = time.monotonic()
        Deadline(seconds).poll_until(lambda: self.peer_failure(since) or not self._groups)
        return self.peer_failure(since)


WORLD_GROUPS = GroupRegistry()
"""The groups that PyTorch makes: it has one world per process."""
_alive: weakref.WeakSet[RegisteredMember] = weakref.WeakSet()


def _abandon_all() -> None:
    for group in list(_alive):
        group.abandon()


if sys.platform != "win32":
    # A forked child (such as a DataLoader worker) that kept the links open would hide the death of its parent.
    os.register_at_fork(after_in_child=_abandon_all)
