"""`fit` beside what else people train with: the same work, side by side in one run.

    pip install '.[peers]'
    python benchmarks/fit_vs_peers.py [--ranks 1 2] [--models mlp "large mlp" convnet] [--launches 5] [--floors]
        [--libraries Accelerate Ignite Lightning skorch Keras] [--json results.json] [--plot picture.svg]

A hand-written loop with a DataLoader, the best one that we know how to write (rows gathered by index, the fused
optimizer), Accelerate, Ignite, Lightning, skorch, Keras on PyTorch, and cyxtrain, each as it comes (`peer_ranks.py`
shows them) and with one thread per rank: an MLP 784-256-10, one of 4.4 million parameters (784-1536-1536-512-10) and a
small convnet, Adam, 64 rows per rank and step, on synthetic data shaped like MNIST. Over two ranks the others have
PyTorch's DDP on Gloo; skorch has it by Accelerate, Keras has none. Ways take turns, each launch in processes of its
own.

- Samples per second: rows of all ranks / the time of the training call on the slowest rank; a short one came before.
- Times faster: cyxtrain / this way, in the same round of launches; the median over them.
- At best: a limit of the machine / this way: on one rank the best loop, on two as many of them, each on half of the
  rows and none of which averages ("tuned, apart").
- First step: from the start of the process to the end of its first step, imports included.
- Peak: of a rank's resident memory, the data's 0.19 GB (0.03 and 0.06 for the other models) included.
- Accuracy: of the trained model on 4,096 other rows; what differs by more than a point trains something else.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import launches
from fit_work import MODELS
from text_tables import Table

HAND, TUNED, APART, OURS = "by hand", "by hand, tuned", "tuned, apart", "cyxtrain"
_LIMITS = {1: TUNED, 2: APART}
"""By ranks, what nobody can be much faster than."""
LIBRARIES = {
    "Accelerate": "accelerate",
    "Ignite": "pytorch-ignite",
    "Lightning": "lightning",
    "skorch": "skorch",
    "Keras": "keras",
}
_FOR_ONE, _FOR_TWO = (TUNED, "Keras"), (APART,)
_IMPORT = """
import time
began = time.perf_counter()
import torch
between = time.perf_counter()
import cyxtrain
print(between - began, time.perf_counter() - between)
"""
_IMPORT_LIMIT_SECONDS = 0.3
_LAUNCH_SECONDS = 600.0
_FLOORS = {
    (1, "mlp"): {
        HAND: 1.3,
        TUNED: 0.97,
        "Ignite": 1.4,
        "Accelerate": 1.4,
        "Lightning": 2.2,
        "skorch": 2.2,
        "Keras": 2.6,
    },
    (2, "mlp"): {HAND: 2.5, "Ignite": 2.7, "Accelerate": 2.7, "Lightning": 4.0, "skorch": 4.0},
    (2, "large mlp"): dict.fromkeys((HAND, "Ignite", "Accelerate", "Lightning", "skorch"), 2.2),
    (2, "convnet"): dict.fromkeys((HAND, "Ignite", "Accelerate", "Lightning", "skorch"), 1.25),
}
_SCALING_FLOORS = {"mlp": 1.6, "convnet": 1.8}
_MEMORY_LIMIT = 1.05
_ACCURACY_POINTS = 0.01


def floor_of(ranks: int, model: str, way: str) -> float | None:
    """Returns how many times faster than a way `fit` must be, at least; None: nothing is asked."""
    if way == TUNED:
        return 0.97
    return _FLOORS.get((ranks, model), {}).get(way)


def ways_of(ranks: int, libraries: list[str]) -> list[str]:
    """Returns the ways, those of libraries only where they are installed."""
    found = [HAND, TUNED, APART, OURS, *(name for name in libraries if version_of(LIBRARIES[name]))]
    return [way for way in found if way not in (_FOR_TWO if ranks == 1 else _FOR_ONE)]


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def run(way: str, model: str, ranks: int) -> dict[str, float]:
    """Launches a way, and returns what it came to, of the worst rank."""
    found = launches.launch("peer_ranks.py", ranks, {"way": way, "model": model}, seconds=_LAUNCH_SECONDS)
    return {name: max(rank[name] for rank in found) for name in found[0]}


def summaries(ranks: int, model: str, found: dict[str, list[dict[str, float]]]) -> list[dict[str, Any]]:
    """Returns one row of the result for each way.

    Args:
        ranks: How many.
        model: Its name.
        found: By way, the figures of each launch.
    """
    work, result = MODELS[model], []
    ours = [launch["seconds"] for launch in found[OURS]]
    accuracy = statistics.median(launch["accuracy"] for launch in found[HAND])
    for way, launched in found.items():
        seconds = [launch["seconds"] for launch in launched]
        figures: dict[str, Any] = {"ranks": ranks, "model": model, "way": way, "launches": launched}
        figures["samples_per_second"] = work.rows * work.epochs / statistics.median(seconds)
        for name in ("first_step_seconds", "peak_bytes", "accuracy"):
            figures[name] = statistics.median(launch[name] for launch in launched)
        figures |= {"falls_short": [], "floor": floor_of(ranks, model, way)}
        if _LIMITS[ranks] in found and way != _LIMITS[ranks]:
            at_best = [launch["seconds"] for launch in found[_LIMITS[ranks]]]
            figures["at_best"] = launches.paired_ratio(seconds, at_best)
        if way != OURS:
            figures["times_faster"] = launches.paired_ratio(seconds, ours)
            if figures["floor"] is not None and figures["times_faster"] < figures["floor"]:
                figures["falls_short"].append(f"times faster: {figures['floor']:g}")
        if way != APART and abs(figures["accuracy"] - accuracy) > _ACCURACY_POINTS:
            figures["falls_short"].append("trains something else")
        result.append(figures)
    return result


def judge_memory(rows: list[dict[str, Any]]) -> None:
    """Says where `fit` takes more memory than the loop by hand."""
    by_hand = {(row["ranks"], row["model"]): row["peak_bytes"] for row in rows if row["way"] == HAND}
    for row in rows:
        if row["way"] == OURS:
            row["memory_ratio"] = row["peak_bytes"] / by_hand[row["ranks"], row["model"]]
            if row["memory_ratio"] > _MEMORY_LIMIT:
                row["falls_short"].append(f"{row['memory_ratio']:.2f} of the memory by hand ({_MEMORY_LIMIT})")


def scaling_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns how many times as many samples two ranks of ours train as one, by model."""
    seconds = {
        (row["ranks"], row["model"]): [launch["seconds"] for launch in row["launches"]]
        for row in rows
        if row["way"] == OURS
    }
    return [
        {
            "model": model,
            "two_ranks_against_one": launches.paired_ratio(seconds[1, model], seconds[2, model]),
            "floor": _SCALING_FLOORS.get(model),
        }
        for model in MODELS
        if (1, model) in seconds and (2, model) in seconds
    ]


