"""One training step: our wrapper and PyTorch's on the ring, PyTorch's on Gloo, ranks apart, and one rank alone.

    python benchmarks/ddp_step.py [--ranks 2] [--launches 7] [--models mlp convnet] [--batches 16 64 256]
        [--transports tcp auto] [--seconds-per-row 0.8] [--floors] [--json results.json]
    python benchmarks/ddp_step.py --profile [--way cyxtrain-auto] [--models mlp] [--batches 64]

A step is forward, backward with averaging of gradients, and SGD, with one thread per rank, of an MLP of 4.9 million
parameters and of a convnet of 9 thousand. The wrappers have their default settings. Ways take turns, each launch in
new processes; every launch checks that steps have changed the parameters, and that they are the same ones on
every rank, whose batches differ.

- Time of a row in a launch: the median of its steps, on the slowest rank.
- Times faster: PyTorch's DDP on Gloo / this way, in the same round of launches; the median over the launches.
- Efficiency: one rank alone on the machine with the same batch per rank / this way; the median likewise. 1 means that
  N ranks train N times as many samples.

"in-step" and "apart" are the machine's own limits: as many ranks at once, none of which averages. They share caches
and memory, so that their efficiency may be below 1; and they say how much faster than Gloo a step can be at best. Ranks
in step wait for each other once a step, by a byte over a bare socket. What that costs more than "apart" is what cores
cost that are not always equally fast: nobody who averages in every step can save it.

`--profile` runs one way, the first model and the first batch size, and says where a step goes: its parts on rank 0,
each measured by itself, and cProfile's list of functions (which slows Python down, and C not).
`benchmarks/ring_vs_gloo.py` compares single collectives.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import launches
from text_tables import Table

MODELS = ("mlp", "convnet")
TRANSPORTS = ("tcp", "unix", "auto")
GLOO, IN_STEP, APART, ALONE = "pytorch-gloo", "in-step", "apart", "alone"
_BARE = (IN_STEP, APART, ALONE)
_LAUNCH_SECONDS = 600.0


def ways_of(transports: list[str]) -> list[str]:
    """Returns the ways, wrapper-transport: PyTorch's on Gloo, ours and PyTorch's on each transport; the limits."""
    return [GLOO, *(f"{wrapper}-{name}" for wrapper in ("cyxtrain", "pytorch") for name in transports), *_BARE]


def floor_of(model: str, batch_size: int, ranks: int, way: str) -> float | None:
    """Returns how many times faster than PyTorch's DDP on Gloo a step must be, at least; None: nothing is asked."""
    wrapper, _, transport = way.partition("-")
    if wrapper != "cyxtrain" or batch_size != 64 or ranks != 2:
        return None
    if model == "convnet":
        return 1.2
    return 1.15 if transport == "tcp" else 1.3


def efficiency_floor_of(model: str, batch_size: int, ranks: int, way: str) -> float | None:
    """Returns the least efficiency of a way that is as it comes; None: nothing is asked."""
    return 0.9 if (model, batch_size, ranks, way) == ("convnet", 64, 2, "cyxtrain-auto") else None


def run(way: str, ranks: int, rows: list[tuple[str, int]], seconds: float, profile: bool = False) -> list[list[Any]]:
    """Launches one way, and returns what each rank found."""
    wrapper, _, transport = way.partition("-")
    if way in _BARE:
        wrapper, transport = "none", ""
    variables = {"CYXTRAIN_TRANSPORT": transport} if transport not in ("", "gloo") else {}
    task = {
        "wrapper": wrapper,
        "meet_at": [("127.0.0.1", port) for port in launches.free_ports(ranks)] if way == IN_STEP else None,
        "backend": "ring" if variables else None if way == ALONE else "gloo",
        "rows": rows,
        "seconds": seconds,
        "profile": profile,
    }
    ranks = 1 if way == ALONE else ranks
    return launches.launch("step_ranks.py", ranks, task, seconds=_LAUNCH_SECONDS, **variables)


