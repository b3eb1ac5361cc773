"""Claims about `cyxtrain doctor -- COMMAND`: same samples per step in each run, no traces, and advice by one rule."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from fitting import everywhere, make_model, make_rows
from worlds import child_environment

import cyxtrain as cx
from cyxtrain.callbacks.step_trial import NUM_STEPS, StepCost
from cyxtrain.doctor.slice_costs import advise, measure_slices, report_of
from cyxtrain.doctor.terminal import print_report
from cyxtrain.environment import process_env

pytestmark = pytest.mark.usefixtures("rank_server")
ROW = re.compile(r"^ *(none|\d+) +(\d+) +[\d.]+ (?:us|ms|s) +[\d.]+$", re.M)


class Stops(cx.callbacks.Callback):
    """Ends each fit after its first step."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.trainer.stop_training = True


def train(folder: str, kind: str) -> None:
    """A program: a fit with what must not be left behind."""
    model = make_model()
    callbacks = [cx.callbacks.CSVLogger(f"{folder}/log.csv"), *([Stops()] if kind == "short" else [])]
    settings: dict[str, Any] = {
        "arrays": {"batch_size": 8, "accumulation_steps": 2, "validation_split": 0.2},
        "virtual": {"batch_size": 4, "virtual_ranks": 4},
        "excluded": {"batch_size": 8},
        "short": {"batch_size": 8},
    }[kind]
    often: dict[str, Any] = {"checkpoint_dir": f"{folder}/kept", "checkpoint_every_n_steps": 1, "keep_best": "loss"}
    compressed = cx.DDPConfig(compression="bf16" if kind == "excluded" else None)
    trainer = cx.DistributedTrainer(model, "cross_entropy", torch.optim.Adam(model.parameters()), ddp_config=compressed)
    trainer.fit(*make_rows(90), epochs=1, max_time_seconds=60, callbacks=callbacks, **often, **settings)


def tried(variable: str, folder: str, kind: str) -> int:
    """Runs the program as `cyxtrain doctor` starts it; returns its exit code."""
    with mock.patch.dict(os.environ, {process_env.TRIAL: variable}):
        try:
            train(folder, kind)
        except SystemExit as end:
            return int(end.code or 0)
        except cx.ConfigError:
            return 1
    return 0


def measured(monkeypatch: Any, folder: Path, kind: str, ranks: int, *counts: int) -> tuple[int, list[list[Any]]]:
    """Calls `measure_slices` with a fit on some ranks in place of a program; returns the code and what was asked."""
    asked = []

    def run(command: list[str], env: dict[str, str], **options: Any) -> Any:
        variable = env[process_env.TRIAL]
        asked.append(json.loads(variable)[1:])
        codes = everywhere(ranks, tried, variable, str(folder), kind)
        assert len(set(codes)) == 1
        return SimpleNamespace(returncode=codes[0], stdout="the last line\n")

    monkeypatch.setattr(subprocess, "run", run)
    return measure_slices(["python", "train.py"], {}, counts), asked


