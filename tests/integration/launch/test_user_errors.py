"""What a user sees of a mistake, of an error in one rank's own code and of Ctrl-C: lines and exit codes."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launching import LAUNCHER
from worlds import child_environment, wait_until

from cyxtrain.environment.uncaught import HEADER

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="these ranks get POSIX signals")
SECONDS = 120.0
by_night = functools.partial(pytest.param, marks=pytest.mark.nightly)

PROGRAM = """
import sys
from pathlib import Path
import torch
import cyxtrain as cx

class Ready(cx.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        Path(f"ready{cx.get_rank()}").touch()

class Raises(cx.callbacks.Callback):
    def on_train_begin(self, logs=None):
        if cx.get_rank() == cx.get_world_size() - 1:
            raise KeyError("of my own")

torch.manual_seed(0)
X, y = torch.randn(40, 4), torch.arange(40) % 2
def trainer(**settings):
    return cx.DistributedTrainer(torch.nn.Linear(4, 2), "cross_entropy", "sgd", **settings)
mistake = sys.argv[1]
if mistake == "shape":
    trainer().fit(X[:, :3], y, epochs=1, verbose=False)
if mistake == "in a context":
    with cx.init():
        trainer().fit(X[:, :3], y, epochs=1, verbose=False)
if mistake == "keyword":
    trainer().fit(X, y, epoch=1)
if mistake == "keyword of the trainer":
    trainer(metric="accuracy")
if mistake == "targets":
    trainer().fit(X, y.float(), epochs=1, verbose=False)
if mistake == "nan":
    trainer().fit(X * float("nan"), y, epochs=1, verbose=False)
if mistake == "raises":
    trainer().fit(X, y, epochs=1, verbose=False, callbacks=[Raises()])
if mistake == "ctrl-c":
    trainer().fit(X, y, epochs=1_000_000, batch_size=2, verbose=False, callbacks=[Ready()])
"""


def start(folder: Path, num_ranks: int, mistake: str, **variables: str) -> subprocess.Popen[str]:
    (folder / "train.py").write_text(PROGRAM, encoding="utf-8")
    launcher = [*LAUNCHER, "2"] if num_ranks == 2 else [sys.executable]
    return subprocess.Popen(
        [*launcher, "train.py", mistake],
        cwd=folder,
        env=child_environment(PYTHONUNBUFFERED="1", PYTHONWARNINGS="ignore", **variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def lines_of(folder: Path, num_ranks: int, mistake: str, **variables: str) -> tuple[int, list[str]]:
    """Return the exit code of a program, and its lines on stderr; it prints nothing on stdout."""
    process = start(folder, num_ranks, mistake, **variables)
    try:
        out, err = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    assert out == ""
    return process.returncode, err.splitlines()


@pytest.mark.parametrize(
    ("mistake", "message", "num_ranks"),
    [
        ("shape", "ConfigError: the model cannot take X, tried on shape ", 2),
        by_night("shape", "ConfigError: the model cannot take X, tried on shape ", 1),
        *(by_night("in a context", "ConfigError: the model cannot take X, tried on shape ", n) for n in (1, 2)),
        *(by_night("keyword", "ConfigError: ", n) for n in (1, 2)),
        ("keyword of the trainer", "ConfigError: DistributedTrainer has no argument 'metric'. Did you mean", 2),
        by_night("keyword of the trainer", "ConfigError: DistributedTrainer has no argument 'metric'. ", 1),
        *(by_night("targets", "ConfigError: ", n) for n in (1, 2)),
        *(by_night("nan", "NonFiniteError: epoch 1, step 1 ", n) for n in (1, 2)),
    ],
)
def test_a_mistake_is_the_users_own_lines_and_the_message_once(mistake, message, num_ranks, tmp_path):
    code, lines = lines_of(tmp_path, num_ranks, mistake)
    assert code == 1
    if num_ranks == 2:
        [label] = {line[: len("[rank 0] ")] for line in lines}
        assert label == "[rank 0] " or mistake == "keyword of the trainer"  # of the rank that was faster
        lines = [line.removeprefix(label) for line in lines]
    assert lines[0] == HEADER
    assert lines[-1].startswith(f"cyxtrain.errors.{message}")
    assert all(line.startswith("  ") for line in lines[1:-1])
    assert all("train.py" in line for line in lines if line.startswith("  File"))
    assert len(lines) <= 6


@pytest.mark.nightly
def test_the_environment_asks_for_all_of_the_traceback(tmp_path):
    _, lines = lines_of(tmp_path, 1, "shape", CYXTRAIN_TRACEBACK="full")
    assert lines[0] == "Traceback (most recent call last):"
    assert any("dry_run.py" in line for line in lines)
    assert "The above exception was the direct cause of the following exception:" in lines


def test_the_error_of_one_ranks_own_code_has_its_whole_traceback_and_one_prefix(tmp_path):
    code, lines = lines_of(tmp_path, 2, "raises")
    assert code == 1
    own = [line.removeprefix("[rank 1] ") for line in lines if line.startswith("[rank 1] ")]
    assert own[0] == "Traceback (most recent call last):"
    assert own[-1] == "KeyError: 'of my own'"
    assert any(f"cyxtrain{os.sep}training" in line for line in own)
    assert "[rank1]" not in "".join(lines)
    quoted = lines.index("rank 1 failed first (exit code 1); its last lines on stderr:")
    assert lines[quoted + 1 :] == own


@pytest.mark.parametrize("num_ranks", [by_night(1), 2])
def test_ctrl_c_in_a_fit_is_one_line_of_the_launcher(num_ranks, tmp_path):
    process = start(tmp_path, num_ranks, "ctrl-c")
    try:
        wait_until(lambda: len(list(tmp_path.glob("ready?"))) == num_ranks, SECONDS)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    # A shell's exit code for -SIGINT is 130.
    ends = {1: (-signal.SIGINT, "", ""), 2: (130, "", "all ranks were stopped by SIGINT\n")}
    assert (process.returncode, out, err) == ends[num_ranks]
