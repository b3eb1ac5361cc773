"""Worlds that stay alive and run one program after another, several worlds at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import importlib
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from rank_processes import Ended, become, collect, end_processes, environment, failed, start_process
from worlds import free_port

import cyxtrain as cx

from . import faults
from .program import Job, Outcome
from .spec import Spec

SECONDS = 90.0
"""For one program; the stacks of all ranks are in the log before."""
TRANSPORTS = ("tcp", "unix")


class Ranks:
    """The processes of a world, started at the first program and anew after an error.

    Args:
        size: Ranks; 0: a process that has joined no world, for a pool.
        folder: For the ranks' output.
        transport: Between them.
        fault: Of `faults.FAULTS`, in every rank.
    """

    def __init__(self, size: int, folder: Path, transport: str = "", fault: str = "") -> None:
        self.size = size
        self.log = folder / f"output of {size} {transport}".strip()
        self._variables = {"CYXTRAIN_TRANSPORT": transport} if transport else {}
        self._fault = fault
        self._ends: list[Connection] = []
        self._processes: list[Any] = []

    def send(self, function: Callable[[Spec, Job], Outcome], spec: Spec, job: Job) -> None:
        """Give a program to all ranks; `collect` returns what it came to."""
        if not self._ends:
            self._start()
        os.makedirs(job.folder, exist_ok=True)
        # Not `send`: PyTorch would share tensors, for which multiprocessing starts a thread that stays.
        task = pickle.dumps((function.__module__, function.__name__, spec, job))
        for end in self._ends:
            with contextlib.suppress(BrokenPipeError):  # `collect` finds that it has ended
                end.send_bytes(task)

    def collect(self) -> list[Ended]:
        """Return how the program ended on each rank."""
        try:
            found = collect(self._ends, SECONDS)
        except AssertionError as error:  # a hang
            self.close()
            facts = {"type": "Hang", "message": f"{error}; the stacks are in {self.log}"}
            return [Ended(rank, error=facts) for rank in range(max(1, self.size))]
        if any(ended.error is not None and ended.kind != "ConfigError" for ended in found):
            self.close()
        return found

    def run(self, function: Callable[[Spec, Job], Outcome], spec: Spec, job: Job) -> list[Ended]:
        self.send(function, spec, job)
        return self.collect()

    def close(self) -> None:
        """End the processes."""
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.send_bytes(pickle.dumps(None))
        end_processes(self._ends, self._processes)
        self._ends, self._processes = [], []

    def _start(self) -> None:
        port = free_port()
        variables = [environment(rank, self.size, port) for rank in range(self.size)]
        for each in variables or [{}]:
            end, process = start_process(
                _serve, each | self._variables, self._fault, str(self.log), self.size > 0, duplex=True
            )
            self._ends.append(end)
            self._processes.append(process)


@dataclasses.dataclass
class Worlds:
    """All the worlds that programs need, each of which is started when a program first needs it."""

    folder: Path
    fault: str = ""

    def __post_init__(self) -> None:
        self.by_size = {size: Ranks(size, self.folder, fault=self.fault) for size in (1, 2, 3)}
        self.by_transport = {name: Ranks(2, self.folder, name, self.fault) for name in TRANSPORTS}
        self.pool = Ranks(0, self.folder, fault=self.fault)

    def __enter__(self) -> Worlds:
        return self

    def __exit__(self, *_: object) -> None:
        for each in (*self.by_size.values(), *self.by_transport.values(), self.pool):
            each.close()


def _serve(end: Connection, variables: dict[str, str], fault: str, log: str, joins: bool) -> None:
    """Run in the process of a rank."""
    become(variables)
    multiprocessing.set_start_method("fork", force=True)  # of a loader's workers: not through the server of ranks
    signal.signal(signal.SIGINT, signal.default_int_handler)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    if fault:
        faults.FAULTS[fault]()
    with cx.init() if joins else contextlib.nullcontext():
        while (task := _next_task(end)) is not None:
            module, name, spec, job = task
            os.chdir(tempfile.gettempdir())
            end.send(_run(getattr(importlib.import_module(module), name), spec, job))
    cx.finalize()


def _run(function: Callable[[Spec, Job], Outcome], spec: Spec, job: Job) -> Ended:
    began = time.monotonic()
    faulthandler.dump_traceback_later(SECONDS - 5)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ended = Ended(0, value=function(spec, job))
    except BaseException as error:
        ended = failed(error)
    finally:
        faulthandler.cancel_dump_traceback_later()
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    ended.seconds = time.monotonic() - began
    return ended


def _next_task(end: Connection) -> Any:
    try:
        return pickle.loads(end.recv_bytes())
    except EOFError:
        return None  # whoever gives the programs has ended
