"""What checkpoints cost: how long training waits while one is made, and what a fit takes longer for them.

    python benchmarks/checkpoint.py [--parts save fit] [--rounds 7] [--folder DISK] [--floors] [--json results.json]
        [--megabytes 1 20 100] [--models small large] [--ranks 1 2] [--seconds 6] [--epochs 3] [--batch-size 64]

"save": one process trains a model, and saves it and Adam's state in one way after the other (`saving_ways.py` says
which), each round in another order, after a first round that does not count. Each time what was saved is read and
compared, bit for bit. The figures are medians over the rounds:

- Stall: until training may continue. It contains what collects the state, such as `state_dict()`.
- Times writer: that stall / our Writer's in the same round, its median and quartiles. Above 1 our Writer is shorter.
- Lost: the stall, and what the steps until the files are complete take longer than those before it: who writes beside
  the training takes time from it. It is the noise of steps, and may be negative, where nothing is written for long.
- Complete: from the beginning until the files are complete and, except for torch-save, synchronised.
- Load: to read and check it all, from the system's cache.

"fit": a whole fit with a checkpoint after every epoch, without any, and without the comparison of replicas, in launches
that take turns, with one thread per rank. All must end with the same weights, bit for bit, and the last checkpoint must
hold them. The rows are as many as train for about `--seconds`.

- On / off: the time of the fit with it / without it, on the slowest rank, in the same round; median and quartiles.
- Each: what the fit took longer, divided by its epochs; the median over the rounds.
- At the end: how much of that longer time comes after the last epoch: there a fit waits for the disk.
- Falls short: with `--floors`, what costs a fit more than it may (`floor_of`), and how much that is. It means something
  after 7 rounds on a machine with nothing else to do, and for epochs as long as one's own.

One rank alone has no replicas to compare: that row is the noise of the machine. All of it takes about half an hour.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import launches
from text_tables import Table

PARTS, MODELS = ("save", "fit"), ("small", "large")
WRITER = "writer"
PLAIN, SAVING, UNCHECKED = "plain", "checkpoints", "unchecked"
WAYS_OF_FITS: dict[str, dict[str, Any]] = {
    PLAIN: {"saves": False, "check_replicas_every_n_steps": None},
    SAVING: {"saves": True, "check_replicas_every_n_steps": None},
    UNCHECKED: {"saves": False, "check_replicas_every_n_steps": 0},
}
SWITCHES = {"checkpoints": (SAVING, PLAIN), "replica checks": (PLAIN, UNCHECKED)}
"""What can be on and off: the way of a fit with it, and the way without."""
_MOST_RATIO = 1.02
_FIGURES = ("stall", "lost", "complete", "load")
_CALIBRATING_STEPS = 50
_SAVE_SECONDS, _FIT_SECONDS = 3600.0, 600.0


# --- saving -----------------------------------------------------------------------------------------------------------


def compare_saves(megabytes: float, rounds: int, folder: Path) -> list[dict[str, Any]]:
    """Measures one size of state, and returns a row for each way."""
    print(f"saving {megabytes:g} MB", file=sys.stderr, flush=True)
    task = {"megabytes": megabytes, "rounds": rounds, "folder": str(folder / "saves")}
    [found] = launches.launch("save_ranks.py", 1, task, seconds=_SAVE_SECONDS)
    return summaries_of_saves(megabytes, found)


def summaries_of_saves(megabytes: float, found: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Returns one row of the result for each way.

    Args:
        megabytes: Of the state, as asked for.
        found: By way, the figures of each round.
    """
    writer = [figures["stall_seconds"] for figures in found[WRITER]]
    rows = []
    for way, rounds in found.items():
        row: dict[str, Any] = {"megabytes": megabytes, "way": way, "file_bytes": rounds[-1]["file_bytes"]}
        for name in _FIGURES:
            seconds = [figures[f"{name}_seconds"] for figures in rounds]
            row |= {f"{name}_seconds": statistics.median(seconds), f"{name}_seconds_of_rounds": seconds}
        row["times_writer_quartiles"] = launches.paired_quartiles(row["stall_seconds_of_rounds"], writer)
        rows.append(row)
    return rows


def table_of_saves(rows: list[dict[str, Any]]) -> Table:
    """Returns the rows of all sizes."""
    columns = ["MB", "way", "stall ms", "times writer", "quartiles", "lost ms", "complete ms", "load ms", "file MB"]
    table = Table("A checkpoint of a model and Adam's state", columns)
    for row in rows:
        stall, *others = (f"{row[f'{name}_seconds'] * 1e3:,.1f}" for name in _FIGURES)
        cells = [f"{row['megabytes']:g}", row["way"], stall, *ratio_cells(row["times_writer_quartiles"], digits=2)]
        table.add([*cells, *others, f"{row['file_bytes'] / 1e6:.1f}"])
    return table


def ratio_cells(quartiles: Sequence[float], digits: int) -> list[str]:
    """Returns the cells of a ratio: its median, and its quartiles."""
    lower, median, upper = (f"{value:.{digits}f}" for value in quartiles)
    return [median, f"{lower} .. {upper}"]


# --- fits -------------------------------------------------------------------------------------------------------------


def floor_of(switch: str, ranks: int) -> float | None:
    """Returns the ratio on / off that may not be exceeded; None: nothing is asked."""
    return _MOST_RATIO if switch == "checkpoints" or ranks > 1 else None


def run_fit(ranks: int, task: dict[str, Any], folder: Path | None) -> dict[str, Any]:
    """Launches one fit, and returns what its slowest rank found.

    Raises:
        AssertionError: The ranks ended with different weights.
    """
    found = launches.launch(
        "fit_ranks.py", ranks, task | {"folder": None if folder is None else str(folder)}, seconds=_FIT_SECONDS
    )
    if len({figures["digest"] for [figures] in found}) != 1:
        raise AssertionError(f"the weights of {task['model']} differ between {ranks} ranks")
    [slowest] = launches.slowest(found)
    return slowest


