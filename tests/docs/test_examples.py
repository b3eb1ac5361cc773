"""The longer examples end as their docstrings say, started as a user starts them."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from markers import by_night
from page_runs import run_program
from rank_processes import run_ranks, values

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
DEADLINE_SECONDS = 90


def run_example(name, num_ranks, folder, exit_codes=(0,)):
    """Run a script in a folder; return the lines of rank 0, without the prefix."""
    launcher = [] if num_ranks == 1 else ["-m", "cyxtrain.launch", str(num_ranks)]
    command = [sys.executable, *launcher, str(EXAMPLES / name)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False)
    assert done.returncode in exit_codes, done.stdout + done.stderr
    return [line.removeprefix("[rank 0] ") for line in done.stdout.splitlines()]


def last_accuracy(lines):
    match = re.fullmatch(r"test accuracy: ([01]\.\d{4})", lines[-1])
    assert match, lines[-1]
    return float(match[1])


# .ci/run begins with the same on 2 ranks.
@pytest.mark.parametrize("num_ranks", [by_night(count) for count in (1, 2, 4)])
def test_main_job_learns_the_digits_on_any_number_of_ranks(num_ranks, tmp_path):
    lines = run_example("train_digits.py", num_ranks, tmp_path)
    assert last_accuracy(lines) >= 0.97
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["train_torch", "train_cyxtrain"])
def test_training_by_hand_and_with_the_package_end_alike(name, tmp_path):
    # PyTorch's Gloo may abort at exit, after everything is complete ("terminate called without an active exception",
    # once in some hundred runs). The test compares the numbers.
    exit_codes = (0, 128 + signal.SIGABRT) if name == "train_torch" else (0,)
    lines = run_example(f"{name}.py", 2, tmp_path, exit_codes)
    assert 0.94 <= last_accuracy(lines) <= 0.98
    history = json.loads((tmp_path / "checkpoints" / f"{name}.json").read_text(encoding="utf-8"))
    assert len(history["train_losses"]) == len(history["train_accuracies"]) == 10
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2


@pytest.mark.usefixtures("rank_server")
@pytest.mark.parametrize("launched", [False, by_night(True)])
def test_first_program_in_readme_runs_as_it_stands(launched, tmp_path):
    readme, script = (ROOT / "README.md").read_text(encoding="utf-8"), tmp_path / "train.py"
    script.write_text(re.search(r"```python\n(.*?)```", readme, flags=re.DOTALL)[1], encoding="utf-8")
    if launched:
        lines = run_example(script, 2, tmp_path)
    else:
        lines = values(run_ranks(2, run_program, str(script), str(tmp_path)))[0].splitlines()
    assert last_accuracy(lines) >= 0.94
