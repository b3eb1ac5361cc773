"""Worlds that stay joined from one test of a module to its next: for claims that are not about joining and ending.

A separate world costs a test 0.15 to 0.25 s of CPU time, and one more task for a joined world a tenth of that.
A world takes no other task where one failed or left something behind: the next test then has a new one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import random
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import leaks
import numpy as np
import pytest
import torch
import torch.distributed as dist
from rank_processes import (
    SECONDS,
    Ended,
    become,
    call,
    collect,
    end_processes,
    environment,
    failed,
    start_process,
    values,
)
from worlds import free_port

import cyxtrain as cx

_worlds: dict[tuple[int, str], _World] = {}


def run_kept(
    world_size: int, function: Callable[..., Any], *arguments: Any, backend: str = "", seconds: float = 60.0
) -> list[Ended]:
    """Call `function(*arguments)` as every rank of a world that stays, from the module's first such call to its end."""
    world = _worlds.pop((world_size, backend), None)
    if world is not None and not world.is_alive():
        world.close()
        world = None
    world = world or _World(world_size, backend)
    try:
        outcomes = world.run((function.__module__, function.__qualname__), arguments, seconds)
    except BaseException:
        world.close()
        raise
    if any(ended.error is not None or ended.left for ended in outcomes):
        world.close()
    else:
        _worlds[world_size, backend] = world
    return outcomes


def on_ranks(*world_sizes: Any, backend: str = "cpu", seconds: float = SECONDS) -> Callable[[Any], Any]:
    """Make a test of a function without arguments: it runs as every rank of a world of each size."""

    def decorate(program: Callable[[], Any]) -> Any:
        @pytest.mark.parametrize("world_size", world_sizes)
        def test(world_size: int) -> None:
            values(run_kept(world_size, test, backend=backend, seconds=seconds))

        test.__name__, test.__qualname__, test.__doc__ = program.__name__, program.__qualname__, program.__doc__
        test.__module__ = program.__module__
        vars(test)["program"] = program
        return test

    return decorate


def close_worlds() -> None:
    """End the worlds that have stayed."""
    while _worlds:
        _worlds.popitem()[1].close()


class _World:
    """The processes of a world's ranks, which call one function after another."""

    def __init__(self, world_size: int, backend: str) -> None:
        port = free_port()
        more = {"DISTRIBUTED_BACKEND": backend} if backend else {}
        with leaks.kept():
            started = [
                start_process(_serve_tasks, environment(rank, world_size, port, **more), duplex=True)
                for rank in range(world_size)
            ]
        self._ends, self._processes = [end for end, _ in started], [process for _, process in started]

    def is_alive(self) -> bool:
        # One that waits for its next task says nothing: what can be read is its end, also before it has been reaped.
        return not any(end.poll() for end in self._ends)

    def run(self, name: tuple[str, str], arguments: tuple[Any, ...], seconds: float) -> list[Ended]:
        # Not `send`: PyTorch would share the memory of tensors, for which multiprocessing starts a thread that stays.
        task = pickle.dumps((name, arguments, os.getcwd()))
        for end in self._ends:
            with contextlib.suppress(BrokenPipeError):  # `collect` finds that it has ended
                end.send_bytes(task)
        return collect(self._ends, seconds)

    def close(self) -> None:
        for end in self._ends:
            with contextlib.suppress(BrokenPipeError):
                end.send(None)
        end_processes(self._ends, self._processes)


def _serve_tasks(end: Connection, variables: dict[str, str]) -> None:
    """Run in the process of a rank."""
    become(variables)
    try:
        with cx.init():
            before = _State.now()
            while (task := _next_task(end)) is not None:
                name, arguments, folder = task
                os.chdir(folder)
                began = time.monotonic()
                with warnings.catch_warnings():
                    value = call(name, arguments)
                left = before.left_behind()
                if cx.is_initialized():
                    left = _left_of_the_world() or left
                before.restore()
                end.send(Ended(0, value=value, left=left, seconds=time.monotonic() - began))
    except BaseException as error:
        end.send(failed(error))


def _left_of_the_world() -> str:
    """Meet the other ranks; where a task has ended the group, leave it, which fails as the end of its world would."""
    try:
        cx.barrier()
    except cx.CyxtrainError as error:
        cx.finalize()
        return f"a group that has failed: {error}"
    return ""


def _next_task(end: Connection) -> Any:
    try:
        return end.recv()
    except EOFError:
        return None  # the tests have ended


@dataclasses.dataclass(frozen=True)
class _State:
    """What a task finds in its process."""

    variables: dict[str, str]
    threads: Counter[str]
    groups: int
    random: tuple[Any, Any, Any]

    @classmethod
    def now(cls) -> _State:
        generators = (torch.get_rng_state(), np.random.get_state(), random.getstate())
        return cls(dict(os.environ), _threads(), _groups(), generators)

    def restore(self) -> None:
        """Bring back what a task may change without harm."""
        os.chdir("/")
        os.environ.clear()
        os.environ.update(self.variables)
        torch.set_rng_state(self.random[0])
        np.random.set_state(self.random[1])
        random.setstate(self.random[2])
        torch.set_num_threads(1)
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)

    def left_behind(self) -> str:
        """Return what a task has left, for which the world takes no other."""
        if not cx.is_initialized():
            return "no world"
        threads = leaks.what_stays(lambda: _threads() - self.threads, time.monotonic() + 1.0)
        groups = _groups() - self.groups
        return f"threads {threads}, {groups} groups" if threads or groups else ""


def _threads() -> Counter[str]:
    return Counter(thread.name for thread in threading.enumerate())


def _groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)
