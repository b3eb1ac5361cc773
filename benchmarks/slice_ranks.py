"""One rank of `virtual_ranks.py`: fits with virtual ranks and others, in turns, in one world."""

from __future__ import annotations

import statistics
import time
from typing import Any

import launches
import torch
from fit_work import BATCH, LEARNING_RATE, MODELS, make_data
from torch import nn

import cyxtrain as cx

WARM_STEPS = 10


class Steps(cx.callbacks.Callback):
    """Notes when each step ends."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[float] = []

    def on_train_batch_end(self, batch: int, logs: dict[str, Any]) -> None:
        """Notes the time."""
        self.ends.append(time.perf_counter())

    def median_seconds(self) -> float:
        """Returns the median of a step."""
        pairs = zip(self.ends[WARM_STEPS:-1], self.ends[WARM_STEPS + 1 :], strict=True)
        return statistics.median(end - begin for begin, end in pairs)


def fit(model: str, steps: int, slices: int, rows: int, **settings: Any) -> float:
    """Returns the median seconds of a step; `rows` per slice."""
    torch.manual_seed(0)
    module = MODELS[model].make()
    trainer = cx.DistributedTrainer(module, "cross_entropy", torch.optim.Adam(module.parameters(), LEARNING_RATE))
    timed = Steps()
    count = steps * rows * slices
    fitted = {"epochs": 1, "effective_batch_size": rows * slices, "verbose": False, "callbacks": timed, **settings}
    trainer.fit(*make_data(count), **fitted)
    return timed.median_seconds()


def loop(model: str, steps: int, slices: int, rows: int, *, metrics: bool) -> float:
    """Returns the median seconds of a step of the best loop that we know how to write, with as many micro-batches.

    It gathers rows by index; with `metrics`, it also sums loss and accuracy, as `fit` does.
    """
    torch.manual_seed(0)
    module = MODELS[model].make()
    optimizer = torch.optim.Adam(module.parameters(), LEARNING_RATE, fused=True)
    loss_fn = nn.CrossEntropyLoss()
    inputs, targets = make_data(steps * rows * slices)
    timed = Steps()
    batches = iter(torch.randperm(len(inputs)).split(rows))
    loss_sum = torch.zeros((), dtype=torch.float64)
    correct = torch.zeros((), dtype=torch.int64)
    for step in range(steps):
        optimizer.zero_grad()
        for _ in range(slices):
            places = next(batches)
            wanted = targets.index_select(0, places)
            output = module(inputs.index_select(0, places))
            loss = loss_fn(output, wanted)
            (loss / slices).backward()
            if metrics:
                loss_sum += loss.detach() * rows
                correct += (output.argmax(1) == wanted).sum()
        optimizer.step()
        timed.on_train_batch_end(step, {})
    return timed.median_seconds()


def main() -> None:
    task = launches.given()
    rows = task["rows"] or BATCH
    with cx.init():
        ways = {
            "virtual": lambda: fit(task["model"], task["steps"], task["slices"], rows, virtual_ranks=task["slices"]),
            "without": lambda: fit(task["model"], task["steps"], task["slices"], rows),
            "bare loop": lambda: loop(task["model"], task["steps"], task["slices"], rows, metrics=False),
            "loop with metrics": lambda: loop(task["model"], task["steps"], task["slices"], rows, metrics=True),
        }
        found: dict[str, list[float]] = {way: [] for way in task["ways"]}
        for number in range(task["pairs"]):
            order = task["ways"] if number % 2 == 0 else task["ways"][::-1]
            for way in order:
                cx.barrier()
                found[way].append(ways[way]())
        launches.report(found)


if __name__ == "__main__":
    main()