def summaries(row: tuple[str, int], ranks: int, found: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Returns one row of the result for each way.

    Args:
        row: Model and batch size.
        ranks: How many.
        found: By way, the seconds of a step in each launch.
    """
    result = []
    for way, seconds in found.items():
        figures: dict[str, Any] = {"model": row[0], "batch_size": row[1], "way": way}
        figures |= {"seconds": statistics.median(seconds), "seconds_of_launches": seconds}
        if way != ALONE:
            figures["times_faster"] = launches.paired_ratio(found[GLOO], seconds)
            figures["efficiency"] = launches.paired_ratio(found[ALONE], seconds)
            floor, efficiency = floor_of(*row, ranks, way), efficiency_floor_of(*row, ranks, way)
            figures |= {"floor": floor, "efficiency_floor": efficiency, "falls_short": []}
            if floor is not None and figures["times_faster"] < floor:
                figures["falls_short"].append(f"times faster: {floor:g}")
            if efficiency is not None and figures["efficiency"] < efficiency:
                figures["falls_short"].append(f"efficiency: {efficiency:g}")
        result.append(figures)
    return result


def compare(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures everything, and returns the rows."""
    rows = [(model, size) for model in arguments.models for size in arguments.batches]

    def launch(way: str) -> list[float]:
        found = run(way, arguments.ranks, rows, arguments.seconds_per_row)
        return [figures["seconds"] for figures in launches.slowest(found)]

    found = launches.take_turns(ways_of(arguments.transports), arguments.launches, launch)
    by_row = [{way: [launch[index] for launch in found[way]] for way in found} for index in range(len(rows))]
    return [
        figures for row, ways in zip(rows, by_row, strict=True) for figures in summaries(row, arguments.ranks, ways)
    ]


def table_of(rows: list[dict[str, Any]], floors: bool) -> Table:
    """Returns all rows; with floors, a last column says which fall short."""
    columns = ["model", "batch", "way", "ms", "times faster", "efficiency"]
    table = Table("One training step", [*columns, "falls short"] if floors else columns, names=3)
    for figures in rows:
        cells = [figures["model"], str(figures["batch_size"]), figures["way"], f"{figures['seconds'] * 1e3:.2f}"]
        cells += [f"{figures[name]:.2f}" if name in figures else "" for name in ("times_faster", "efficiency")]
        table.add([*cells, ", ".join(figures.get("falls_short", []))] if floors else cells)
    return table


def verdict(rows: list[dict[str, Any]]) -> str:
    """Returns the last line of `--floors`."""
    judged = [figures for figures in rows if figures.get("floor") is not None]
    return f"{sum(bool(figures['falls_short']) for figures in judged)} of {len(judged)} rows fall short of their floors"


def show_profile(arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs one way, prints where a step of rank 0 goes, and returns it."""
    row = (arguments.models[0], arguments.batches[0])
    found = run(arguments.way, arguments.ranks, [row], arguments.seconds_per_row, profile=True)
    [figures] = found[0]
    table = Table(f"{arguments.way}, {row[0]}, batch {row[1]}: a step of rank 0", ["part", "ms", "share"], names=1)
    for part, seconds in figures["parts"].items():
        table.add([part, f"{seconds * 1e3:.3f}", f"{seconds / figures['seconds']:.0%}"])
    table.show()
    print(figures["functions"])
    return {"model": row[0], "batch_size": row[1], "way": arguments.way, **figures}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--launches", type=int, default=7, help="of each way; they take turns")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--batches", type=int, nargs="+", default=[16, 64, 256], help="samples of each rank")
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=["tcp", "auto"])
    parser.add_argument("--seconds-per-row", type=float, default=0.8, help="of a launch; at least 5 steps are made")
    parser.add_argument("--floors", action="store_true", help="mark rows that are not as fast as they must be")
    parser.add_argument("--profile", action="store_true", help="say where a step of one way goes")
    parser.add_argument("--way", choices=ways_of(list(TRANSPORTS)), default="cyxtrain-auto", help="for --profile")
    parser.add_argument("--json", type=Path)
    return parser.parse_args(argv)


def main() -> None:
    arguments = parse()
    results: dict[str, Any] = {"machine": launches.machine()}
    results["settings"] = {name: value for name, value in vars(arguments).items() if name not in ("json", "floors")}
    if arguments.profile:
        results["profile"] = show_profile(arguments)
    else:
        results["rows"] = compare(arguments)
        table_of(results["rows"], arguments.floors).show()
        if arguments.floors:
            print(verdict(results["rows"]))
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
