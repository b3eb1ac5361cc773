"""Worlds for tests: ranks as threads of this process, and ranks as processes. Neither leaves anything behind.

Threads are cheap (milliseconds) and see the same memory: right for everything that a group does by itself.
Processes cost about three seconds each, the import of torch: put a whole list of cases into one world.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

import cyxtrain
from cyxtrain.config import RingOptions
from cyxtrain.ring import RingProcessGroup

SUPPORT = Path(__file__).parent
TESTS = SUPPORT.parent
FOLDERS = sorted({path.parent for path in TESTS.rglob("test_*.py")})
"""Where a rank's function may stand."""


# --- ranks as threads -----------------------------------------------------------------------------------------------


def run_threads(
    world_size: int,
    rank_main: Callable[[RingProcessGroup], Any],
    *,
    seconds: float = 30.0,
    collective_seconds: float = 20.0,
    store: dist.Store | None = None,
    options: RingOptions | None = None,
) -> list[Any]:
    """Runs `rank_main(group)` as every rank of a ring, each in a thread with its own group.

    Args:
        world_size: How many ranks.
        rank_main: What each rank does; `group.rank()` and `group.size()` tell who it is. It may leave the group itself.
        seconds: Until the test fails with the stacks of the ranks that have not come back.
        collective_seconds: Deadline of joining and of each collective.
        store: Where the ranks meet; a new HashStore by default.
        options: Of the ring.

    Returns:
        What `rank_main` returned, by rank.

    Raises:
        BaseException: The error that a rank raised first. The other ranks are told, so that they stop too.
    """
    store = dist.HashStore() if store is None else store
    results: list[Any] = [None] * world_size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        group: RingProcessGroup | None = None
        try:
            timeout = timedelta(seconds=collective_seconds)
            group = RingProcessGroup(store, rank, world_size, timeout, options=options)
            results[rank] = rank_main(group)
        except BaseException as error:
            errors.append(error)  # in the order of time
            if group is not None:
                group.fail(f"{type(error).__name__}: {error}")
        finally:
            if group is not None:
                group.shutdown()

    join_threads(
        [threading.Thread(target=run, args=(rank,), name=f"rank {rank}") for rank in range(world_size)], seconds
    )
    if errors:
        raise errors[0]
    return results


def join_threads(threads: Sequence[threading.Thread], seconds: float) -> None:
    """Starts threads and waits for them all; what has not ended after that is shown, with its stack."""
    for thread in threads:
        thread.daemon = True  # a rank that hangs fails its test, and does not keep the interpreter
        thread.start()
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0.0))
    stuck = [thread for thread in threads if thread.is_alive()]
    if not stuck:
        return
    frames = sys._current_frames()
    stacks = [f"{t.name}:\n{''.join(traceback.format_stack(frames[t.ident]))}" for t in stuck if t.ident in frames]
    raise AssertionError(f"still running after {seconds} s:\n" + "\n".join(stacks))


def wait_until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Returns as soon as the condition holds; fails after so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.005)


# --- ranks as processes ---------------------------------------------------------------------------------------------


@dataclasses.dataclass
class RankResult:
    """How one rank ended.

    Attributes:
        rank: Which.
        returncode: As `subprocess` gives it: negative for a signal; None where it was killed by the helper.
        stdout: All of it.
        stderr: All of it.
        value: What its function returned (as JSON types); None for a script, or where it did not return.
    """

    rank: int
    returncode: int | None
    stdout: str
    stderr: str
    value: Any


