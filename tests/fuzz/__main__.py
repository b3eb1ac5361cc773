"""Runs random training programs: `python -m tests.fuzz --seeds 1000:3000`, about a program per second on two cores.

    python -m tests.fuzz --seeds 1000:3000              # continues where the result file ends
    python -m tests.fuzz --seeds 1234                   # one program, with what it is
    python -m tests.fuzz --program '{"spec": {...}}'    # a program of the result file again

Each program is drawn from its seed alone. It runs on 1, 2 and 3 ranks, over named transports, in a pool of workers, as
a plain PyTorch loop, with changes that must not matter, and stopped and resumed: all must agree. Results are written, a
line of JSON each, to a file. At the end there is a table of features, and of how many accepted programs had each. The
exit code is 1 if runs disagree, or if more than 5 % of the programs are refused.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [path for path in (str(Path(__file__).parents[1] / "support"),) if path not in sys.path]

from fuzzing.ranks import Worlds  # noqa: E402
from fuzzing.session import REFUSED, Result, as_line, examine, make_smaller, read, run_seeds, table  # noqa: E402
from fuzzing.spec import as_checks, as_spec  # noqa: E402
from rank_processes import start_server  # noqa: E402

MOST_REFUSED = 0.05


def main() -> int:
    """Runs what the command line asks for; returns 1 if something disagrees."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=seeds, default=range(100), help="FIRST:END, or one seed (default: 0:100)")
    parser.add_argument("--program", type=json.loads, help="a program of a result file, instead of seeds")
    parser.add_argument("--results", type=Path, default=Path("fuzz-results.jsonl"), help="file of the results")
    parser.add_argument("--shrink", type=float, default=30.0, help="seconds to make a program that disagrees smaller")
    parser.add_argument("--minutes", type=float, default=1e9, help="for all programs together")
    given = parser.parse_args()
    start_server()
    with tempfile.TemporaryDirectory(prefix="fuzz") as folder, Worlds(Path(folder)) as worlds:
        if given.program:
            result = examine(as_spec(given.program["spec"]), as_checks(given.program.get("checks", {})), worlds)
            print(f"{result.outcome}: {result.detail or ', '.join(result.made)}")
            return int(result.disagrees)
        run(given, worlds)
    results = [result for result in read(given.results) if result.seed in given.seeds]
    print(table(results))
    return summary(results)


def seeds(text: str) -> range:
    first, _, end = text.partition(":")
    return range(int(first), int(end) if end else int(first) + 1)


def run(given: argparse.Namespace, worlds: Worlds) -> None:
    """Run the seeds that the result file lacks."""
    done = {result.seed for result in read(given.results)}
    deadline = time.monotonic() + 60 * given.minutes
    kinds: Counter[str] = Counter()
    with open(given.results, "a", encoding="utf-8") as file:
        for result in run_seeds((seed for seed in given.seeds if seed not in done), worlds):
            if result.disagrees:
                kinds[result.outcome] += 1
                if kinds[result.outcome] < 3:
                    result = make_smaller(result, worlds, given.shrink)
                show(result)
            elif len(given.seeds) == 1:
                show(result)
            file.write(as_line(result))
            file.flush()
            if time.monotonic() > deadline:
                return


def show(result: Result) -> None:
    print(f"{result.seed}: {result.outcome}: {result.detail or ', '.join(result.made)}")
    print(f"    python -m tests.fuzz --program '{json.dumps(result.program)}'", flush=True)


def summary(results: list[Result]) -> int:
    """Print refusals, disagreements and the figures; return the exit code."""
    refused = [result for result in results if result.outcome == REFUSED]
    for text, count in Counter(result.detail[:150] for result in refused).most_common():
        print(f"refused {count:4} times: {text}")
    disagree = [result for result in results if result.disagrees]
    for result in disagree:
        print(f"{result.seed}: {result.outcome}: {result.detail[:300]}")
    seconds = sum(result.seconds for result in results)
    print(f"{len(results)} programs in {seconds:.0f} s: {len(refused)} refused, {len(disagree)} disagree")
    return int(bool(disagree) or len(refused) > MOST_REFUSED * len(results))


if __name__ == "__main__":
    sys.exit(main())
