"""Runs functions as the ranks of a world, in real processes that do not import torch anew.

A server imports everything once and is forked for each rank: a world of two costs 0.2 s instead of 4 s, so that each
claim can have its own. It outlives the tests, as the server of multiprocessing that it is; tests that run ranks use
the fixture `rank_server`. `worlds.py` starts processes from nothing, also scripts.
"""

from __future__ import annotations

import dataclasses
import importlib
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
from worlds import free_port

import cyxtrain as cx

_CONTEXT = multiprocessing.get_context("forkserver")
# The last one is what optimizers import when they first step.
_CONTEXT.set_forkserver_preload(
    ["cyxtrain", "pytest", "torch.testing._comparison", "sklearn.metrics", "torchmetrics", "torch._dynamo"]
)
OURS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "DISTRIBUTED_BACKEND")
SECONDS = 30.0


@pytest.fixture(scope="session")
def rank_server() -> None:
    """Starts the server, before the first test looks what is there."""
    start_server()


def start_server() -> None:
    """Does as the fixture."""
    home = Path.cwd()
    os.chdir(Path(__file__).parent)  # it imports what lies in its working folder before what is installed
    try:
        first = _CONTEXT.Process(target=os.getpid)
        first.start()
        first.join()  # only now it has imported everything
        first.close()
    finally:
        os.chdir(home)


@dataclasses.dataclass
class Ended:
    """How one rank ended: with the value that its function returned, with an error, or without a word."""

    rank: int
    value: Any = None
    error: dict[str, Any] | None = None
    traceback: str = ""
    seconds: float = 0.0

    @property
    def kind(self) -> str | None:
        """The name of the error's class."""
        return None if self.error is None else self.error["type"]

    @property
    def message(self) -> str:
        return "" if self.error is None else self.error["message"]


def environment(rank: int, world_size: int, port: int, **more: str) -> dict[str, str]:
    """What a launcher would set."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    } | more


def run_processes(
    function: Callable[..., Any], environments: Sequence[dict[str, str]], *arguments: Any, seconds: float = SECONDS
) -> list[Ended]:
    """Calls `function(*arguments)` in a process for each environment; nothing outlives the call.

    The function is found by its name: it must be at the top of its module.
    """
    ends, processes = [], []
    for variables in environments:
        ours, theirs = _CONTEXT.Pipe(duplex=False)
        name = (function.__module__, function.__qualname__)
        process = _CONTEXT.Process(target=_serve, args=(theirs, name, variables, arguments), daemon=True)
        process.start()
        theirs.close()
        ends.append(ours)
        processes.append(process)
    try:
        return _collect(ends, seconds)
    finally:
        for process in processes:
            process.join(2)
            process.kill()
            process.join()
            process.close()
        for end in ends:
            end.close()


def run_ranks(world_size: int, function: Callable[..., Any], *arguments: Any, seconds: float = SECONDS) -> list[Ended]:
    """Calls `function(*arguments)` as every rank of a world, which it has to join by itself."""
    port = free_port()
    return run_processes(
        function, [environment(rank, world_size, port) for rank in range(world_size)], *arguments, seconds=seconds
    )


def on_ranks(*world_sizes: int, backend: str = "cpu", seconds: float = SECONDS) -> Callable[[Any], Any]:
    """Makes a test of a function without arguments: it runs as every rank of a world of each size."""

    def decorate(program: Callable[[], Any]) -> Any:
        @pytest.mark.parametrize("world_size", world_sizes)
        def test(world_size: int) -> None:
            port = free_port()
            environments = [
                environment(rank, world_size, port, DISTRIBUTED_BACKEND=backend) for rank in range(world_size)
            ]
            values(run_processes(test, environments, seconds=seconds))

        test.__name__, test.__qualname__, test.__doc__ = program.__name__, program.__qualname__, program.__doc__
        test.__module__ = program.__module__
        vars(test)["program"] = program
        return test

    return decorate


def values(outcomes: Sequence[Ended]) -> list[Any]:
    """What the ranks returned; where one failed, its traceback."""
    failed = [f"rank {ended.rank}:\n{ended.traceback}" for ended in outcomes if ended.error is not None]
    assert not failed, "\n".join(failed)
    return [ended.value for ended in outcomes]


def _collect(ends: list[Connection], seconds: float) -> list[Ended]:
    began, outcomes = time.monotonic(), {}
    left = {end: rank for rank, end in enumerate(ends)}
    while left:
        ready = wait(list(left), max(began + seconds - time.monotonic(), 0))
        for end in ready:
            assert isinstance(end, Connection)
            rank = left.pop(end)
            try:
                ended = end.recv()
            except EOFError:
                ended = Ended(0, error={"type": "Killed", "message": ""}, traceback="ended without a word")
            ended.rank, ended.seconds = rank, time.monotonic() - began
            outcomes[rank] = ended
        if not ready:
            raise AssertionError(f"ranks {sorted(left.values())} did not end in {seconds} s; the others: {outcomes}")
    return [outcomes[rank] for rank in sorted(outcomes)]


def _serve(end: Connection, name: tuple[str, str], variables: dict[str, str], arguments: tuple[Any, ...]) -> None:
    """Runs in the process of a rank."""
    for variable in OURS:
        os.environ.pop(variable, None)
    os.environ.update(variables)
    # A rank may start a DataLoader's workers, which multiprocessing refuses to daemons.
    vars(multiprocessing.current_process())["_config"]["daemon"] = False
    torch.set_num_threads(1)
    try:
        ended = Ended(0, value=_call(name, arguments))
    except BaseException as error:
        facts = error.to_facts() if isinstance(error, cx.CyxtrainError) else {}
        facts = {"type": type(error).__name__, "message": str(error)} | facts
        ended = Ended(0, error=facts, traceback=traceback.format_exc())
    end.send(ended)


def _call(name: tuple[str, str], arguments: tuple[Any, ...]) -> Any:
    function = getattr(importlib.import_module(name[0]), name[1])
    program = vars(function).get("program")
    if program is None:
        return function(*arguments)
    with cx.init():
        return program(*arguments)
