"""A notebook's worker, a rank that waits for jobs and exits with its notebook, and their messages.

    worker: Ready                           once, when it can take jobs
    pool:   Job                             a function to call
    worker: Report, Report, ... Answer      progress, and the result
    pool:   Signal                          at any time: a signal to raise in the worker

The connection is a pair of sockets (`multiprocessing.Pipe`); a worker inherits one end. It has no address, so nobody
else can connect, and nothing is left of it when its processes end.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import gc
import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

from cyxtrain.environment import process_env
from cyxtrain.world import runtime

NAME = "cyxtrain worker"
_PR_SET_NAME = 15
_IDLE_SECONDS = 0.5

Channel: TypeAlias = "Connection[Any, Any]"


@dataclass(frozen=True)
class Ready:
    """A worker takes jobs."""


@dataclass(frozen=True)
class Job:
    """A function of a module to call with these arguments and, last, a function that takes reports."""

    function: Callable[..., tuple[Any, bool]]
    """Returns (answer, whether the worker can take another job)."""
    arguments: tuple[Any, ...]
    mark: bytes
    """The worker writes it to stdout and stderr at the end: then all earlier output has arrived too."""


@dataclass(frozen=True)
class Report:
    """Progress of a job."""

    value: Any


@dataclass(frozen=True)
class Answer:
    """The result of a job."""

    value: Any
    can_continue: bool


@dataclass(frozen=True)
class Signal:
    """A signal that the notebook has received and passes on."""

    number: int


def main() -> None:
    """Join the workers' world and do jobs until the notebook's process is gone."""
    if sys.platform == "linux":  # shown in the list of processes; elsewhere the arguments show it
        ctypes.CDLL(None).prctl(_PR_SET_NAME, NAME.encode(), 0, 0, 0)
    handle = json.loads(process_env.take_worker_channel())["channel"]
    if sys.platform == "win32":
        from multiprocessing.connection import PipeConnection

        channel: Channel = PipeConnection(handle)
    else:
        channel = Connection(handle)
    jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(channel, jobs), name="the notebook", daemon=True).start()
    # A fit has its own handler; without a fit Ctrl-C does nothing. SIG_IGN would be inherited by child processes.
    signal.signal(signal.SIGINT, lambda number, frame: None)
    runtime.init()
    channel.send(Ready())
    while True:
        try:
            job = jobs.get(timeout=_IDLE_SECONDS)
        except queue.Empty:
            gc.collect()  # reference cycles, while idle: it takes as long as a small job
            job = jobs.get()
        value, can_continue = job.function(*job.arguments, lambda value: channel.send(Report(value)))
        _write_marks(job.mark)
        channel.send(Answer(value, can_continue))
        del job, value


def _write_marks(mark: bytes) -> None:
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        with contextlib.suppress(AttributeError, ValueError, OSError):  # the user's code has closed or removed it
            stream.flush()
        with contextlib.suppress(OSError):  # likewise
            os.write(number, mark)


def _listen(channel: Channel, jobs: queue.SimpleQueue[Job]) -> None:
    """Receive messages; exit at once, even in the middle of a job, when the notebook's process has ended."""
    try:
        while True:
            message = channel.recv()
            if isinstance(message, Signal) and sys.platform == "win32":
                _thread.interrupt_main(message.number)
            elif isinstance(message, Signal):
                os.kill(os.getpid(), message.number)
            else:
                jobs.put(message)
    except BaseException:
        os._exit(0)