def compare_fits(model: str, ranks: int, arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Measures one model on one number of ranks, and returns a row for each switch."""
    print(f"fit of {model}, ranks: {ranks}", file=sys.stderr, flush=True)
    task = {"model": model, "batch_size": arguments.batch_size, "epochs": arguments.epochs}
    brief = task | {"epochs": 1, "steps": _CALIBRATING_STEPS, "check_replicas_every_n_steps": 0}
    step_seconds = run_fit(ranks, brief, None)["seconds"] / _CALIBRATING_STEPS
    task["steps"] = max(1, round(arguments.seconds / arguments.epochs / step_seconds))

    def run(way: str) -> dict[str, Any]:
        settings = dict(WAYS_OF_FITS[way])
        return run_fit(ranks, task | settings, folder / "fit" if settings.pop("saves") else None)

    found = launches.take_turns(list(WAYS_OF_FITS), arguments.rounds, run)
    return summaries_of_fits(task, ranks, found)


def summaries_of_fits(task: dict[str, Any], ranks: int, found: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Returns one row of the result for each switch.

    Args:
        task: What all fits did alike.
        ranks: How many.
        found: By way, what each launch found.

    Raises:
        AssertionError: Not all fits ended with the same weights.
    """
    if len({figures["digest"] for launched in found.values() for figures in launched}) != 1:
        raise AssertionError(f"fits of {task['model']} on {ranks} ranks ended with different weights")
    rows = []
    for switch, ways in SWITCHES.items():
        on, off = ([figures["seconds"] for figures in found[way]] for way in ways)
        outside_on, outside_off = ([figures["outside_seconds"] for figures in found[way]] for way in ways)
        quartiles, floor = launches.paired_quartiles(on, off), floor_of(switch, ranks)
        row = {"model": task["model"], "ranks": ranks, "switch": switch, "steps_per_epoch": task["steps"]}
        row |= {"on_seconds": statistics.median(on), "off_seconds": statistics.median(off)}
        row |= {"on_seconds_of_launches": on, "off_seconds_of_launches": off, "on_off_quartiles": quartiles}
        row["each_seconds"] = median_difference(on, off) / task["epochs"]
        row["end_seconds"] = median_difference(outside_on, outside_off)
        rows.append(row | {"floor": floor, "falls_short": floor is not None and quartiles[1] > floor})
    return rows


def median_difference(minuends: Sequence[float], subtrahends: Sequence[float]) -> float:
    """Returns the median of the differences of what was measured in the same round."""
    return statistics.median(m - s for m, s in zip(minuends, subtrahends, strict=True))


def table_of_fits(rows: list[dict[str, Any]], floors: bool) -> Table:
    """Returns all rows; with floors, a last column says which fall short."""
    columns = ["model", "ranks", "what", "steps/epoch", "on s", "off s", "on / off", "quartiles", "each ms"]
    columns.append("at the end ms")
    table = Table("What a fit takes longer", [*columns, "falls short"] if floors else columns, names=3)
    for row in rows:
        cells = [row["model"], str(row["ranks"]), row["switch"], str(row["steps_per_epoch"])]
        cells += [f"{row[name]:.2f}" for name in ("on_seconds", "off_seconds")]
        cells += ratio_cells(row["on_off_quartiles"], digits=3)
        cells += [f"{row[name] * 1e3:,.1f}" for name in ("each_seconds", "end_seconds")]
        table.add([*cells, f"{row['floor']:g}" if row["falls_short"] else ""] if floors else cells)
    return table


def verdict(rows: list[dict[str, Any]]) -> str:
    """Returns the last line of `--floors`."""
    judged = [row for row in rows if row["floor"] is not None]
    return f"{sum(row['falls_short'] for row in judged)} of {len(judged)} rows fall short of their floors"


# --- all of it --------------------------------------------------------------------------------------------------------


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=7, help="saves of each way, and launches of each way of a fit")
    parser.add_argument("--folder", type=Path, help="on the disk that is measured; a temporary folder is made in it")
    parser.add_argument("--megabytes", type=float, nargs="+", default=[1, 20, 100], help="of state, for save; say, 400")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="for fit")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="for fit")
    parser.add_argument("--seconds", type=float, default=6.0, help="of training in each fit, about")
    parser.add_argument("--epochs", type=int, default=3, help="of each fit; a checkpoint is made after every one")
    parser.add_argument("--batch-size", type=int, default=64, help="samples of each rank, for fit")
    parser.add_argument("--floors", action="store_true", help="mark what costs a fit more than it may")
    parser.add_argument("--json", type=Path)
    return parser.parse_args(argv)


def main() -> None:
    arguments = parse()
    saves: list[dict[str, Any]] = []
    fits: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="benchmark", dir=arguments.folder) as name:
        if "save" in arguments.parts:
            for megabytes in arguments.megabytes:
                saves += compare_saves(megabytes, arguments.rounds, Path(name))
            table_of_saves(saves).show()
        if "fit" in arguments.parts:
            for model in arguments.models:
                for ranks in arguments.ranks:
                    fits += compare_fits(model, ranks, arguments, Path(name))
            table_of_fits(fits, arguments.floors).show()
    if arguments.floors:
        print(verdict(fits))
    if arguments.json:
        unset = ("json", "floors", "folder")
        settings = {key: value for key, value in vars(arguments).items() if key not in unset}
        settings["folder"] = None if arguments.folder is None else str(arguments.folder)
        results = {"machine": launches.machine(), "settings": settings, "saves": saves, "fits": fits}
        arguments.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
