"""Two checkouts of Cyxtrain against each other: the same `fit` and the same collectives, in turns in one run.

    git worktree add ../old v0.1.0
    python benchmarks/old_vs_new.py --old ../old --new . [--pairs 20] [--models mlp "large mlp" convnet] [--ranks 1 2]
        [--sizes 4 1024 ...] [--transports tcp auto] [--joins 20] [--json results.json]

`fit` is the work of `fit_vs_peers.py`, a collective that of `ring_vs_gloo.py`; a join is `init`, a barrier and
`finalize`, again and again. Each launch has new processes with one thread per rank. A pair is one launch of the
old code and one of the new, directly after each other and in alternating order, so that both meet the same machine.
Printed is the median of old time / new time over the pairs, with its quartiles: 1.00 is as fast as before, 0.95 is five
percent slower. Use a machine with nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import launches
from fit_work import MODELS
from ring_vs_gloo import OPERATIONS, rows_of, size_text
from text_tables import Table

_SIZES = (4, 16 << 10, 1 << 20, 25 << 20)
_LAUNCH_SECONDS = 600.0
_SLOWER = 0.95


def path_variable(checkout: Path) -> dict[str, str]:
    """Returns the variable that makes ranks import the package of a checkout."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(checkout.resolve()), os.environ.get("PYTHONPATH"))))}


def fit_times(checkout: Path, model: str, ranks: int) -> dict[str, float]:
    """Launches a fit; returns the seconds of the slowest rank."""
    task = {"way": "cyxtrain", "model": model}
    found = launches.launch("peer_ranks.py", ranks, task, seconds=_LAUNCH_SECONDS, **path_variable(checkout))
    return {f"fit {model}": max(rank["seconds"] for rank in found)}


def collective_times(checkout: Path, transport: str, ranks: int, sizes: list[int], seconds: float) -> dict[str, float]:
    """Launches collectives; returns the seconds of each on the slowest rank."""
    task = {"backend": "ring", "rows": rows_of(list(OPERATIONS), sizes), "seconds": seconds}
    variables = {"CYXTRAIN_TRANSPORT": transport, **path_variable(checkout)}
    found = launches.launch("collective_ranks.py", ranks, task, seconds=_LAUNCH_SECONDS, **variables)
    rows = launches.slowest(found)
    return {f"{row['operation']} {size_text(row['bytes'])} ({transport})": row["seconds"] for row in rows}


def join_times(checkout: Path, joins: int, ranks: int) -> dict[str, float]:
    """Launches ranks that join and leave; returns the seconds of one time, in the median, on the slowest rank."""
    found = launches.launch(
        "join_ranks.py", ranks, {"joins": joins}, seconds=_LAUNCH_SECONDS, **path_variable(checkout)
    )
    return {"join and leave": max(rank["seconds"] for rank in found)}


def compare(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures everything; returns a row for each work and number of ranks."""
    tasks: list[tuple[int, Any, tuple[Any, ...]]] = []
    for ranks in arguments.ranks:
        tasks += [(ranks, fit_times, (model, ranks)) for model in arguments.models]
        if ranks > 1:
            given = (ranks, arguments.sizes, arguments.seconds_per_size)
            tasks += [(ranks, collective_times, (transport, *given)) for transport in arguments.transports]
            tasks += [(ranks, join_times, (arguments.joins, ranks))] if arguments.joins else []
    checkouts = {"old": arguments.old, "new": arguments.new}
    rows = []
    for ranks, measure, given in tasks:
        print(f"{measure.__name__}: {given[0]}, {ranks} ranks", file=sys.stderr, flush=True)
        found = launches.take_turns(
            list(checkouts), arguments.pairs, lambda way, measure=measure, given=given: measure(checkouts[way], *given)
        )
        for name in found["new"][0]:
            old, new = ([launch[name] for launch in found[way]] for way in checkouts)
            lower, median, upper = launches.paired_quartiles(old, new)
            rows.append({"ranks": ranks, "work": name, "median": median, "quartiles": [lower, upper]})
            rows[-1] |= {"old_seconds": old, "new_seconds": new}
    return rows


def table_of(rows: list[dict[str, Any]]) -> Table:
    """Returns the rows, those marked that became slower by more than five percent."""
    table = Table("Old time / new time", ["work", "ranks", "old/new", "quartiles", "slower"])
    for row in rows:
        lower, upper = row["quartiles"]
        slower = f"below {_SLOWER:g}" if row["median"] < _SLOWER else ""
        table.add([row["work"], str(row["ranks"]), f"{row['median']:.3f}", f"{lower:.2f} to {upper:.2f}", slower])
    return table


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", type=Path, required=True, help="a checkout of the code before")
    parser.add_argument("--new", type=Path, required=True, help="a checkout of the code now")
    parser.add_argument("--pairs", type=int, default=20, help="launches of each; they take turns")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--transports", nargs="*", choices=("tcp", "unix", "auto"), default=["tcp", "auto"])
    parser.add_argument("--sizes", type=int, nargs="+", default=list(_SIZES), help="bytes, of a collective's tensor")
    parser.add_argument("--seconds-per-size", type=float, default=0.05, help="of a launch; at least 3 calls are made")
    parser.add_argument("--joins", type=int, default=20, help="of a launch; 0: none")
    parser.add_argument("--json", type=Path)
    return parser.parse_args(argv)


def main() -> None:
    arguments = parse()
    rows = compare(arguments)
    table_of(rows).show()
    slower = sum(row["median"] < _SLOWER for row in rows)
    print(f"{slower} of {len(rows)} medians are below {_SLOWER:g}, over {arguments.pairs} pairs each")
    if arguments.json:
        results = {"machine": launches.machine(), "pairs": arguments.pairs, "rows": rows}
        arguments.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
