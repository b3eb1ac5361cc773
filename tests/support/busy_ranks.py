"""What ranks do in the survival tests that are busy, slow, wrong or often born, each in its own process."""

from __future__ import annotations

import ctypes
import functools
import itertools
import json
import logging
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal, localcontext
from pathlib import Path
from typing import Any

import faults
import torch
import torch.distributed as dist
from fitting import make_rows
from survival_ranks import Facts, learnt, note, small_model
from torch import nn

import cyxtrain as cx
from cyxtrain.ring import RingProcessGroup
from cyxtrain.ring.monitoring import wait_graph

# --- a held GIL -----------------------------------------------------------------------------------------------------


def wait_for_a_held_gil(how: str, seconds: float) -> float:
    """Rank 1 holds the GIL in one call while the others wait; returns for how long (0 for the others)."""
    with cx.init():
        rank, held = cx.get_rank(), 0.0
        hold = HOLDERS[how](seconds) if rank == 1 else None
        cx.barrier()
        if hold is not None:
            began = time.monotonic()
            hold()
            held = time.monotonic() - began
        tensor = torch.ones(80_000)
        cx.all_reduce(tensor)
        assert bool((tensor == cx.get_world_size()).all())
        cx.barrier()
        return held


def hold_by_sleep(seconds: float) -> Callable[[], object]:
    sleep = ctypes.PyDLL(None).sleep  # unlike CDLL, it does not let go of the GIL around a call
    return lambda: sleep(round(seconds))


def hold_by_loads(seconds: float) -> Callable[[], object]:
    """Numbers half-way between two floats: to round one, all of its 751 digits must be read, in 100 us."""
    with localcontext() as context:
        context.prec = 2000
        number = str(Decimal(2) ** -1075)
    return _long_enough(json.loads, lambda count: f"[{','.join([number] * count)}]", seconds)


def hold_by_dumps(seconds: float) -> Callable[[], object]:
    """A long list of floats, as text: the oldest protocol of pickle looks for the shortest one of each."""
    return _long_enough(functools.partial(pickle.dumps, protocol=0), lambda count: [5e-324] * count, seconds)


def _long_enough(call: Callable[[Any], object], argument: Callable[[int], Any], seconds: float) -> Callable[[], object]:
    """Returns one call on something so large that it takes so long, by what small ones take."""
    count, took = 100, 0.0
    while took < 0.2:
        count *= 2
        small, tries = argument(count), []
        for _ in range(3):
            began = time.monotonic()
            call(small)
            tries.append(time.monotonic() - began)
        took = min(tries)  # the others may have waited for a processor
    large = argument(int(1.3 * count * seconds / took))
    return lambda: call(large)


HOLDERS = {"sleep": hold_by_sleep, "json.loads": hold_by_loads, "pickle.dumps": hold_by_dumps}


# --- a slow rank ----------------------------------------------------------------------------------------------------


class Heard(logging.Handler):
    """Keeps what the ring logs."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(f"{record.levelname} {record.getMessage()}")


def wait_for_a_slow_rank(slow: int, how: str, seconds: float, warn_seconds: float | None) -> list[str]:
    """One rank comes late to a collective; returns what this rank logged while it waited."""
    if warn_seconds is not None:
        wait_graph.WARN_SECONDS = warn_seconds
    received = Heard()
    logging.getLogger("cyxtrain.ring").addHandler(received)
    with cx.init():
        cx.barrier()
        if cx.get_rank() == slow:
            globals()[how](seconds)
        tensor = torch.ones(80_000)
        cx.all_reduce(tensor)
        assert bool((tensor == cx.get_world_size()).all())
        cx.barrier()
    return received.texts


def load_much_data(seconds: float) -> None:
    time.sleep(seconds)


def hold_the_gil(seconds: float) -> None:
    faults.hold_gil(seconds)


# --- errors in a rank's own code ------------------------------------------------------------------------------------


def raise_in(folder: str, where: str) -> Facts | None:
    """Rank 1 raises its own error; returns how this rank learnt of it."""
    with cx.init():
        try:
            globals()[where](folder)
        except (cx.PeerLostError, cx.DistributedTrainingError) as error:
            return learnt(error)
    return None


def a_loss_function(folder: str) -> None:
    steps = itertools.count()

    def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if cx.get_rank() == 1 and next(steps) == 20:
            note(folder, "at", time.monotonic())
            raise ValueError("the loss is a banana")
        return nn.functional.cross_entropy(outputs, targets)

    trainer = cx.DistributedTrainer(small_model(), loss_fn)
    trainer.fit(*make_rows(1000), epochs=100, batch_size=8, verbose=False)


def code_between_calls(folder: str) -> None:
    cx.barrier()
    if cx.get_rank() == 1:
        note(folder, "at", time.monotonic())
        raise ValueError("the loss is a banana")
    cx.all_reduce(torch.ones(3))


# --- many lives -----------------------------------------------------------------------------------------------------


def live_often(lives: int, warm_up: int) -> list[Facts]:
    """Joins and leaves again and again; returns what this process held each time after so many lives."""
    held = []
    for life in range(1, lives + 1):
        with cx.init():
            tensor = torch.ones(80_000)
            cx.all_reduce(tensor)
            assert float(tensor[0]) == cx.get_world_size()
        if life % warm_up == 0:
            held.append(holdings())
    return held


def live_often_in_threads(lives: int, warm_up: int) -> list[Facts]:
    """The same for the group alone: two ranks as threads, at one store."""
    store, held = dist.HashStore(), []
    both, errors = threading.Barrier(2), []

    def run(rank: int) -> None:
        try:
            for life in range(1, lives + 1):
                group = RingProcessGroup(store, rank, 2, timedelta(seconds=20))
                tensor = torch.ones(80_000)
                group.allreduce([tensor]).wait()
                group.shutdown()
                del group
                both.wait(20)
                if rank == 0 and life % warm_up == 0:
                    held.append(holdings())
                both.wait(20)
        except BaseException as error:
            errors.append(error)
            both.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return held


def holdings() -> Facts:
    """What this process holds: descriptors, threads (also those that Python does not know), KiB of memory.

    The least of half a second: what is closing just then does not count. Nor does what the C library keeps for later.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
    found = []
    for _ in range(10):
        found.append(_holdings())
        time.sleep(0.05)
    return {name: min(facts[name] for facts in found) for name in found[0]}


def _holdings() -> dict[str, int]:
    lines = Path("/proc/self/status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines)
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": int(status["Threads"]),
        "kib": int(status["VmRSS"].split()[0]),
    }
