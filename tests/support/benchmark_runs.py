"""Run a benchmark as a user does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import worlds
from forked_programs import run_python

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def run_benchmark(name: str, folder: Path, *arguments: str) -> tuple[str, Any]:
    """Run a benchmark in a fork of the rank server; return its output and the contents of its JSON file."""
    file = folder / "results.json"
    words, variables = [str(BENCHMARKS / name), *arguments, "--json", str(file)], worlds.child_environment()
    ended = run_python(words, folder, {"PYTHONPATH": variables["PYTHONPATH"], "OMP_NUM_THREADS": "1"}, seconds=560)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout, json.loads(file.read_text("utf-8"))
