"""Runs functions as the ranks of a world, in real processes that do not import torch anew.

A server imports everything once and is forked for each rank: a world of two costs 0.2 s instead of 4 s, so that each
claim can have its own. It outlives the tests, as the server of multiprocessing that it is; tests that run ranks use
the fixture `rank_server`. `worlds.py` starts processes from nothing, also scripts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch
from worlds import free_port

import cyxtrain as cx

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["preloaded"])
OURS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "DISTRIBUTED_BACKEND")
SECONDS = 30.0


def start_server() -> None:
    """Start the server, before the first test looks what is there."""
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
    left: str = ""

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
    started = [start_serving(function, variables, arguments) for variables in environments]
    ends, processes = [end for end, _ in started], [process for _, process in started]
    try:
        return collect(ends, seconds)
    finally:
        end_processes(ends, processes)


def start_serving(
    function: Callable[..., Any], variables: dict[str, str], arguments: tuple[Any, ...]
) -> tuple[Connection, ForkServerProcess]:
    """Start a process that calls `function(*arguments)`; return the end of the connection for `collect`, too."""
    return start_process(_serve, variables, (function.__module__, function.__qualname__), arguments)


def start_process(
    target: Callable[..., None], variables: dict[str, str], *arguments: Any, duplex: bool = False
) -> tuple[Connection, ForkServerProcess]:
    """Start `target(connection, variables, *arguments)` in a process; return the other end of its connection, too."""
    ours, theirs = _CONTEXT.Pipe(duplex=duplex)
    process = _CONTEXT.Process(target=target, args=(theirs, variables, *arguments), daemon=True)
    process.start()
    theirs.close()
    return ours, process


def end_processes(ends: list[Connection], processes: list[ForkServerProcess]) -> None:
    """Wait until processes have ended, kill those that have not soon, and close the connections to them."""
    for process in processes:
        process.join(2)
        process.kill()
        process.join()
        process.close()
    for end in ends:
        end.close()


def run_ranks(
    world_size: int, function: Callable[..., Any], *arguments: Any, seconds: float = SECONDS, **variables: str
) -> list[Ended]:
    """Calls `function(*arguments)` as every rank of a world, which it has to join by itself."""
    port = free_port()
    environments = [environment(rank, world_size, port, **variables) for rank in range(world_size)]
    return run_processes(function, environments, *arguments, seconds=seconds)


def values(outcomes: Sequence[Ended]) -> list[Any]:
    """What the ranks returned; where one failed, its traceback."""
    failed = [f"rank {ended.rank}:\n{ended.traceback}" for ended in outcomes if ended.error is not None]
    assert not failed, "\n".join(failed)
    return [ended.value for ended in outcomes]


def collect(ends: list[Connection], seconds: float) -> list[Ended]:
    """Return how each rank ended, or what it returned; fail where one takes more than so many seconds."""
    began, outcomes = time.monotonic(), {}
    left = {end: rank for rank, end in enumerate(ends)}
    while left:
        ready = wait(list(left), max(began + seconds - time.monotonic(), 0))
        for end in ready:
            assert isinstance(end, Connection)
            rank = left.pop(end)
            try:
                ended = end.recv()
            except (EOFError, ConnectionResetError):
                ended = Ended(0, error={"type": "Killed", "message": ""}, traceback="ended without a word")
            ended.rank, ended.seconds = rank, time.monotonic() - began
            outcomes[rank] = ended
        if not ready:
            raise AssertionError(f"ranks {sorted(left.values())} did not end in {seconds} s; the others: {outcomes}")
    return [outcomes[rank] for rank in sorted(outcomes)]


def _serve(end: Connection, variables: dict[str, str], name: tuple[str, str], arguments: tuple[Any, ...]) -> None:
    """Runs in the process of a rank."""
    become(variables)
    try:
        ended = Ended(0, value=call(name, arguments))
    except BaseException as error:
        ended = failed(error)
    end.send(ended)


def become(variables: dict[str, str]) -> None:
    """Make this process a rank."""
    for variable in OURS:
        os.environ.pop(variable, None)
    os.environ.update(variables)
    # A rank may start a DataLoader's workers, which multiprocessing refuses to daemons.
    vars(multiprocessing.current_process())["_config"]["daemon"] = False
    # The default, as in a program that a user starts: with the inherited one, each rank would start a fork server.
    multiprocessing.set_start_method(None, force=True)
    torch.set_num_threads(1)


def failed(error: BaseException) -> Ended:
    """Describe the error that is being handled."""
    facts = error.to_facts() if isinstance(error, cx.CyxtrainError) else {}
    facts = {"type": type(error).__name__, "message": str(error)} | facts
    return Ended(0, error=facts, traceback=traceback.format_exc())


def call(name: tuple[str, str], arguments: tuple[Any, ...]) -> Any:
    """Call a function, and what `on_ranks` made a test of within a world."""
    function = getattr(importlib.import_module(name[0]), name[1])
    program = vars(function).get("program")
    if program is None:
        return function(*arguments)
    with contextlib.nullcontext() if cx.is_initialized() else cx.init():
        return program(*arguments)