def compare(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures everything, and returns the rows."""
    rows = []
    for model in arguments.models:
        tasks = {
            f"{way} on {ranks}": (way, ranks)
            for ranks in arguments.ranks
            for way in ways_of(ranks, arguments.libraries)
        }
        found = launches.take_turns(
            list(tasks),
            arguments.launches,
            lambda name, tasks=tasks, model=model: run(tasks[name][0], model, tasks[name][1]),
        )
        for ranks in arguments.ranks:
            of_ranks = {way: found[name] for name, (way, count) in tasks.items() if count == ranks}
            rows += summaries(ranks, model, of_ranks)
    judge_memory(rows)
    return rows


def table_of(rows: list[dict[str, Any]], floors: bool) -> Table:
    """Returns all rows; with floors, a last column says which fall short."""
    columns = ["ranks", "model", "way", "samples/s", "fit is times faster", "at best"]
    columns += ["first step s", "peak MiB", "accuracy"]
    table = Table("Training", [*columns, "falls short"] if floors else columns, names=3)
    for row in rows:
        faster = f"{row['times_faster']:.2f}" if "times_faster" in row else ""
        if floors and row["floor"] is not None:
            faster += f" ({row['floor']:g})"
        cells = [str(row["ranks"]), row["model"], row["way"], f"{row['samples_per_second']:,.0f}", faster]
        cells += [f"{row['at_best']:.2f}" if "at_best" in row else "", f"{row['first_step_seconds']:.1f}"]
        cells += [f"{row['peak_bytes'] / 2**20:,.0f}", f"{row['accuracy']:.3f}"]
        table.add([*cells, "; ".join(row["falls_short"])] if floors else cells)
    return table


def import_times(rounds: int) -> dict[str, float]:
    """Returns how long it takes to import torch, and then cyxtrain: medians, when all has been compiled once."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", _IMPORT]
    printed = [
        subprocess.run(command, check=True, capture_output=True, text=True, env=kept).stdout.split()
        for _ in range(1 + rounds)
    ][1:]
    torch, ours = (statistics.median(map(float, column)) for column in zip(*printed, strict=True))
    return {"torch_seconds": torch, "cyxtrain_seconds": ours}


