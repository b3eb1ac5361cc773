"""A fit of a few steps that are timed, for `cyxtrain doctor`."""

from __future__ import annotations

import itertools
import json
import statistics
import time
from pathlib import Path
from typing import NamedTuple

import torch
from typing_extensions import override

from cyxtrain.callbacks.callback import Callback, Logs
from cyxtrain.errors import on_all_ranks
from cyxtrain.world import runtime
from cyxtrain.world.agreement import on_first

NUM_TIMED = 25
_NUM_UNTIMED = 5
NUM_STEPS = _NUM_UNTIMED + NUM_TIMED


class StepCost(NamedTuple):
    """The time of a step on rank 0, and what it was measured with."""

    seconds: float  # median
    samples: int  # over all ranks
    ranks: int
    accumulation_steps: int
    threads: int  # of PyTorch, on each rank
    virtual_ranks: int | None


class StepTrial(Callback):
    """Writes the time of a step to a file on rank 0, and then ends the program on all ranks.

    Args:
        file: Where rank 0 writes a `StepCost`, as JSON.
    """

    def __init__(self, file: str) -> None:
        super().__init__()
        self._file = file
        self._ends: list[float] = []

    @override
    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        self._ends.append(time.perf_counter())
        if len(self._ends) == NUM_STEPS:
            # No rank ends before rank 0 has written the file.
            on_first(runtime.current(), self._write)
            raise on_all_ranks(SystemExit(0))

    def _write(self) -> None:
        ends = self._ends[_NUM_UNTIMED - 1 :]
        config = self.trainer.config
        cost = StepCost(
            statistics.median(end - begin for begin, end in itertools.pairwise(ends)),
            self.params["samples_per_step"],
            self.trainer.get_world_size(),
            config.accumulation_steps,
            torch.get_num_threads(),
            config.virtual_ranks,
        )
        Path(self._file).write_text(json.dumps(cost), "utf-8")