class Processes:
    """A running world of processes; see `start_processes`.

    Attributes:
        folder: Empty at first, shared by the ranks (the environment variable TEST_FOLDER names it), removed at the end.
        port: MASTER_PORT.
    """

    def __init__(self, folder: Path, port: int, target: Callable[..., Any] | Path, args: Sequence[Any]) -> None:
        self.folder = folder
        self.port = port
        self._target = target
        self._args = args
        self._ranks: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, rank: int, world_size: int, env: dict[str, str]) -> None:
        """Starts one rank. A world may be started with ranks missing, to come later or never."""
        number = len(self._ranks)
        command = [sys.executable, str(self._target), *map(str, self._args)]
        if not isinstance(self._target, Path):
            module = Path(sys.modules[self._target.__module__].__file__ or "")
            command = [
                *(sys.executable, __file__, str(module), self._target.__qualname__),
                *(json.dumps(self._args), str(self.folder / f"value{number}")),
            ]
        variables = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "TEST_FOLDER": str(self.folder)}
        with open(self.folder / f"stdout{number}", "wb") as out, open(self.folder / f"stderr{number}", "wb") as err:
            self._ranks[number] = subprocess.Popen(
                command,
                env=child_environment(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(self.port)) | variables | env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=self.folder,
            )

    def process(self, rank: int) -> subprocess.Popen[bytes]:
        """Returns the process that was started as number `rank`."""
        return self._ranks[rank]

    def results(self, seconds: float) -> list[RankResult]:
        """Waits until all have ended, at most so long, kills what still runs, and returns how each ended."""
        deadline = time.monotonic() + seconds
        for process in self._ranks.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0.01))
        codes = {number: process.poll() for number, process in self._ranks.items()}
        self.kill()
        return [self._result(number, code) for number, code in codes.items()]

    def kill(self) -> None:
        """Ends every process; harmless where they have ended."""
        for process in self._ranks.values():
            process.kill()
        for process in self._ranks.values():
            process.wait()

    def _result(self, number: int, code: int | None) -> RankResult:
        stdout, stderr = (
            (self.folder / f"{name}{number}").read_text("utf-8", "replace") for name in ("stdout", "stderr")
        )
        file = self.folder / f"value{number}"
        return RankResult(number, code, stdout, stderr, json.loads(file.read_text()) if file.exists() else None)


@contextlib.contextmanager
def start_processes(
    world_size: int,
    target: Callable[..., Any] | Path,
    *args: Any,
    env: dict[str, str] | None = None,
    ranks: Sequence[int] | None = None,
) -> Iterator[Processes]:
    """A running world of processes, to do something to it meanwhile; every process is killed at the end of the block.

    Args:
        world_size: WORLD_SIZE of each.
        target: A function at the top of a module (it returns JSON types), or a script.
        *args: Its arguments: JSON types for a function, texts for a script.
        env: More variables.
        ranks: RANK of each; by default 0, 1, ... world_size - 1.
    """
    with tempfile.TemporaryDirectory(prefix="world") as folder:
        world = Processes(Path(folder), free_port(), target, args)
        try:
            for rank in range(world_size) if ranks is None else ranks:
                world.start(rank, world_size, env or {})
            yield world
        finally:
            world.kill()


def run_processes(
    world_size: int,
    target: Callable[..., Any] | Path,
    *args: Any,
    env: dict[str, str] | None = None,
    seconds: float = 60.0,
    succeed: bool = True,
) -> list[RankResult]:
    """Runs a world of processes to its end.

    Args:
        world_size: How many.
        target: As for `start_processes`.
        *args: As for `start_processes`.
        env: More variables.
        seconds: Until what still runs is killed.
        succeed: Fail, showing what each rank wrote, unless all return 0.

    Returns:
        How each rank ended, by rank.
    """
    with start_processes(world_size, target, *args, env=env) as world:
        results = world.results(seconds)
    if succeed:
        bad = [result for result in results if result.returncode != 0]
        shown = [f"rank {r.rank} ended with {r.returncode}\n{r.stdout}\n{r.stderr}" for r in bad]
        assert not bad, "\n".join(shown)
    return results


_chance = random.SystemRandom()  # the tests seed the others
_given_ports: set[int] = set()


def free_port() -> int:
    """Returns a TCP port that nobody uses at the moment, and another one each time: worlds live beside each other.

    It is none of those that the system gives to whoever calls somebody: one of them would be taken by the next caller,
    here or in another run of the tests.
    """
    while True:
        port = _chance.randrange(12_000, 32_000)
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            if port not in _given_ports:
                _given_ports.add(port)
                return port


def child_environment(**variables: str) -> dict[str, str]:
    """Returns this process's environment for a child that shall import the same cyxtrain, and no world of its own."""
    decided = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "DISTRIBUTED_BACKEND")
    kept = {name: value for name, value in os.environ.items() if name not in decided}
    package = str(Path(cyxtrain.__file__ or "").parents[1])
    path = os.pathsep.join([package, str(SUPPORT), *map(str, FOLDERS), *filter(None, [os.environ.get("PYTHONPATH")])])
    return kept | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | variables


def _main(module: str, function: str, args: str, value_file: str) -> None:
    """Runs one rank's function in its own process."""
    value = getattr(importlib.import_module(Path(module).stem), function)(*json.loads(args))
    part = Path(value_file + ".part")
    part.write_text(json.dumps(value))
    part.rename(value_file)


if __name__ == "__main__":
    _main(*sys.argv[1:])
