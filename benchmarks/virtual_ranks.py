"""What virtual ranks cost: the same fits with and without them, and a loop that accumulates as many micro-batches.

    python benchmarks/virtual_ranks.py [--models mlp "large mlp" convnet] [--pairs 20] [--steps 60] [--json FILE]

On as many ranks as virtual ranks (2 and 4) only the order of the sum differs: fits with and without take turns. On one
rank, eight virtual ranks are compared with hand-written loops of eight micro-batches of the same size: one does nothing
else; the other also sums loss and accuracy, as fit does. Ratios are medians over pairs of the median seconds of a step.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from launches import launch, paired_quartiles, save_results
from text_tables import Table

PLACES = (
    (2, 2, "without"),
    (4, 4, "without"),
    (1, 8, "bare loop"),
    (1, 8, "loop with metrics"),
    (1, 8, "without"),
)
"""Ranks, virtual ranks, and what they are compared with."""


def compare(models: list[str], pairs: int, steps: int) -> list[dict[str, Any]]:
    """Returns the milliseconds of a step of both ways by pair, and the quartiles of their ratios."""
    rows = []
    for model in models:
        for ranks, slices, other in PLACES:
            ways = ["virtual", other]
            task = {"model": model, "steps": steps, "slices": slices, "rows": 32, "ways": ways, "pairs": pairs}
            first, *_ = launch("slice_ranks.py", ranks, task, seconds=3600)
            found = {way: [1000 * seconds for seconds in first[way]] for way in ways}
            ratio = paired_quartiles(found["virtual"], found[other])
            row = {"model": model, "ranks": ranks, "virtual ranks": slices, "with": other, "ratio": ratio, **found}
            rows.append(row)
            print(f"  {model}, {slices} on {ranks}, {other}: {ratio[1]:.2f}", file=sys.stderr, flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["mlp", "large mlp", "convnet"])
    parser.add_argument("--pairs", type=int, default=20, help="fits of each way; they take turns")
    parser.add_argument("--steps", type=int, default=60, help="of a fit")
    parser.add_argument("--json", type=Path, help="where the figures go")
    given = parser.parse_args()
    rows = compare(given.models, given.pairs, given.steps)
    columns = ["model", "ranks", "virtual ranks", "compared with", "ms", "ratio", "quartiles"]
    table = Table("a step with virtual ranks", columns, names=4)
    for row in rows:
        lower, median, upper = row["ratio"]
        names = [row["model"], str(row["ranks"]), str(row["virtual ranks"]), row["with"]]
        milliseconds = f"{statistics.median(row['virtual']):.2f}"
        table.add([*names, milliseconds, f"{median:.2f}", f"{lower:.2f}-{upper:.2f}"])
    table.show()
    save_results(given.json, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
