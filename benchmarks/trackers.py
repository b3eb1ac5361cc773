"""What a tracker costs a fit: numbers after every step, for a service that discards them.

    python benchmarks/trackers.py [--milliseconds 20] [--steps 150 450] [--pairs 10] [--floors] [--json results.json]

One process trains the same MLP with a tracker and without, in turns. A batch has as many samples as a step of about so
many milliseconds needs. The tracker sends rank 0's loss, accuracy and learning rate of each step; its methods do
nothing, because a real service on the same cores would cost more than the callback. The ratio is the median over pairs
of the seconds of whole fits, with their start and end. A machine whose speed varies hides a few percent in them: so the
seconds that training spends in the tracker's hooks are measured, too. Two lengths of fits tell apart what each fit
costs, and each step.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from fit_work import make_data, make_mlp
from launches import paired_quartiles, save_results, take_turns
from text_tables import Table

import cyxtrain as cx
from cyxtrain.callbacks import Tracker

CEILING = 1.03
"""What the ratio must not exceed."""
WAYS = ("tracker", "none")
_CALIBRATING_STEPS = 5


def timed(hook: Callable[..., None]) -> Callable[..., None]:
    """Returns a hook of `Discard` that adds up its seconds."""

    @functools.wraps(hook)
    def call(tracker: Discard, *arguments: Any) -> None:
        began = time.perf_counter()
        hook(tracker, *arguments)
        tracker.hook_seconds += time.perf_counter() - began

    return call


class Discard(Tracker):
    """Sends nothing, and counts."""

    num_points = 0
    hook_seconds = 0.0
    on_fit_start = timed(Tracker.on_fit_start)
    on_train_batch_end = timed(Tracker.on_train_batch_end)
    on_epoch_end = timed(Tracker.on_epoch_end)
    close = timed(Tracker.close)

    def start(self, run_id: str, settings: Mapping[str, str]) -> str:
        """Returns an id."""
        return "run"

    def log(self, points: list[Any]) -> None:
        """Counts."""
        self.num_points += len(points)

    def artifact(self, path: Path) -> None:
        """Does nothing."""

    def finish(self, status: str) -> None:
        """Does nothing."""


def fit(callbacks: list[cx.callbacks.Callback], batch_size: int, steps: int) -> float:
    """Returns the seconds of a fit of one epoch."""
    torch.manual_seed(0)
    model = make_mlp(512, 512)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    trainer = cx.DistributedTrainer(model, "cross_entropy", optimizer)
    data = make_data(batch_size * steps)
    began = time.perf_counter()
    trainer.fit(*data, epochs=1, batch_size=batch_size, verbose=False, callbacks=callbacks)
    return time.perf_counter() - began


def run(way: str, batch_size: int, steps: int) -> tuple[float, float]:
    """Returns the seconds of a fit with or without a tracker, and those of them in its hooks."""
    if way == "none":
        return fit([], batch_size, steps), 0.0
    with tempfile.TemporaryDirectory() as folder:
        tracker = Discard(log_every_n_steps=1, folder=folder)
        seconds = fit([tracker], batch_size, steps)
    # Three numbers of each step, and four of the epoch: loss, accuracy, rate and speed.
    if tracker.num_points < 3 * steps + 4:
        raise AssertionError(f"{tracker.num_points} points of {steps} steps arrived")
    return seconds, tracker.hook_seconds


def batch_size_for(milliseconds: float) -> int:
    """Returns how many samples a batch needs, a power of two, for a step to take so long."""
    size = 16
    fit([], size, _CALIBRATING_STEPS)  # what is done once in a process
    while True:
        more = fit([], size, 3 * _CALIBRATING_STEPS) - fit([], size, _CALIBRATING_STEPS)
        if 1000 * more / (2 * _CALIBRATING_STEPS) >= milliseconds:
            return size
        size *= 2


def compare(milliseconds: float, lengths: list[int], pairs: int) -> list[dict[str, Any]]:
    """Returns for each number of steps the seconds of both ways by pair, the quartiles of their ratios, and of hooks.

    With several, also what hooks cost a fit, and each of its steps, in seconds: a line through their medians.
    """
    size = batch_size_for(milliseconds)
    rows = []
    costs = []
    for steps in lengths:
        runs = take_turns(WAYS, pairs, lambda way, steps=steps: run(way, size, steps))
        found = {way: [seconds for seconds, _ in runs[way]] for way in WAYS}
        costs.append(statistics.median(seconds for _, seconds in runs["tracker"]))
        row = {"milliseconds": milliseconds, "batch_size": size, "steps": steps, "hook_seconds": costs[-1]}
        rows.append({**row, **found, "ratio": paired_quartiles(found["tracker"], found["none"])})
    if len(lengths) > 1:
        line = statistics.linear_regression(lengths, costs)
        rows = [{**row, "fit_seconds": line.intercept, "step_seconds": line.slope} for row in rows]
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--milliseconds", type=float, nargs="+", default=[20], help="at least, of a step")
    parser.add_argument("--steps", type=int, nargs="+", default=[150, 450], help="of a fit")
    parser.add_argument("--pairs", type=int, default=10, help="fits of each; they take turns")
    parser.add_argument("--floors", action="store_true", help=f"fail if a ratio is above {CEILING}")
    parser.add_argument("--json", type=Path, help="where the figures go")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with cx.init(cx.DistributedConfig(rank=0, world_size=1)):
        rows = [row for each in given.milliseconds for row in compare(each, given.steps, given.pairs)]
    columns = ["step, ms", "batch", "steps", "with, s", "without, s", "with / without", "quartiles", "hooks"]
    table = Table("a point per step", columns)
    for row in rows:
        medians = [statistics.median(row[way]) for way in WAYS]
        step = f"{1000 * medians[1] / row['steps']:.0f}"
        lower, median, upper = row["ratio"]
        shown = [step, str(row["batch_size"]), str(row["steps"]), *(f"{seconds:.2f}" for seconds in medians)]
        table.add([*shown, f"{median:.3f}", f"{lower:.3f}-{upper:.3f}", f"{row['hook_seconds'] / medians[1]:.2%}"])
    table.show()
    for row in rows:
        if "fit_seconds" in row and row["steps"] == given.steps[0]:
            print(
                f"batch {row['batch_size']}, hooks: {1000 * row['fit_seconds']:.1f} ms a fit, and "
                f"{1000 * row['step_seconds']:.3f} ms a step"
            )
    save_results(given.json, rows)
    return int(given.floors and any(row["ratio"][1] > CEILING for row in rows))


if __name__ == "__main__":
    sys.exit(main())
