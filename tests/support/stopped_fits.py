"""Fits that get signals at a chosen moment: alone, under the launcher or torchrun; all are forks of the rank server.

A program is a process of its own, which leads a session, works in its own folder and writes its output to a file there.
Launcher and torchrun start their ranks by `ForkedPopen`: a world of two costs half a second instead of six.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import importlib
import inspect
import multiprocessing.connection
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import psutil
import torch
from fitting import CLASSES, FEATURES, make_rows, seeded
from rank_processes import become, environment, start_process
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from worlds import free_port, wait_until

import cyxtrain as cx

SECONDS = 60.0
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_PROGRAM = "stopped_fits.program"
"""What a command names instead of a script."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """One pair of a signal and a program.

    Attributes:
        starter: "alone", "by hand" (two ranks), "launch" or "torchrun".
        target: "starter", "rank" (the last one), "ranks", or "all": every process, workers first.
        moment: "step", "validation" or "saving".
    """

    number: signal.Signals
    starter: str
    target: str
    moment: str
    workers: int = 0
    twice: bool = False

    @property
    def num_ranks(self) -> int:
        return 1 if self.starter == "alone" else 2

    def __str__(self) -> str:
        words = [self.number.name, self.starter, self.target, self.moment, f"{self.workers} workers"]
        return "-".join([*words, "twice"] if self.twice else words)


def every_cell() -> list[Cell]:
    """Every pair that exists. torchrun's agent dies of SIGUSR1, and its ranks are not told."""
    targets = {"alone": ("ranks", "all"), "by hand": ("rank", "ranks", "all")}
    targets |= dict.fromkeys(("launch", "torchrun"), ("starter", "rank", "ranks", "all"))
    return [
        Cell(number, starter, target, moment, workers, twice)
        for number in SIGNALS
        for starter, names in targets.items()
        for target in names
        for moment in ("step", "validation", "saving")
        for workers in (0, 2)
        for twice in (False, True)
        if (number, starter, target) != (signal.SIGUSR1, "torchrun", "starter")
    ]


# --- the program ----------------------------------------------------------------------------------------------------


class Model(nn.Module):
    """Waits for its signals in the third step, or in the first validation."""

    def __init__(self, moment: str) -> None:
        super().__init__()
        self.layers = nn.Linear(FEATURES, CLASSES)
        self.moment = moment
        self.steps = 0
        self.has_begun = False

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        training = torch.is_grad_enabled()
        self.steps += self.has_begun and training
        if self.has_begun and self.moment == ("step" if training else "validation") and self.steps >= 3:
            wait_for_signals()
        scores: torch.Tensor = self.layers(rows)
        return scores


class Begin(cx.callbacks.Callback):
    """Tells the model that its dry run is over."""

    def on_train_begin(self, logs: Any = None) -> None:
        vars(self.trainer.model)["has_begun"] = True


class Rows(Dataset[Any]):
    """Rows by number; a TensorDataset would be read without workers."""

    def __init__(self, *parts: torch.Tensor) -> None:
        self.parts = parts

    def __len__(self) -> int:
        return len(self.parts[0])

    def __getitem__(self, row: int) -> Any:
        return tuple(part[row] for part in self.parts)


class Stream(IterableDataset[Any]):
    """Rows one after the other."""

    def __init__(self, *parts: torch.Tensor) -> None:
        self.parts = parts

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        yield from list(zip(*self.parts, strict=True))[first::step]


def wait_for_signals() -> None:
    """Note that this rank is where its signals shall come, and wait for them; only once."""
    note = Path(f"at{os.environ.get('RANK', '0')}")
    if not note.exists():
        note.touch()
        wait_until(Path("sent").exists, SECONDS)


