"""The rank of `checkpoint.py` that saves: a model in training, whose state is saved in one way after the other."""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import launches
import torch
import torch.distributed as dist
from saving_ways import WAYS, Training, Way
from torch import Tensor

_STEPS_BEFORE = 10
_SAVE_SECONDS = 300.0


def measure(way: Way) -> dict[str, Any]:
    """Saves once, trains on until the files are complete, reads them, and returns the seconds of it all.

    Raises:
        AssertionError: What was read is not what was there when it was saved.
    """
    training, clock = way.training, time.perf_counter
    way.folder.mkdir(parents=True)
    before = [timed_step(training) for _ in range(_STEPS_BEFORE)]
    expected = {name: value.clone() for name, value in training.state().items()}
    complete: list[float] = []
    began = clock()
    wait = way.save(lambda: complete.append(clock()))
    stall = clock() - began
    during = []
    while not complete and clock() - began < _SAVE_SECONDS:
        during.append(timed_step(training))
    wait()
    read_from = clock()
    loaded = way.load()
    load = clock() - read_from
    check_equal(loaded, expected)
    size = sum(file.stat().st_size for file in way.folder.rglob("*") if file.is_file())
    leave_nothing_to_write(way.folder)
    return {
        "stall_seconds": stall,
        "lost_seconds": stall + sum(during) - len(during) * statistics.mean(before),
        "complete_seconds": complete[0] - began,
        "load_seconds": load,
        "file_bytes": size,
    }


def timed_step(training: Training) -> float:
    """Takes a step, and returns its seconds."""
    began = time.perf_counter()
    training.step()
    return time.perf_counter() - began


def check_equal(loaded: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Fails unless all tensors are the same, bit for bit."""
    wrong = sorted(set(loaded) ^ set(expected))
    wrong += [name for name in expected if name in loaded and not torch.equal(loaded[name], expected[name])]
    if wrong:
        raise AssertionError(f"read other values than were saved: {wrong}")


def leave_nothing_to_write(folder: Path) -> None:
    """Deletes a folder, and empties the system's queue to the disk: the next way would wait for it."""
    shutil.rmtree(folder)
    if os.name != "nt":
        os.sync()


def compare(megabytes: float, rounds: int, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Returns what each way took in each round, after a first round that does not count."""
    training = Training(megabytes)
    with contextlib.ExitStack() as at_end:
        ways = {name: way(training, folder / name, at_end) for name, way in WAYS.items()}
        for way in ways.values():
            measure(way)
        return launches.take_turns(list(ways), rounds, lambda name: measure(ways[name]))


def main() -> None:
    task = launches.given()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    launches.report(compare(task["megabytes"], task["rounds"], Path(task["folder"])))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
