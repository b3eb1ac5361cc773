"""`python -m tests.gpu`, the one command for a real card, on the stand-in: so it still runs when a card is there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from worlds import TESTS


def run(folder: Any, *arguments: str, seconds: float = 100.0) -> tuple[int, str, list[dict[str, Any]]]:
    """Runs the command; returns its exit code, what it printed, and the rows of its report."""
    command = [sys.executable, "-m", "tests.gpu", "--device", "fakegpu", "--out", str(folder), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=TESTS.parent, env=environment, capture_output=True, text=True, timeout=seconds)
    file = folder / "gpu.json"
    return ended.returncode, ended.stdout + ended.stderr, json.loads(file.read_text())["rows"] if file.exists() else []


@pytest.mark.nightly
def test_it_reports_what_ran_what_stops_the_host_and_what_has_no_time(fakegpu_folder, tmp_path):
    code, printed, rows = run(tmp_path, "--only", "machine", "stops")
    assert [(row["name"], row["what"]) for row in rows] == [
        ("machine", "GPU, PyTorch and NCCL"),
        ("stops", "host stops: arrays"),
        ("stops", "host stops: DataLoader"),
    ]
    assert rows[0]["status"] == "passed"
    assert "per step" in rows[1]["note"]
    assert code == any(row["status"] == "failed" for row in rows)
    assert (tmp_path / "gpu.md").read_text() in printed
    _, _, rows = run(tmp_path, "--only", "machine", "--seconds", "0")
    assert [row["status"] for row in rows] == ["not run"]


def test_a_step_that_does_not_end_is_killed_and_reported(fakegpu_folder, tmp_path):
    sys.path.insert(0, str(TESTS.parent))
    try:
        from tests.gpu.__main__ import Step
        from tests.gpu.__main__ import run as run_step
    finally:
        sys.path.pop(0)
    step = Step("sleeper", "a step that sleeps", 1.0, ("-c", "import time; time.sleep(1000)"))
    rows = run_step(step, 1.0, tmp_path, dict(os.environ))
    assert rows[-1]["status"] == "failed"
    assert rows[-1]["note"] == "did not end in 1 s"


@pytest.mark.nightly
@pytest.mark.timeout(700)
def test_every_step_runs_on_the_stand_in(fakegpu_folder, tmp_path):
    _, printed, rows = run(tmp_path, seconds=650.0)
    failed = [row for row in rows if row["status"] not in ("passed", "skipped")]
    assert not failed, printed
    ratios = [row["ratio"] for row in rows if row["name"] == "speed"]
    assert set(ratios[0]) == {"gpt2", "resnet50"}
