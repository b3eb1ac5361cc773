"""Run a benchmark as a user does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import worlds

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def run_benchmark(name: str, folder: Path, *arguments: str) -> tuple[str, Any]:
    """Run a benchmark as a user does; return its output and the contents of its JSON file."""
    file = folder / "results.json"
    command = [sys.executable, str(BENCHMARKS / name), *arguments, "--json", str(file)]
    ended = subprocess.run(command, env=worlds.child_environment(), capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout, json.loads(file.read_text("utf-8"))
