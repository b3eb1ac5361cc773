"""Runs the launcher on scripts that do not import torch: in this process, or in one that a test watches."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any
from unittest import mock

from worlds import wait_until

from cyxtrain.environment import uncaught
from cyxtrain.errors import CyxtrainError
from cyxtrain.launch.command_line import main

SECONDS = 20.0  # for anything that a test waits for

# The launcher without cyxtrain/__init__.py, which imports torch: seconds per start that no test here needs.
_PACKAGE = importlib.util.find_spec("cyxtrain")
assert _PACKAGE is not None
QUICK_LAUNCH = f"""
import runpy, sys, types
package = types.ModuleType("cyxtrain")
package.__path__ = {list(_PACKAGE.submodule_search_locations or [])!r}
sys.modules["cyxtrain"] = package
runpy.run_module("cyxtrain.launch", run_name="__main__", alter_sys=True)
"""
LAUNCHER = [sys.executable, "-c", QUICK_LAUNCH]

# What every rank's script can use.
_PRELUDE = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
rank = int(os.environ["RANK"])
here = Path(__file__).parent
def note(name, text):  # complete when it appears
    (here / (name + ".part")).write_text(str(text))
    (here / (name + ".part")).rename(here / name)
def wait_for(name):
    while not (here / name).exists():
        time.sleep(0.01)
def wait_for_end_of(pid):
    try:
        while True:
            os.kill(pid, 0)
            time.sleep(0.01)
    except ProcessLookupError:
        pass
def start_child():  # a process that ends only when it is told to
    child = subprocess.Popen([sys.executable, "-c", "import signal; print(flush=True); signal.pause()"],
                             stdout=subprocess.PIPE)
    child.stdout.read(1)
    return child.pid
def rest():  # until a signal; `signal.pause` sleeps through one that comes between the interpreter's look and its call
    while True:
        time.sleep(0.01)
def ready(child=None):
    note(f"ready{rank}", json.dumps([os.getpid(), child] if child else [os.getpid()]))
"""


def write_script(folder: Path, source: str) -> str:
    script = folder / "train.py"
    script.write_text(_PRELUDE + textwrap.dedent(source), encoding="utf-8")
    return str(script)


def environment(**variables: str) -> dict[str, str]:
    """This process's own, without what would decide for the launcher."""
    decided = ("CYXTRAIN_SECRET", "MASTER_PORT", "OMP_NUM_THREADS", "PYTHONUNBUFFERED", "RANK", "WORLD_SIZE")
    return {name: value for name, value in os.environ.items() if name not in decided} | variables


def run(*words: object, env: dict[str, str] | None = None, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Run the launcher in this process, with standard streams of its own; its ranks are processes as ever."""
    command = ["launch", *map(str, words)]
    with contextlib.ExitStack() as stack:
        streams = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(3)]
        streams[0].write(stdin)
        streams[0].seek(0)
        with _standard_streams(streams):
            code = call_command_line(command, environment() if env is None else env)
        for stream in streams:
            stream.seek(0)
        return subprocess.CompletedProcess(command, code, streams[1].read(), streams[2].read())


def call_command_line(words: Sequence[str], env: dict[str, str]) -> int:
    """Return the exit code of a command line, and undo what it changes for the rest of its process."""
    with (
        mock.patch.object(sys, "excepthook", sys.excepthook),
        mock.patch.object(sys, "path", list(sys.path)),
        mock.patch.object(uncaught, "_hook", None),
    ):
        try:
            return main(words, env)
        except CyxtrainError as error:
            sys.excepthook(type(error), error, None)
            return 1


@contextlib.contextmanager
def _standard_streams(files: Sequence[IO[bytes]]) -> Iterator[None]:
    kept = [os.dup(number) for number in range(3)]
    try:
        for number, file in enumerate(files):
            os.dup2(file.fileno(), number)
        with (
            open(1, "w", closefd=False) as out,
            open(2, "w", closefd=False) as err,
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            yield
    finally:
        for number, descriptor in enumerate(kept):
            os.dup2(descriptor, number)
            os.close(descriptor)


def run_script(
    folder: Path, num_ranks: int, source: str, *arguments: str, **options: Any
) -> subprocess.CompletedProcess[bytes]:
    return run(num_ranks, write_script(folder, source), *arguments, **options)


@contextlib.contextmanager
def started(
    folder: Path, num_ranks: int, source: str, before: tuple[str, ...] = (), **options: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """The launcher, running; nothing that it started outlives the block."""
    command = [*before, *LAUNCHER, str(num_ranks), write_script(folder, source)]
    settings: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": environment(), **options}
    # Under nohup these tests ignore SIGHUP, and so would all that they start.
    launcher = subprocess.Popen(command, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL), **settings)
    try:
        yield launcher
    finally:
        launcher.kill()
        launcher.communicate(timeout=SECONDS)
        for pid in filter(runs, noted_pids(folder)):
            os.kill(pid, signal.SIGKILL)


def noted_pids(folder: Path) -> list[int]:
    return [pid for file in folder.glob("ready?") for pid in json.loads(file.read_text())]


def runs(pid: int) -> bool:
    """Whether the process runs; one that only waits to be reaped does not."""
    try:
        os.kill(pid, 0)
        if sys.platform == "linux":
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
    return True


def wait_for_ranks(folder: Path, num_ranks: int) -> list[int]:
    """The processes that the ranks have noted, once all have."""
    wait_until(lambda: len(list(folder.glob("ready?"))) == num_ranks)
    return noted_pids(folder)


def children_of(pid: int) -> set[int]:
    """The processes that this one has started and that still run; only Linux can tell."""
    children = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            if int(parent) == pid and state != "Z":
                children.add(int(stat.parent.name))
    return children