def show_verdict(rows: list[dict[str, Any]], scaling: list[dict[str, Any]]) -> None:
    """Prints the last lines of `--floors`."""
    for row in scaling:
        floor = "" if row["floor"] is None else f" ({row['floor']:g})"
        print(f"two ranks of fit against one, {row['model']}: {row['two_ranks_against_one']:.2f}{floor}")
    judged = [row for row in rows if row["floor"] is not None or row["way"] == OURS]
    print(f"{sum(bool(row['falls_short']) for row in judged)} of {len(judged)} rows fall short")


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Draws samples per second: a column of panels for each model, a row for each number of ranks."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    models, worlds, names = (list(dict.fromkeys(row[key] for row in rows)) for key in ("model", "ranks", "way"))
    size = 3.2 * len(models), 2.1 * len(worlds)
    figure, axes = plt.subplots(len(worlds), len(models), figsize=size, squeeze=False, layout="constrained", dpi=130)
    for axis, (ranks, model) in zip(axes.flat, itertools.product(worlds, models), strict=True):
        shown = {
            row["way"]: row["samples_per_second"] for row in rows if (row["model"], row["ranks"]) == (model, ranks)
        }
        ways = [name for name in reversed(names) if name in shown]
        bars = axis.barh(
            ways, [shown[way] for way in ways], color=["#c2410c" if way == OURS else "#94a3b8" for way in ways]
        )
        axis.bar_label(bars, labels=[f"{shown[way]:,.0f}" for way in ways], padding=2, fontsize=7)
        axis.set_title(f"{model}, {ranks} rank{'s' if ranks > 1 else ''}", fontsize=9)
        axis.margins(x=0.25)
        axis.tick_params(labelsize=7)
        axis.set_xticks([])
        axis.spines[["top", "right", "bottom"]].set_visible(False)
    figure.supxlabel("samples per second; longer is better", fontsize=8)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", choices=(1, 2), default=[1, 2])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--libraries", nargs="*", choices=list(LIBRARIES), default=list(LIBRARIES))
    parser.add_argument("--launches", type=int, default=5, help="of each way; they take turns")
    parser.add_argument("--floors", action="store_true", help="mark rows that are not as fast as they must be")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="an .svg or .png file")
    return parser.parse_args(argv)


def main() -> None:
    arguments = parse()
    os.environ.setdefault("KERAS_BACKEND", "torch")
    missing = [name for name in arguments.libraries if version_of(LIBRARIES[name]) is None]
    if missing:
        print(f"not installed, and left out: {', '.join(missing)}")
    results: dict[str, Any] = {"machine": launches.machine()}
    results["versions"] = {name: version_of(package) for name, package in LIBRARIES.items()}
    results["import"] = import_times(arguments.launches)
    results["rows"] = compare(arguments)
    results["scaling"] = scaling_of(results["rows"])
    table_of(results["rows"], arguments.floors).show()
    seconds = results["import"]
    print(
        f"import torch takes {seconds['torch_seconds']:.2f} s, import cyxtrain {seconds['cyxtrain_seconds']:.2f} s more"
        f" ({_IMPORT_LIMIT_SECONDS:g} at most)"
    )
    if arguments.floors:
        show_verdict(results["rows"], results["scaling"])
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    if arguments.plot:
        plot(results["rows"], arguments.plot)


if __name__ == "__main__":
    main()