def program(moment: str, workers: int, epochs: int = 3) -> None:
    """Fit."""
    Path(f"pid{os.environ.get('RANK', '0')}").write_text(str(os.getpid()))
    torch.set_num_threads(1)
    every: dict[str, Any] = {}
    if moment == "saving":
        every = {"checkpoint_every_n_steps": 3, "keep_last": 1}
        synchronize = os.fsync

        def fsync(file: Any) -> None:
            if model.steps >= 3:  # not when the folder is tried
                wait_for_signals()
            synchronize(file)

        vars(os)["fsync"] = fsync
    with seeded():
        model = Model(moment)
    data: Any = make_rows(48)
    if workers:
        how: dict[str, Any] = {"num_workers": workers, "persistent_workers": True}
        how["multiprocessing_context"] = os.environ.get("START_METHOD", "fork")
        rows: Any = Stream(*data) if "STREAM" in os.environ else Rows(*data)
        data = (DataLoader(rows, batch_size=4, **how),)
    trainer = cx.DistributedTrainer(model, "cross_entropy", "sgd", callbacks=[Begin()])
    settings: dict[str, Any] = {"validation_data": make_rows(8)}
    if "NO_CHECKPOINTS" not in os.environ:
        settings |= {"checkpoint_every_n_epochs": 100, "checkpoint_dir": "ck", **every}
    try:
        trainer.fit(*data, epochs=epochs, batch_size=4, **settings)
    finally:
        if "WORKERS_DIE_LATE" in os.environ:
            for worker in multiprocessing.active_children():
                os.kill(worker.pid or 0, signal.SIGKILL)
                multiprocessing.connection.wait([worker.sentinel], SECONDS)
    print("the fit has ended")


# --- processes that are forked instead of started ------------------------------------------------------------------


_SUBPROCESSES = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
_EXECUTE_CHILD = list(inspect.signature(subprocess.Popen._execute_child).parameters)[2:]  # type: ignore[attr-defined]


class ForkedPopen(subprocess.Popen[bytes]):
    """Does as Popen; a command that names the program is a fork of this process."""

    def _execute_child(self, args: Any, *rest: Any) -> None:
        words = [str(word) for word in args] if isinstance(args, (list, tuple)) else [str(args)]
        if _PROGRAM not in words:
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
            os.closerange(3, 1024)
            vars(resource_tracker._resource_tracker).update(_fd=None, _pid=None)  # of the process that forked
            os.environ.clear()
            os.environ.update(given["env"])
            end_as_python(lambda: program(*_arguments(words)))
        self._child_created = True
        for file in ("p2cread", "c2pwrite", "errwrite"):
            if given[file] > 2:
                os.close(given[file])
        devnull = getattr(self, "_devnull", None)
        if devnull is not None and devnull not in (given["p2cread"], given["c2pwrite"], given["errwrite"]):
            os.close(devnull)


def _arguments(words: Sequence[str]) -> tuple[str, int, int]:
    moment, workers, epochs = words[words.index(_PROGRAM) + 1 :][:3]
    return moment, int(workers), int(epochs)


