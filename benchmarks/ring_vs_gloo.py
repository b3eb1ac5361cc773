"""The ring against PyTorch's Gloo, collective by collective, beside what the machine can do at best.

    python benchmarks/ring_vs_gloo.py [--ranks 2 3 4] [--launches 7] [--operations all_reduce ...] [--sizes 4 1024 ...]
        [--transports tcp auto] [--seconds-per-size 0.1] [--floors] [--json results.json]

Gloo, the ring on each transport, and a raw program (`limits.py` says what the limit is) take turns, each in new
processes with one thread per rank. Every launch checks the result of every row, before the timed calls, and makes those
of the first row for a while before they count: processes that have just started have not found their cores yet.

- Time of a row in a launch: the median of its calls, on the rank where it is largest. The median, not a lower
  quartile: with more ranks than cores, waiting for a core is part of what a call costs; not the mean: one call that
  something else interrupted must not count for hundreds. A broadcast is timed in rounds in which every rank is the
  source once, divided by their number.
- Times faster: Gloo's time / the ring's time in the same round of launches; the median of that over the launches.
  A noisy machine changes from minute to minute, and both then change together.
- Share: the limit / the ring's time in the same round; the median of that too.
- Falls short: with `--floors`, the transports that are not as many times faster as this project asks of itself, and the
  number asked (`floor_of`). It means something after 7 launches on a machine with nothing else to do.

The size is that of the tensor (all_reduce, broadcast), of the gathered output (all_gather) or of the input
(reduce_scatter), float32; what is split between ranks has at least one element for each.
"auto" is the ring as it comes, on one host; "tcp" holds it to TCP (CYXTRAIN_TRANSPORT).
`benchmarks/ddp_step.py` does the same for whole training steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import launches
import limits
from text_tables import Table

OPERATIONS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "barrier")
SIZES = (4, 1 << 10, 16 << 10, 256 << 10, 1 << 20, 4 << 20, 25 << 20, 100 << 20)
TRANSPORTS = ("tcp", "unix", "auto")
_MIB = 1 << 20
_LAUNCH_SECONDS = 600.0


def floor_of(operation: str, size: int, ranks: int, transport: str) -> float:
    """Returns how many times faster than Gloo a row must be, at least.

    Three ranks have no separate floors for all_reduce: never slower. The same holds for what is small on the same
    host in the other collectives. The floors of 4 ranks are meant for two cores.
    """
    tcp = transport == "tcp"
    if operation != "all_reduce":
        return 2.0 if not tcp and size >= _MIB else 1.0
    if ranks not in (2, 4):
        return 1.0
    if not tcp:
        return {2: (4.0, 3.3), 4: (3.0, 2.5)}[ranks][size > _MIB]
    by_size = {2: (3.0, 3.0, 1.7, 1.4), 4: (3.0, 2.5, 1.4, 1.0)}[ranks]
    return by_size[sum(size > bound for bound in (256 << 10, _MIB, 4 * _MIB))]


def rows_of(operations: list[str], sizes: list[int]) -> list[tuple[str, int]]:
    """Returns (operation, size); a barrier has none."""
    sized = [(operation, size) for operation in operations if operation != "barrier" for size in sizes]
    return sized + [("barrier", 0)] * ("barrier" in operations)


def compare(ranks: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures everything for one number of ranks, and returns its rows."""
    rows = rows_of(arguments.operations, arguments.sizes)
    parts = [
        part for row in rows for transport in arguments.transports for part in limits.needed(*row, ranks, transport)
    ]

    def run(way: str) -> list[dict[str, Any]]:
        if way == "raw":
            return limits.measure(parts, ranks, arguments.seconds_per_size / 2)
        task = {"backend": "gloo" if way == "gloo" else "ring", "rows": rows, "seconds": arguments.seconds_per_size}
        variables = {} if way == "gloo" else {"CYXTRAIN_TRANSPORT": way}
        found = launches.launch("collective_ranks.py", ranks, task, seconds=_LAUNCH_SECONDS, **variables)
        return launches.slowest(found)

    print(f"{ranks} ranks", file=sys.stderr, flush=True)
    found = launches.take_turns(["gloo", *arguments.transports, "raw"], arguments.launches, run)
    raw = found.pop("raw")
    return [
        summary(ranks, row, {way: [launch[index] for launch in found[way]] for way in found}, raw)
        for index, row in enumerate(rows)
    ]