@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=pytest.mark.nightly)])
def test_each_run_has_the_samples_of_a_step_and_leaves_nothing_behind(tmp_path, monkeypatch, capsys, ranks):
    code, asked = measured(monkeypatch, tmp_path, "arrays", ranks, 4, 2)
    samples = 16 * ranks
    assert code == 0
    # Micro-batches have 8 samples at most.
    assert asked == [[], [samples, 2, ranks], [samples, 4, -(-ranks // 2)], [samples, None, 2]]
    out = capsys.readouterr().out
    assert f"{samples} samples per step on {ranks} rank" in out
    per_slice = [("none", 16), ("2", samples // 2), ("4", samples // 4), ("none", 16)]
    assert [(name, int(each)) for name, each in ROW.findall(out)] == per_slice
    assert "virtual_ranks=" in out
    assert [*tmp_path.iterdir()] == []


def test_a_program_with_virtual_ranks_is_compared_with_the_same_steps_without(tmp_path, monkeypatch, capsys):
    code, asked = measured(monkeypatch, tmp_path, "virtual", 1, 2)
    assert (code, asked) == (0, [[], [16, None, 1], [16, 2, 1], [16, None, 1]])
    assert ROW.findall(capsys.readouterr().out) == [("none", "16"), ("2", "8"), ("none", "16")]


def test_what_a_fit_refuses_is_not_measured(tmp_path, monkeypatch, capsys):
    code, asked = measured(monkeypatch, tmp_path, "excluded", 1)
    assert (code, asked) == (1, [[], [8, 2, 1]])
    out = " ".join(capsys.readouterr().out.split())
    assert "virtual_ranks=2 was not measured, with effective_batch_size=8. The program ended with exit code 1" in out
    assert out.endswith("the last line")


def test_a_program_that_ends_before_is_named(tmp_path, monkeypatch, capsys):
    assert measured(monkeypatch, tmp_path, "short", 1) == (1, [[]])
    out = capsys.readouterr().out
    assert f"The program ended with exit code 0 before step {NUM_STEPS} of its fit:\nthe last line\n" in out


def test_a_command_that_cannot_be_measured_is_refused():
    with pytest.raises(cx.ConfigError, match="cannot start 'no-such-program': No such file"):
        measure_slices(["no-such-program"], {})
    with pytest.raises(cx.ConfigError, match="cyxtrain doctor -- cyxtrain launch -n 4 -- python"):
        measure_slices(["python", "train.py"], {"RANK": "1", "WORLD_SIZE": "2"})


@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        ({2: 1.0, 4: 1.1, 8: 1.11}, 4),
        ({8: 1.09, 2: 1.3, 4: 0.9}, 8),
        ({2: 1.2, 4: 1.3}, None),
        ({}, None),
    ],
)
def test_advice_is_the_largest_number_at_most_ten_percent_slower(times, chosen):
    assert advise(times) == chosen


def reported(capsys: Any, *costs: StepCost) -> str:
    print_report(report_of(costs), is_labelled=False)
    return str(capsys.readouterr().out)


def test_times_are_multiples_of_the_faster_run_without_virtual_ranks(capsys):
    none = StepCost(0.02, 256, 2, 1, 8, None)
    two = StepCost(0.0105, 256, 2, 1, 1, 2)
    out = reported(capsys, none, two, two._replace(seconds=0.03, virtual_ranks=6), none._replace(seconds=0.01))
    assert [line.split()[-1] for line in out.splitlines() if ROW.match(line)] == ["2.00", "1.05", "3.00", "1.00"]
    text = " ".join(out.split())
    assert "one run took 2.00 times as long as the other: measure again" in text
    assert "A rank has 1 thread with virtual ranks and 8 without: num_threads sets it." in text
    assert "Use virtual_ranks=2: the largest that takes at most 10 % longer here." in text
    assert "can then never use more than 2 ranks." in text


def test_if_all_are_slow_the_cheapest_is_named(capsys):
    none = StepCost(0.01, 256, 1, 1, 1, None)
    costs = [none._replace(seconds=0.01 * count, virtual_ranks=count) for count in (2, 4)]
    text = " ".join(reported(capsys, none, *costs, none).split())
    assert "No number takes at most 10 % longer. The cheapest is virtual_ranks=2: 2.00 times as long." in text
    assert "measure again" not in text


PROGRAM = """
import sys

import torch

import cyxtrain as cx

torch.manual_seed(0)
inputs, targets = torch.randn(40, 4), torch.arange(40) % 3
trainer = cx.DistributedTrainer(torch.nn.Linear(4, 3), "cross_entropy", "adam")
if sys.argv[1] == "stream":
    inputs, targets = ((inputs[k : k + 8], targets[k : k + 8]) for k in range(0, 40, 8)), None
trainer.fit(inputs, targets, batch_size=8, num_processes=int(sys.argv[2]), checkpoint_every_n_epochs=1)
print("the fit is complete")
"""


LAUNCHED = ["cyxtrain", "launch", "-n", "3", "--", "train.py", "arrays", "1"]


def doctor(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs `cyxtrain doctor` in a folder with the program."""
    (folder / "train.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "cyxtrain", "doctor", *words]
    return subprocess.run(
        command, cwd=folder, env=child_environment(), capture_output=True, text=True, timeout=200, check=False
    )


@pytest.mark.nightly
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("command", "ranks"),
    [(["train.py", "arrays", "1"], 1), (["train.py", "arrays", "2"], 2), (LAUNCHED, 3)],
    ids=["alone", "on workers", "launched"],
)
def test_a_program_is_measured_on_processes_of_its_own(tmp_path, command, ranks):
    done = doctor(tmp_path, "--virtual-ranks", "4", "--", *command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ROW.findall(done.stdout) == [("none", "8"), ("4", f"{2 * ranks}"), ("none", "8")]
    assert "the fit is complete" not in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.py"]


@pytest.mark.nightly
@pytest.mark.timeout(240)
def test_a_program_that_reads_its_data_once_is_not_measured(tmp_path):
    done = doctor(tmp_path, "--", "train.py", "stream", "1")
    assert done.returncode == 1
    assert f"before step {NUM_STEPS} of its fit:" in done.stdout


@pytest.mark.nightly
def test_numbers_need_a_program(tmp_path):
    done = doctor(tmp_path, "--virtual-ranks", "4")
    assert done.returncode == 2
    assert "--virtual-ranks needs a program to measure" in done.stderr