def end_as_python(run: Callable[[], Any]) -> NoReturn:
    """Run a program in this fork, and end as the interpreter does."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code = 0
    try:
        try:
            code = run() or 0
        finally:
            atexit._run_exitfuncs()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException as error:
        code = 1
        if isinstance(error, KeyboardInterrupt):
            code = 128 + signal.SIGINT
        with contextlib.suppress(Exception):
            sys.excepthook(type(error), error, error.__traceback__)
    with contextlib.suppress(OSError):
        sys.stdout.flush(), sys.stderr.flush()
    os._exit(code)


def _begin(end: Connection, variables: dict[str, str], folder: str, starter: str, words: list[str]) -> None:
    """Run a program in a fork of the rank server."""
    become(variables)
    os.setsid()
    os.chdir(folder)
    file = os.open(f"output{os.environ.get('RANK', '')}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    vars(subprocess)["Popen"] = ForkedPopen
    end_as_python(lambda: _start(starter, words))


def _start(starter: str, words: list[str]) -> int:
    if starter in ("alone", "by hand"):
        program(*_arguments(words))
        return 0
    if starter == "torchrun":
        vars(importlib.import_module(_SUBPROCESSES))["Popen"] = ForkedPopen
        sys.argv = ["torchrun", "--standalone", "--nproc-per-node=2", "--no-python", *words]
        runpy.run_module("torch.distributed.run", run_name="__main__", alter_sys=True)
        return 0
    from cyxtrain.launch.command_line import main

    return main(["launch", "2", "--", *words], dict(os.environ))


# --- the one who sends ----------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Outcome:
    """What is left of a program: its exit codes, its output, its files, its processes."""

    codes: list[int]
    output: str
    files: list[str]
    left: list[str]
    seconds: float = 0.0

    def lines(self, *words: str) -> list[str]:
        return [line for line in self.output.splitlines() if any(word in line for word in words)]


class Program:
    """A program in its own folder."""

    def __init__(self, folder: Path, starter: str, moment: str, workers: int, *, epochs: int = 3, **more: str) -> None:
        self.folder = folder
        self.moment = moment
        self.num_ranks = 1 if starter == "alone" else 2
        folder.mkdir(parents=True)
        words = [_PROGRAM, moment, str(workers), str(epochs)]
        environments: list[dict[str, str]] = [more]
        if starter == "by hand":
            port = free_port()
            environments = [environment(rank, 2, port, CYXTRAIN_SECRET="known", **more) for rank in range(2)]
        started = [start_process(_begin, each, str(folder), starter, words) for each in environments]
        self._ends = [end for end, _ in started]
        self.processes = [process for _, process in started]

    def wait(self, condition: Callable[[], bool], seconds: float = SECONDS) -> None:
        """Wait for a condition; fail with the output if the program ends without it."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.output()
            assert any(each.is_alive() for each in self.processes), self.output()
            time.sleep(0.005)

    def wait_until_there(self) -> None:
        """Wait until the ranks are where their signals shall come."""
        ranks = [0] if self.moment == "saving" else list(range(self.num_ranks))
        self.wait(lambda: all((self.folder / f"at{rank}").exists() for rank in ranks))

    def ranks(self) -> list[int]:
        return [int(path.read_text()) for path in sorted(self.folder.glob("pid*"))]

    def workers(self, rank: int = 0) -> list[int]:
        """The workers of a rank's DataLoader."""
        children = psutil.Process(self.ranks()[rank]).children()
        return [child.pid for child in children if not any("resource_tracker" in word for word in child.cmdline())]

    def guards(self) -> list[int]:
        """The guards of the launcher, which work in no folder of ours."""
        children = psutil.Process(self.processes[0].pid).children()
        return [child.pid for child in children if any("guard.py" in word for word in child.cmdline())]

    def everything(self) -> list[int]:
        """Every process of the program, the latest first: workers, ranks, launcher."""
        found = [process.info["pid"] for process in psutil.process_iter(["pid", "cwd"]) if self._is_own(process)]
        return sorted(found, reverse=True)

    def _is_own(self, process: psutil.Process) -> bool:
        return bool(process.info["cwd"] == str(self.folder))

    def send(self, number: int, target: str, *, twice: bool = False) -> None:
        starters = [int(each.pid or 0) for each in self.processes]
        pids = {"starter": starters, "rank": self.ranks()[-1:], "ranks": self.ranks(), "all": self.everything()}
        for pid in pids[target]:
            for _ in range(1 + twice):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def go_on(self) -> None:
        (self.folder / "sent").touch()

    def end(self, seconds: float = SECONDS) -> Outcome:
        """Return what is left when the program has ended; nothing outlives the call."""
        began = time.monotonic()
        for process in self.processes:
            process.join(max(0.0, began + seconds - time.monotonic()))
        hung = [f"pid {process.pid} hangs" for process in self.processes if process.is_alive()]
        took = time.monotonic() - began
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not self.everything(), 0.1 if hung else 8.0)
        left = hung + [_describe(pid) for pid in self.everything()]
        for pid in self.everything():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        codes = []
        for process, end in zip(self.processes, self._ends, strict=True):
            process.kill()
            process.join()
            code = process.exitcode or 0
            codes.append(code if code >= 0 else 128 - code)
            process.close()
            end.close()
        files = sorted(path.name for path in (self.folder / "ck").glob("*"))
        files += sorted(path.name for path in (self.folder / "ck").glob(".*"))
        return Outcome(codes, self.output(), files, left, took)

    def output(self) -> str:
        return "".join(path.read_text("utf-8", "replace") for path in sorted(self.folder.glob("output*")))


def _describe(pid: int) -> str:
    try:
        return f"{pid} {' '.join(psutil.Process(pid).cmdline())[:80]}"
    except psutil.Error:
        return str(pid)
