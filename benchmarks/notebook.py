"""What a notebook's workers cost: until the first step of a first and of a second fit, in memory, and at the end.

    python benchmarks/notebook.py [--launches 5] [--floors] [--json results.json]

Each launch is a separate program, which trains a small network on two workers twice, evaluates, predicts, then trains
on 400 MB of rows, and is killed in mid-epoch. Seconds are by the clock of the machine, from the call to the end of the
first step on rank 0; medians, and the worst. Memory is what all processes together have more at the end of an epoch
with 100,000 rows than with 10,000 of them (Pss without files: what they share counts once, and the system's cache not
at all), as a multiple of the bytes of these rows: an array of the caller's is copied once, for all workers; a memory
map not at all.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from text_tables import Table
from torch import nn

import cyxtrain as cx

RANKS, ROWS, FEW, WIDTH = 2, 100_000, 10_000, 1000
CEILINGS = {
    "first fit, to its first step, s": 5.0,
    "second fit, to its first step, s": 0.5,
    "second fit of one epoch, whole, s": 0.5,
    "end after SIGKILL, s": 1.0,
    "memory, array": 1.1,
    "memory, memory map": 0.1,
}
"""What must not be exceeded, in the median."""


class StepRecorder(cx.callbacks.Callback):
    """Notes when the first step was done, and what memory there is at the end of an epoch."""

    def __init__(self) -> None:
        self.first_step = 0.0
        self.bytes = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Notes the first."""
        self.first_step = self.first_step or time.time()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Adds up what all processes have."""
        if cx.is_master():
            self.bytes = memory_of_all(os.getppid())


def memory_of_all(parent: int) -> int:
    """Returns the bytes of a process and of its children, with what they share counted once."""
    pids = [parent]
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(stat.read_text().rpartition(")")[2].split()[1]) == parent:
                pids.append(int(stat.parent.name))
        except OSError:  # it has just ended
            continue
    total = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            total += 1024 * int(line.split()[1]) if line.startswith(("Pss_Anon:", "Pss_Shmem:")) else 0
    return total


def use() -> None:
    """What a user does, told step by step on stdout as JSON; the last step never ends."""
    torch.manual_seed(0)
    x, y = torch.randn(2000, 20), torch.randint(3, (2000,))
    net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 3))
    trainer = cx.DistributedTrainer(net, nn.CrossEntropyLoss(), torch.optim.Adam(net.parameters()))
    config = cx.DistributedTrainingConfig(epochs=1, batch_size=32, num_processes=RANKS, verbose=False)
    found = {}
    for name in ("first", "second"):
        watch, began = StepRecorder(), time.time()
        trainer.fit(x, y, config, callbacks=[watch])
        found[f"{name} fit, to its first step, s"] = watch.first_step - began
        found[f"{name} fit of one epoch, whole, s"] = time.time() - began
    found["evaluate, s"] = timed(lambda: trainer.evaluate(x, y))
    found["predict, s"] = timed(lambda: trainer.predict(x))
    with tempfile.TemporaryDirectory() as folder:
        array = np.ones((ROWS, WIDTH), "float32")
        np.save(f"{folder}/rows.npy", array)
        targets = np.zeros(ROWS, "int64")
        wide = nn.Linear(WIDTH, 2)
        large = cx.DistributedTrainer(wide, nn.CrossEntropyLoss(), torch.optim.SGD(wide.parameters(), 0.1))
        for name, rows in (("array", array), ("memory map", np.load(f"{folder}/rows.npy", mmap_mode="r"))):
            watches = {FEW: StepRecorder(), ROWS: StepRecorder()}
            for count, watch in watches.items():
                large.fit(rows[:count], targets[:count], config, batch_size=1000, callbacks=[watch])
            more = rows[FEW:].nbytes
            found[f"memory, {name}"] = (watches[ROWS].bytes - watches[FEW].bytes) / more
    print(json.dumps(found), flush=True)
    trainer.fit(x, y, config, epochs=10**6, callbacks=[Telling()])


class Telling(cx.callbacks.Callback):
    """Says which process it is in, in the middle of an epoch."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Tells it once on each rank."""
        if self.trainer.epoch == 3 and batch == 3:
            print(os.getpid(), flush=True)


def timed(call: Callable[[], object]) -> float:
    """Returns the seconds that a call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def launch() -> dict[str, float]:
    """Runs what a user does, and kills it."""
    with subprocess.Popen([sys.executable, __file__, "--use"], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        found: dict[str, float] = json.loads(run.stdout.readline())
        pids = [int(run.stdout.readline().split()[-1]) for _ in range(RANKS)]
        run.send_signal(signal.SIGKILL)
        began = time.perf_counter()
        while any(is_running(pid) for pid in pids):
            time.sleep(0.002)
        found["end after SIGKILL, s"] = time.perf_counter() - began
    return found


def is_running(pid: int) -> bool:
    """Returns whether a process runs; one that waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launches", type=int, default=5, help="programs, one after the other")
    parser.add_argument("--floors", action="store_true", help="fail where a figure is worse than it must be")
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--use", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.use:
        use()
    launches = [launch() for _ in range(given.launches)]
    table = Table(f"a notebook's {RANKS} workers, {given.launches} launches", ["what", "median", "worst", "at most"], 1)
    missed = 0
    for name in launches[0]:
        values = [each[name] for each in launches]
        median, limit = statistics.median(values), CEILINGS.get(name)
        missed += limit is not None and median > limit
        table.add([name, f"{median:.3f}", f"{max(values):.3f}", "" if limit is None else f"{limit:g}"])
    table.show()
    if given.json is not None:
        given.json.write_text(json.dumps({"launches": launches}, indent=2) + "\n", encoding="utf-8")
    return int(given.floors and missed > 0)


if __name__ == "__main__":
    sys.exit(main())
