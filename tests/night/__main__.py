"""Runs the nightly tests in shards of at most 45 minutes: `python -m tests.night`, in the root of a checkout.

    python -m tests.night                   # all shards, one after the other
    python -m tests.night ring contract     # two of them; the others on another day
    python -m tests.night --table           # when each shard ran last, at which commit, and what failed

The result of each shard is kept in tests/night/results.json, which is committed, so that shards can run on different
days. The output of pytest is in `night-report/` (`--out`). The exit code is 1 if a test failed, or a shard took longer
than its limit. The tests need `pip install '.[nightly]'`. The versions of PyTorch are a command of their own, because
it downloads gigabytes: see CONTRIBUTING.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).with_name("results.json")
LIMIT_SECONDS = 45 * 60
NOT_HERE = "tests/compat/test_torch_versions.py"
SHARDS = {
    "contract": ("tests/ring/test_contract.py",),
    "ring": ("tests/ring", "tests/unit"),
    "faults": ("tests/fault",),
    "fit": ("tests/integration/fit",),
    "resume": ("tests/integration/resume", "tests/integration/data", "tests/integration/parallel"),
    "programs": ("tests/integration/notebook", "tests/integration/launch", "tests/integration/world"),
    "docs": ("tests/docs",),
    "others": ("tests/compat", "tests/integration/ported"),
}
"""A file belongs to the shard that names it, or else to the one that names a folder above it."""


@dataclasses.dataclass(frozen=True)
class Result:
    """What one run of a shard showed.

    Attributes:
        commit: Of the checkout, short; with "+" if other files than the results had changed since.
        date: When it began, as 2026-01-31.
        minutes: Wall time.
        passed: Number of tests.
        skipped: Number of tests.
        failed: Names of the tests that failed; "pytest did not end" if the limit was reached.
    """

    commit: str
    date: str
    minutes: float
    passed: int
    skipped: int
    failed: list[str]


def arguments_of(shard: str) -> list[str]:
    """Returns the paths of a shard for pytest, without what other shards or commands run."""
    elsewhere = {NOT_HERE}
    for other, paths in SHARDS.items():
        if other != shard:
            elsewhere.update(paths)
    ignored = [path for path in sorted(elsewhere) if path.startswith(tuple(f"{each}/" for each in SHARDS[shard]))]
    return [*SHARDS[shard], *(f"--ignore={path}" for path in ignored)]


def run(shard: str, commit: str, out: Path, limit_seconds: float) -> Result:
    """Runs the nightly tests of one shard; pytest's output and its report are files of `out`."""
    report = out / f"{shard}.xml"
    report.unlink(missing_ok=True)
    # A limit ends tests that hang; by night several with many processes share the cores. With -v the log names the test
    # that ends a worker.
    options = ["-v", "-m", "nightly", "--timeout=300", f"--junitxml={report}"]
    command = [sys.executable, "-m", "pytest", *options, *arguments_of(shard)]
    began = time.monotonic()
    date = datetime.date.today().isoformat()
    # Several tests run at once, each with processes of its own, which would share the cores with all their threads.
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    with open(out / f"{shard}.log", "wb") as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    minutes = round((time.monotonic() - began) / 60, 1)
    if not report.exists():
        return Result(commit, date, minutes, 0, 0, ["pytest did not end"])
    passed = 0
    skipped = 0
    failed = []
    for case in ElementTree.parse(report).iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(f"{case.get('classname')}::{case.get('name')}")
        elif case.find("skipped") is not None:
            skipped += 1
        else:
            passed += 1
    return Result(commit, date, minutes, passed, skipped, failed)


def current_commit() -> str:
    """Returns the commit of this checkout, with "+" if files other than the kept results differ from it."""
    short = ["git", "rev-parse", "--short=7", "HEAD"]
    changed = ["git", "status", "--porcelain", "--", ".", f":!{RESULTS.relative_to(ROOT)}"]
    commit, changes = (
        subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
        for command in (short, changed)
    )
    return f"{commit}+" if changes else commit


def table(results: dict[str, Result]) -> str:
    """Returns what is known of each shard, as Markdown."""
    lines = ["| shard | commit | date | minutes | passed | skipped | failed |", "|---|---|---|---|---|---|---|"]
    for shard in SHARDS:
        if shard not in results:
            lines.append(f"| {shard} | never run | | | | | |")
            continue
        each = results[shard]
        counts = f"{each.passed} | {each.skipped} | {len(each.failed)}"
        lines.append(f"| {shard} | {each.commit} | {each.date} | {each.minutes} | {counts} |")
    minutes = sum(each.minutes for each in results.values())
    lines += ["", f"{minutes:.0f} minutes together."]
    lines += [f"- failed in {shard}: {name}" for shard, each in results.items() for name in each.failed]
    return "\n".join(lines)


def main() -> int:
    """Runs the shards of the command line; returns 1 if something failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.night", description=__doc__.splitlines()[0])
    parser.add_argument("shards", nargs="*", metavar="SHARD", help=f"{', '.join(SHARDS)} (default: all)")
    parser.add_argument("--table", action="store_true", help="print the kept results, run nothing")
    parser.add_argument("--out", type=Path, default=Path("night-report"), help="folder for the output of pytest")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file of the kept results")
    parser.add_argument("--seconds", type=float, default=LIMIT_SECONDS, help="limit of a shard")
    given = parser.parse_args()
    unknown = sorted(set(given.shards) - set(SHARDS))
    if unknown:
        parser.error(f"no shard is named {', '.join(unknown)}; shards: {', '.join(SHARDS)}")
    results: dict[str, Result] = {}
    if given.results.exists():
        kept = json.loads(given.results.read_text("utf-8"))
        results = {shard: Result(**each) for shard, each in kept.items() if shard in SHARDS}
    if given.table:
        print(table(results))
        return 0
    given.out.mkdir(parents=True, exist_ok=True)
    chosen = given.shards or list(SHARDS)
    commit = current_commit()
    for shard in chosen:
        print(f"{shard}: at most {given.seconds / 60:.0f} minutes", file=sys.stderr, flush=True)
        results[shard] = run(shard, commit, given.out.resolve(), given.seconds)
        kept = {name: dataclasses.asdict(results[name]) for name in SHARDS if name in results}
        given.results.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    print(table(results))
    return int(any(results[shard].failed for shard in chosen))


if __name__ == "__main__":
    sys.exit(main())