def summary(
    ranks: int, row: tuple[str, int], found: dict[str, list[dict[str, Any]]], raw: list[list[dict[str, Any]]]
) -> dict[str, Any]:
    """Returns one row of the result.

    Args:
        ranks: How many.
        row: Operation and size.
        found: By way, what each launch found for this row.
        raw: What each launch of the raw program found.
    """
    operation, size = row
    result: dict[str, Any] = {"ranks": ranks, "operation": operation, "bytes": size, "transports": {}}
    for way, launched in found.items():
        errors = [figures["error"] for figures in launched if "error" in figures]
        seconds = [figures["seconds"] for figures in launched]
        figures: dict[str, Any] = {"error": errors[0]} if errors else _times(launched)
        if way == "gloo":
            result["gloo"] = figures
            continue
        result["transports"][way] = figures
        if errors:
            continue
        limit = [limits.limit_seconds(operation, size, ranks, way, launch) for launch in raw]
        figures["limit_seconds"] = statistics.median(limit)
        figures["share_of_limit"] = launches.paired_ratio(limit, seconds)
        if "error" not in result["gloo"]:
            gloo = result["gloo"]["seconds_of_launches"]
            figures["times_faster"] = launches.paired_ratio(gloo, seconds)
            figures["times_faster_of_launches"] = [g / s for g, s in zip(gloo, seconds, strict=True)]
            figures["floor"] = floor_of(operation, size, ranks, way)
            figures["falls_short"] = figures["times_faster"] < figures["floor"]
    return result


def _times(launched: list[dict[str, Any]]) -> dict[str, Any]:
    seconds = [figures["seconds"] for figures in launched]
    quartiles = [figures["lower_quartile_seconds"] for figures in launched]
    return {
        "seconds": statistics.median(seconds),
        "lower_quartile_seconds": statistics.median(quartiles),
        "seconds_of_launches": seconds,
        "calls_of_launches": [figures["calls"] for figures in launched],
    }


def size_text(size: int) -> str:
    """Returns a size as people write it."""
    for unit, name in ((_MIB, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:g} {name}"
    return f"{size} B" if size else ""


def table_of(rows: list[dict[str, Any]], floors: bool) -> Table:
    """Returns the rows of one number of ranks; with floors, a last column says which fall short."""
    transports = list(rows[0]["transports"])
    columns = ["operation", "size", "gloo us"]
    for transport in transports:
        columns += [f"{transport} us", "times faster", "limit us", "share"]
    table = Table(f"{rows[0]['ranks']} ranks", [*columns, "falls short"] if floors else columns)
    for row in rows:
        gloo = row["gloo"]
        cells = [row["operation"], size_text(row["bytes"])]
        cells.append("has none" if "error" in gloo else f"{gloo['seconds'] * 1e6:,.0f}")
        for figures in row["transports"].values():
            cells += _cells(figures)
        if floors:
            cells.append(", ".join(f"{name}: {f['floor']:g}" for name, f in row["transports"].items() if is_short(f)))
        table.add(cells)
    return table


def _cells(figures: dict[str, Any]) -> list[str]:
    if "error" in figures:
        return ["has none", "", "", ""]
    faster = f"{figures['times_faster']:.2f}" if "times_faster" in figures else ""
    micros = [f"{figures[name] * 1e6:,.0f}" for name in ("seconds", "limit_seconds")]
    return [micros[0], faster, micros[1], f"{figures['share_of_limit']:.0%}"]


def is_short(figures: dict[str, Any]) -> bool:
    """Returns whether a row of a transport is below its floor."""
    return bool(figures.get("falls_short", False))


def verdict(rows: list[dict[str, Any]]) -> str:
    """Returns the last line of `--floors`."""
    judged = [figures for row in rows for figures in row["transports"].values() if "floor" in figures]
    return f"{sum(map(is_short, judged))} of {len(judged)} comparisons fall short of their floor"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--launches", type=int, default=7, help="of each way; they take turns")
    parser.add_argument("--operations", nargs="+", choices=OPERATIONS, default=list(OPERATIONS))
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="bytes")
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=["tcp", "auto"])
    parser.add_argument("--seconds-per-size", type=float, default=0.1, help="of a launch; at least 3 calls are made")
    parser.add_argument("--floors", action="store_true", help="mark what falls short, with the times faster it must be")
    parser.add_argument("--json", type=Path)
    return parser.parse_args(argv)


def main() -> None:
    arguments = parse()
    rows: list[dict[str, Any]] = []
    for ranks in arguments.ranks:
        found = compare(ranks, arguments)
        table_of(found, arguments.floors).show()
        rows += found
    if arguments.floors:
        print(verdict(rows))
    if arguments.json:
        settings = {name: value for name, value in vars(arguments).items() if name not in ("json", "floors")}
        results = {"machine": launches.machine(), "settings": settings, "rows": rows}
        arguments.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
