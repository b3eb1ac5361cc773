"""Fits that get signals at a chosen moment: alone, under the launcher or torchrun; all are forks of the rank server.

A program leads a session, works in its own folder and writes its output to a file there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing.connection
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from fitting import CLASSES, FEATURES, make_rows, seeded
from forked_programs import ForkedProgram
from rank_processes import environment
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from worlds import free_port, wait_until

import cyxtrain as cx

SECONDS = 60.0
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
STARTERS: dict[str, tuple[str, ...]] = {
    "alone": (),
    "by hand": (),
    "launch": ("-m", "cyxtrain.launch", "2", "--"),
    "torchrun": ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
}
SCRIPT = """from stopped_fits import program

if __name__ == "__main__":
    program({!r}, {}, {})
"""


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


# --- the one who sends ----------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Outcome:
    """What is left of a program: its exit codes, its output, its files, its processes."""

    codes: list[int]
    output: str
    files: list[str]
    left: list[str]

    def lines(self, *words: str) -> list[str]:
        return [line for line in self.output.splitlines() if any(word in line for word in words)]


class Program:
    """A program in its own folder."""

    def __init__(self, folder: Path, starter: str, moment: str, workers: int, *, epochs: int = 3, **more: str) -> None:
        self.folder = folder
        self.moment = moment
        self.num_ranks = 1 if starter == "alone" else 2
        folder.mkdir(parents=True)
        script = folder / "train.py"
        script.write_text(SCRIPT.format(moment, workers, epochs))
        environments: list[dict[str, str]] = [more]
        if starter == "by hand":
            port = free_port()
            environments = [environment(rank, 2, port, CYXTRAIN_SECRET="known", **more) for rank in range(2)]
        self.programs = []
        for number, variables in enumerate(environments):
            output = folder / f"output{number}"
            words = [*STARTERS[starter], str(script)]
            self.programs.append(
                ForkedProgram(
                    words, folder, variables, outputs=(output, output), forks=starter in ("launch", "torchrun")
                )
            )

    def is_running(self) -> bool:
        return any(each.process.is_alive() for each in self.programs)

    def wait(self, condition: Callable[[], bool], seconds: float = SECONDS) -> None:
        """Wait for a condition; fail with the output if the program ends without it."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.output()
            assert self.is_running(), self.output()
            time.sleep(0.005)

    def wait_until_there(self) -> None:
        """Wait until the ranks are where their signals shall come."""
        ranks = [0] if self.moment == "saving" else list(range(self.num_ranks))
        self.wait(lambda: all((self.folder / f"at{rank}").exists() for rank in ranks))

    def ranks(self) -> list[int]:
        return [int(path.read_text()) for path in sorted(self.folder.glob("pid*"))]

    def workers(self, rank: int = 0) -> list[int]:
        """The workers of a rank's DataLoader; those of a stream end with each epoch."""
        commands = _commands_of_children(self.ranks()[rank])
        return [pid for pid, command in commands.items() if "resource_tracker" not in command]

    def guards(self) -> list[int]:
        """The guards of the launcher, which work in no folder of ours."""
        commands = _commands_of_children(self.programs[0].pid)
        return [pid for pid, command in commands.items() if "guard.py" in command]

    def everything(self) -> list[int]:
        """Every process of the program, the latest first: workers, ranks, launcher."""
        found = [process.info["pid"] for process in psutil.process_iter(["pid", "cwd"]) if self._is_own(process)]
        return sorted(found, reverse=True)

    def _is_own(self, process: psutil.Process) -> bool:
        return bool(process.info["cwd"] == str(self.folder))

    def send(self, number: int, target: str, *, twice: bool = False) -> None:
        starters = [each.pid for each in self.programs]
        pids = {"starter": starters, "rank": self.ranks()[-1:], "ranks": self.ranks(), "all": self.everything()}
        for pid in pids[target]:
            for _ in range(1 + twice):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def go_on(self) -> None:
        (self.folder / "sent").touch()

    def end(self) -> Outcome:
        """Return what is left when the program has ended; nothing outlives the call."""
        deadline = time.monotonic() + SECONDS
        for each in self.programs:
            each.process.join(max(0.0, deadline - time.monotonic()))
        hung = [f"pid {each.pid} hangs" for each in self.programs if each.process.is_alive()]
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not self.everything(), 0.1 if hung else 8.0)
        left = hung + [_describe(pid) for pid in self.everything()]
        for pid in self.everything():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        codes = [each.close() for each in self.programs]
        files = sorted(path.name for path in (self.folder / "ck").glob("*"))
        files += sorted(path.name for path in (self.folder / "ck").glob(".*"))
        return Outcome([code if code >= 0 else 128 - code for code in codes], self.output(), files, left)

    def output(self) -> str:
        return "".join(path.read_text("utf-8", "replace") for path in sorted(self.folder.glob("output*")))


def _commands_of_children(pid: int) -> dict[int, str]:
    found = {}
    for child in psutil.Process(pid).children():
        with contextlib.suppress(psutil.Error):  # it has ended
            found[child.pid] = " ".join(child.cmdline())
    return found


def _describe(pid: int) -> str:
    try:
        return f"{pid} {' '.join(psutil.Process(pid).cmdline())[:80]}"
    except psutil.Error:
        return str(pid)
