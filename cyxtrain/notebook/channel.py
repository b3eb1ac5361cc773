"""What a pool and its workers say to each other, over a connection that nobody else can reach.

    worker: Here                            once, when it is there
    pool:   Job                             what to do; then
    worker: Report, Report, ... Answer      how it goes, how it went; then
    pool:   Done                            what the answer refers to is not needed any more
    pool:   Signal                          at any time: what a worker shall take for a signal

The connection is a pair of sockets (`multiprocessing.Pipe`), of which a worker inherits one end when it is started: it
has no address, so there is nobody else who could come, and nothing is left of it however its processes end.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from typing import Any, TypeAlias

Channel: TypeAlias = "Connection[Any, Any]"


@dataclass(frozen=True)
class Here:
    """A worker takes jobs."""


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


def pair() -> tuple[Channel, Channel]:
    """Returns the two ends of a new connection: ours, and the one that a worker is given when it is started."""
    return Pipe()


def open_end(handle: int) -> Channel:
    """Returns a worker's end, by the number under which it has inherited it."""
    if sys.platform == "win32":
        from multiprocessing.connection import PipeConnection

        return PipeConnection(handle)
    return Connection(handle)
