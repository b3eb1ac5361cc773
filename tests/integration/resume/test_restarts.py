"""Claims about a command that the launcher starts again: it ends as if nothing had happened."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import launching
import pytest
from markers import by_night

pytestmark = pytest.mark.skipif(os.name == "nt", reason="ranks are killed by POSIX signals here")

PROGRAM = """
import os, signal, sys
import torch
from torch import nn
import cyxtrain as cx

class Model(nn.Sequential):
    steps = 0

    def forward(self, rows):
        if self.training and torch.is_grad_enabled():
            self.steps += 1
            victim, step = KILLS.get(int(os.environ["CYXTRAIN_ATTEMPT"]), (None, None))
            if (cx.get_rank(), self.steps) == (victim, step):
                os.kill(os.getpid(), signal.Signals[os.environ.get("STRIKES_WITH", "SIGKILL")])
        return super().forward(rows)

def weights_of(model):
    return sum(parameter.double().sum().item() for parameter in model.parameters())

KILLS = eval(sys.argv[1])
cx.init()
torch.manual_seed(1)
rows = torch.randn(40, 4)
targets = torch.randint(3, (40,))
model = Model(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 3))
trainer = cx.DistributedTrainer(model, nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters(), 1e-2))
settings = dict(batch_size=4, checkpoint_every_n_steps=int(sys.argv[2]), verbose=False)
first = trainer.fit(rows, targets, epochs=2, **settings)
between = weights_of(model)
second = trainer.fit(rows, targets, epochs=2, **settings)
if trainer.is_master():
    print("steps", model.steps)
    print("result", first.train_losses, between, second.train_losses, weights_of(model), trainer.epoch)
"""


def launch(
    folder: Path, restarts: int, kills: dict[int, tuple[int, int]], every: int = 1
) -> subprocess.CompletedProcess:
    (folder / "train.py").write_text(PROGRAM, encoding="utf-8")
    command = [sys.executable, "-m", "cyxtrain.launch", "--restarts", str(restarts), "2", "train.py", repr(kills)]
    return subprocess.run([*command, str(every)], cwd=folder, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.nightly
def test_after_a_sigterm_to_one_rank_all_have_stopped_and_none_is_started_again(tmp_path, monkeypatch):
    monkeypatch.setenv("STRIKES_WITH", "SIGTERM")
    done = launch(tmp_path, 3, {0: (1, 3)}, every=10)
    assert done.returncode == 143, done.stderr
    assert done.stderr == "all ranks were stopped by SIGTERM\n"
    # The wish comes while the third step runs, and travels with the fourth.
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000004.ckpt"]


@pytest.mark.nightly
def test_an_error_that_would_come_again_is_no_reason_to_start_again(tmp_path):
    done = launch(tmp_path, 3, {}, every=-1)
    assert done.returncode == 1
    assert "failed first" not in done.stderr
    assert done.stderr.endswith("no restart: the same error would occur again\n")


def printed(done: subprocess.CompletedProcess, what: str) -> str:
    [found] = re.findall(rf"^\[rank 0\] {what} (.*)$", done.stdout, flags=re.MULTILINE)
    return found


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return launch(tmp_path_factory.mktemp("whole"), 0, {})


@pytest.mark.nightly
def test_killed_ranks_are_started_again_and_go_on_where_they_were(uninterrupted, tmp_path):
    # In the second fit: each has ten steps.
    done = launch(tmp_path, 3, {0: (1, 17)})
    assert done.returncode == 0, done.stderr
    assert printed(done, "result") == printed(uninterrupted, "result")
    assert [line for line in done.stderr.splitlines() if line.startswith("restart")] == ["restart 1 of 3"]
    # Sixteen steps were done; one more is left where the kill came while the last checkpoint was written.
    assert int(printed(done, "steps")) in (4, 5)


@pytest.mark.nightly
def test_ranks_that_are_killed_in_both_fits_are_started_again_twice(uninterrupted, tmp_path):
    done = launch(tmp_path, 3, {0: (1, 7), 1: (0, 11)})
    assert done.returncode == 0, done.stderr
    assert printed(done, "result") == printed(uninterrupted, "result")
    assert "restart 2 of 3" in done.stderr
    assert int(printed(done, "steps")) in (4, 5)


@pytest.mark.nightly
def test_without_checkpoints_a_restart_begins_anew(uninterrupted, tmp_path):
    done = launch(tmp_path, 1, {0: (1, 3)}, every=0)
    assert done.returncode == 0, done.stderr
    assert printed(done, "result") == printed(uninterrupted, "result")
    assert int(printed(done, "steps")) == 20


@pytest.mark.nightly
def test_when_all_restarts_are_used_up_the_failure_is_the_launchers(tmp_path):
    done = launch(tmp_path, 1, {0: (1, 2), 1: (1, 1)})
    assert done.returncode == 128 + 9
    assert done.stderr.count("failed first") == 2


@pytest.mark.nightly
def test_another_commands_checkpoints_are_not_gone_on_from(uninterrupted, tmp_path):
    assert launch(tmp_path, 0, {}).returncode == 0
    done = launch(tmp_path, 1, {0: (1, 3)}, every=0)
    assert printed(done, "result") == printed(uninterrupted, "result")
    assert int(printed(done, "steps")) == 20


@pytest.mark.parametrize(
    "words",
    [
        ["--restarts"],
        by_night(["--restarts", "x", "2", "a"]),
        by_night(["--restarts=-1", "2", "a"]),
    ],
)
def test_a_wrong_number_of_restarts_is_refused(words):
    done = launching.run(*words)
    assert done.returncode == 2
    assert b"--restarts" in done.stderr
