"""A notebook's worker: one rank, which waits for jobs, and ends with the process that has started it."""

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
from types import FrameType
from typing import Any

from cyxtrain.environment import process_env
from cyxtrain.notebook.channel import Answer, Channel, Done, Here, Job, Report, Signal, open_end
from cyxtrain.world import runtime

NAME = "cyxtrain worker"
_PR_SET_NAME = 15
_IDLE_SECONDS = 0.5


def main() -> None:
    """Joins the world of workers, and does what comes, until the other side is gone."""
    _call_myself(NAME)
    settings = json.loads(process_env.take_worker_channel())
    connection = open_end(settings["channel"])
    jobs: queue.SimpleQueue[Job | Done] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(connection, jobs), name="the notebook", daemon=True).start()
    # What is meant for a fit, it hears itself; what comes too late for it is nothing to anybody.
    signal.signal(signal.SIGINT, _ignore)
    runtime.init()
    connection.send(Here())
    while True:
        try:
            message = jobs.get(timeout=_IDLE_SECONDS)
        except queue.Empty:
            gc.collect()  # what refers to itself; it takes as long as a small job
            message = jobs.get()
        _do(message, connection)


def _do(message: Job | Done, connection: Channel) -> None:
    """Does a job, and keeps what the answer refers to until it has been taken in: by the next message."""
    if isinstance(message, Job):
        value, can_go_on = message.function(*message.arguments, lambda value: connection.send(Report(value)))
        _kept[:] = [value]
        for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
            with contextlib.suppress(AttributeError, ValueError, OSError):  # its user has closed it, or has none
                stream.flush()
            with contextlib.suppress(OSError):
                os.write(number, message.mark)
        connection.send(Answer(value, can_go_on))
    else:
        _kept.clear()


_kept: list[Any] = []


def _listen(connection: Channel, jobs: queue.SimpleQueue[Job | Done]) -> None:
    """Takes what the other side says; ends this process when that has ended, whatever goes on here."""
    try:
        while True:
            message = connection.recv()
            if isinstance(message, Signal) and sys.platform == "win32":
                _thread.interrupt_main(message.number)
            elif isinstance(message, Signal):
                os.kill(os.getpid(), message.number)
            else:
                jobs.put(message)
    except BaseException:
        os._exit(0)


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """A handler, so that others may hear the signal; to ignore it would keep it from them."""


def _call_myself(name: str) -> None:
    """Shows a name in the list of processes, where the system has one; elsewhere it is among the arguments."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
