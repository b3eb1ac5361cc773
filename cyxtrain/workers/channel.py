"""What a pool and its workers say to each other, over a local connection on which both prove who they are.

    worker: its rank                        once, when it is there
    pool:   Job                             what to do; then
    worker: Report, Report, ... Answer      how it goes, how it went; then
    pool:   Done                            what the answer refers to is not needed any more
    pool:   Signal                          at any time: what a worker shall take for a signal

The connection is the standard library's (`multiprocessing.connection`): a socket in a folder that only this user may
enter, or a named pipe on Windows, and a challenge with a key (HMAC) in both directions.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

__all__ = ["Answer", "Client", "Connection", "Done", "Door", "Job", "Report", "Signal"]


@dataclass(frozen=True)
class Job:
    """What a worker shall do.

    Attributes:
        function: Of a module; called with the arguments and, as the last one, what takes reports, it returns (what is
            to be answered, whether the worker can go on).
        arguments: What pickle takes.
        mark: What the worker writes to stdout and stderr when it is done: nothing that it has written is still on its
            way when all marks have come.
    """

    function: Callable[..., tuple[Any, bool]]
    arguments: tuple[Any, ...]
    mark: bytes


@dataclass(frozen=True)
class Report:
    """What a job wants to be known meanwhile."""

    value: Any


@dataclass(frozen=True)
class Answer:
    """What the function has returned."""

    value: Any
    can_go_on: bool


@dataclass(frozen=True)
class Done:
    """The answer has been taken in."""


@dataclass(frozen=True)
class Signal:
    """A signal has reached the pool's process, and is the workers' too."""

    number: int


class Door:
    """Where workers come in; nothing of it is left when the last one has.

    Args:
        key: What they must know.

    Attributes:
        address: Where they find it.
    """

    def __init__(self, key: bytes) -> None:
        self._folder = None if sys.platform == "win32" else tempfile.mkdtemp(prefix="cyxtrain-")
        place = None if self._folder is None else os.path.join(self._folder, "door")
        self._listener = Listener(place, "AF_PIPE" if place is None else "AF_UNIX", backlog=64, authkey=key)
        self._key = key
        self.address = self._listener.address

    def accept(self) -> Connection[Any, Any]:
        """Returns the next connection of somebody who knows the key.

        Raises:
            Exception: Somebody else came.
        """
        return self._listener.accept()

    def wake(self) -> None:
        """Lets somebody who waits in `accept` have one connection more, which has ended."""
        with contextlib.suppress(Exception):
            Client(self.address, authkey=self._key).close()

    def close(self) -> None:
        """Takes it away."""
        self._listener.close()
        if self._folder is not None:
            with contextlib.suppress(OSError):
                os.rmdir(self._folder)
