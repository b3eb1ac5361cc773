"""Runs Python programs as processes that need not import torch: forks of the rank server."""

from __future__ import annotations

import atexit
import contextlib
import inspect
import itertools
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from rank_processes import become, start_process

from cyxtrain.environment import uncaught

SECONDS = 60.0
_ELASTIC = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
_EXECUTE_CHILD = list(inspect.signature(subprocess.Popen._execute_child).parameters)[2:]  # type: ignore[attr-defined]
_numbers = itertools.count()


class ForkedProgram:
    """A running program, which leads a session and does not outlive a `with` block.

    Tests that use it have the fixture `rank_server`.

    Args:
        words: "-m" and a module, or a script; then its arguments.
        folder: Where it runs.
        variables: More of the environment. The rest is the rank server's.
        outputs: Files to which stdout and stderr are appended; by default new ones beside the folder.
        forks: Whether the Python programs that it starts are forks of it: the ranks of a launcher.
    """

    def __init__(
        self,
        words: Sequence[str],
        folder: Path,
        variables: Mapping[str, str] | None = None,
        *,
        outputs: tuple[Path, Path] | None = None,
        forks: bool = False,
    ) -> None:
        number = next(_numbers)
        self.outputs = outputs or (Path(f"{folder}.stdout{number}"), Path(f"{folder}.stderr{number}"))
        self._words = list(words)
        files = [str(file) for file in self.outputs]
        self._end, self.process = start_process(
            _become_program, dict(variables or {}), self._words, str(folder), files, forks
        )
        self.pid = self.process.pid or 0
        self._code: int | None = None

    def __enter__(self) -> ForkedProgram:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait(self, seconds: float = SECONDS) -> subprocess.CompletedProcess[str]:
        """Return how it ended, as `subprocess.run` does; kill it after so many seconds."""
        self.process.join(seconds)
        hangs = self.process.is_alive()
        code = self.close()
        stdout, stderr = (file.read_text("utf-8", "replace") for file in self.outputs)
        assert not hangs, f"{self._words} runs for {seconds} s:\n{stdout}\n{stderr}"
        return subprocess.CompletedProcess(self._words, code, stdout, stderr)

    def close(self) -> int:
        """Kill it if it still runs, and return its exit code: -n for signal n."""
        if self._code is None:
            self.process.kill()
            self.process.join()
            self._code = self.process.exitcode or 0
            self.process.close()
            self._end.close()
        return self._code


def run_python(
    words: Sequence[str],
    folder: Path,
    variables: Mapping[str, str] | None = None,
    *,
    seconds: float = SECONDS,
    forks: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; see `ForkedProgram`."""
    return ForkedProgram(words, folder, variables, forks=forks).wait(seconds)


# --- in the fork ----------------------------------------------------------------------------------------------------


def _become_program(
    end: Connection, variables: dict[str, str], words: list[str], folder: str, outputs: list[str], forks: bool
) -> None:
    become(variables)
    os.setsid()
    os.chdir(folder)
    for descriptor, name in enumerate(outputs, 1):
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, descriptor)
        os.close(file)
    if forks:
        for module in {"subprocess", _ELASTIC} & sys.modules.keys():
            vars(sys.modules[module])["Popen"] = _ForkedPopen
    _run_program(words)


def _run_program(words: Sequence[str]) -> NoReturn:
    """Run a program, and end as the interpreter does."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # A launcher that forked has its own.
    sys.excepthook = sys.__excepthook__
    vars(uncaught)["_hook"] = None
    code: object = 0
    try:
        _run_as_main(words)
    except SystemExit as ended:
        code = ended.code or 0
    except BaseException as error:
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
        error.__traceback__ = _below(words[0], error.__traceback__)
        sys.last_value = error
        sys.excepthook(type(error), error, error.__traceback__)
    if not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):
        sys.stdout.flush(), sys.stderr.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code)


def _run_as_main(words: Sequence[str]) -> None:
    if words[0] == "-m":
        sys.argv = list(words[1:])
        sys.path.insert(0, os.getcwd())
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(words)
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        runpy.run_path(words[0], run_name="__main__")


def _below(script: str, trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without what stands above the script; the whole of it where there is none."""
    inner = trace
    while inner is not None and inner.tb_frame.f_code.co_filename != script:
        inner = inner.tb_next
    return inner or trace


class _ForkedPopen(subprocess.Popen[bytes]):
    """Does as Popen; a Python program is a fork of this process."""

    def _execute_child(self, args: Any, *rest: Any) -> None:
        words = _program_of(args)
        if words is None:
            super()._execute_child(args, *rest)  # type: ignore[misc]
            return
        given = dict(zip(_EXECUTE_CHILD, rest, strict=True))
        sys.stdout.flush(), sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            for file, descriptor in (("p2cread", 0), ("c2pwrite", 1), ("errwrite", 2)):
                if given[file] != -1:
                    os.dup2(given[file], descriptor)
            _close_all_but(given["pass_fds"])
            vars(resource_tracker._resource_tracker).update(_fd=None, _pid=None)  # of the process that forked
            os.environ.clear()
            os.environ.update(given["env"])
            _run_program(words)
        self._child_created = True
        for file in ("p2cread", "c2pwrite", "errwrite"):
            if given[file] > 2:
                os.close(given[file])
        devnull = getattr(self, "_devnull", None)
        if devnull is not None and devnull not in (given["p2cread"], given["c2pwrite"], given["errwrite"]):
            os.close(devnull)


def _program_of(command: Any) -> list[str] | None:
    """Return the words of a Python program, as `ForkedProgram` takes them; None for any other command."""
    if not isinstance(command, (list, tuple)) or command[0] != sys.executable:
        return None
    words = [str(word) for word in command[1:]]
    if words[:1] == ["-u"]:
        del words[0]
    is_program = words and (words[0] == "-m" or words[0].endswith(".py"))
    return words if is_program else None


def _close_all_but(kept: Sequence[int]) -> None:
    first = 3
    for descriptor in (*sorted(kept), 1024):
        os.closerange(first, descriptor)
        first = descriptor + 1
