"""What a user sees of a mistake, of an error in one rank's own code and of Ctrl-C: lines and exit codes.

    lines (exit code)                    python    launch -n 1  launch -n 2  torchrun, 1 rank  torchrun, 2 ranks
    wrong dtype of y, y missing,
    a misspelled setting, a class
    index out of range                   4 (1)     4 (1)        4 (1)        38 (1)            44 (1)
    an error in forward                  6 (1)     6 (1)        6 (1)        40 (1)            46 (1)
    one rank's own error, of 18 lines    -         -            41 (1)       -                 62 (1)
    a rank exits without joining         -         -            5 (1)        -                 after 30 s
    Ctrl-C while torch is imported       8 (130)   1 (130)      1 (130)      39 to 59 (1)      32 to 57 (1)
    Ctrl-C before or after a fit         4 (130)   1 (130)      1 (130)      35 (1)            40 (1)
    Ctrl-C in a fit                      0 (130)   1 (130)      1 (130)      31 (1)            32 (1)

Of one rank's own error, the other rank prints 2 lines, and `launch` repeats the 18. Lines of Ctrl-C under `python`
outside of a fit are Python's traceback.

The 34 lines of one rank under torchrun, and the 40 of two, are torchrun's own report of a rank that failed; 31 lines
are its report of Ctrl-C.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from forked_programs import run_python
from launching import LAUNCHER
from markers import by_night
from worlds import child_environment, wait_until

from cyxtrain.environment.uncaught import HEADER

pytestmark = [
    pytest.mark.usefixtures("rank_server"),
    pytest.mark.skipif(sys.platform == "win32", reason="these ranks get POSIX signals"),
]
SECONDS = 120.0
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
LAUNCHERS = {
    "python": [sys.executable],
    "launch 1": [*LAUNCHER, "1", "--"],
    "launch 2": [*LAUNCHER, "2", "--"],
    "torchrun 1": [*TORCHRUN, "1"],
    "torchrun 2": [*TORCHRUN, "2"],
}

PROGRAM = """
import atexit, collections, os, sys, time, warnings
from pathlib import Path
warnings.simplefilter("ignore")  # forks of a process do not read PYTHONWARNINGS
mistake = sys.argv[1]
def ready():
    Path("ready" + os.environ.get("RANK", "0")).touch()
if mistake == "ctrl-c in imports":
    ready()
    time.sleep(1_000)
import torch
import cyxtrain as cx

class Ready(cx.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        ready()

class Net(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x.flatten())

class Raises(cx.callbacks.Callback):
    def on_train_begin(self, logs=None):
        if cx.get_rank() == cx.get_world_size() - 1:
            raise KeyError("of my own")

torch.manual_seed(0)
X, y = torch.randn(40, 4), torch.arange(40) % 2
def trainer(**settings):
    return cx.DistributedTrainer(torch.nn.Linear(4, 2), "cross_entropy", "sgd", **settings)
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
if mistake == "no y":
    trainer().fit(X, epochs=1, verbose=False)
if mistake == "class":
    trainer().fit(X, y + 1, epochs=1, verbose=False)
if mistake == "forward":
    cx.DistributedTrainer(Net(4, 2), "cross_entropy").fit(X, y, epochs=1)
if mistake == "exits":
    if os.environ["RANK"] == "1":
        sys.exit()
    cx.init()
if mistake == "ctrl-c outside":
    ready()
    time.sleep(1_000)
if mistake == "nan":
    trainer().fit(X * float("nan"), y, epochs=1, verbose=False)
if mistake == "raises":
    trainer().fit(X, y, epochs=1, verbose=False, callbacks=[Raises()])
if mistake == "ctrl-c":
    # As PyTorch does where `tabulate` is installed: CPython forgets about Ctrl-C when a string is executed at exit.
    atexit.register(collections.namedtuple, "Late", "x")
    trainer().fit(X, y, epochs=1_000_000, batch_size=2, verbose=False, callbacks=[Ready()])
"""


GOLDEN = {
    "targets": "CrossEntropyLoss wants class indices of an integer dtype, and y has dtype float32: give "
    "y.long(), or numpy.asarray(y).astype('int64').",
    "no y": "y is missing: the loss compares the model's output with it. Only a model that computes its own loss "
    "(loss_fn=None) does without.",
    "keyword": "fit has no argument 'epoch'. Did you mean 'epochs'?",
    "class": "y holds class 2 (sample 1), and the model has outputs for classes 0 to 1. Number the classes from 0, or "
    "give the model's last layer more outputs.",
    "forward": "the model cannot take X, tried on shape [{rows}, 4]: RuntimeError: mat1 and mat2 shapes cannot be "
    "multiplied (1x{numbers} and 4x2)",
}
"""The message of each mistake."""


def start(folder: Path, launcher: str, mistake: str, **variables: str) -> subprocess.Popen[str]:
    (folder / "train.py").write_text(PROGRAM, encoding="utf-8")
    return subprocess.Popen(
        [*LAUNCHERS[launcher], "train.py", mistake],
        cwd=folder,
        env=child_environment(PYTHONUNBUFFERED="1", PYTHONWARNINGS="ignore", **variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def lines_of(folder: Path, launcher: str, mistake: str, **variables: str) -> tuple[int, list[str]]:
    """Return the exit code of a program, and its lines on stderr; it prints nothing on stdout."""
    process = start(folder, launcher, mistake, **variables)
    try:
        out, err = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    assert out == ""
    return process.returncode, err.splitlines()


def lines_of_fork(folder: Path, num_ranks: int, mistake: str, **variables: str) -> tuple[int, list[str]]:
    """Do the same where the program, a launcher and its ranks are forks; by night all of them are started."""
    (folder / "train.py").write_text(PROGRAM, encoding="utf-8")
    launcher = ["-m", "cyxtrain.launch", str(num_ranks), "--"] if num_ranks > 1 else []
    ended = run_python([*launcher, "train.py", mistake], folder, variables, forks=True)
    assert ended.stdout == ""
    return ended.returncode, ended.stderr.splitlines()


@pytest.mark.parametrize(
    ("mistake", "message", "num_ranks"),
    [
        ("shape", "ConfigError: the model cannot take X, tried on shape ", 2),
        by_night("shape", "ConfigError: the model cannot take X, tried on shape ", 1),
        *(by_night("in a context", "ConfigError: the model cannot take X, tried on shape ", n) for n in (1, 2)),
        *(by_night("keyword", "ConfigError: ", n) for n in (1, 2)),
        by_night("keyword of the trainer", "ConfigError: DistributedTrainer has no argument 'metric'. Did you mean", 2),
        by_night("keyword of the trainer", "ConfigError: DistributedTrainer has no argument 'metric'. ", 1),
        *(by_night("targets", "ConfigError: ", n) for n in (1, 2)),
        *(by_night("nan", "NonFiniteError: epoch 1, step 1 ", n) for n in (1, 2)),
    ],
)
def test_a_mistake_is_the_users_own_lines_and_the_message_once(mistake, message, num_ranks, tmp_path):
    code, lines = lines_of_fork(tmp_path, num_ranks, mistake)
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
    _, lines = lines_of_fork(tmp_path, 1, "shape", CYXTRAIN_TRACEBACK="full")
    assert lines[0] == "Traceback (most recent call last):"
    assert any("dry_run.py" in line for line in lines)
    assert "The above exception was the direct cause of the following exception:" in lines


def test_the_error_of_one_ranks_own_code_has_its_whole_traceback_and_one_prefix(tmp_path):
    code, lines = lines_of_fork(tmp_path, 2, "raises")
    assert code == 1
    own = [line.removeprefix("[rank 1] ") for line in lines if line.startswith("[rank 1] ")]
    assert own[0] == "Traceback (most recent call last):"
    assert own[-1] == "KeyError: 'of my own'"
    assert any(f"cyxtrain{os.sep}training" in line for line in own)
    assert "[rank1]" not in "".join(lines)
    quoted = lines.index("rank 1 failed first (exit code 1); its last lines on stderr:")
    assert lines[quoted + 1 :] == own
    message, place = [line for line in lines if line.startswith("[rank 0] ")]
    told = "[rank 0] cyxtrain.errors.DistributedTrainingError: rank 1 has failed: KeyError: 'of my own' (its output has"
    assert message.startswith(told)
    assert place.startswith('[rank 0]   File "')
    assert "train.py" in place


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("mistake", "launcher"),
    [*((mistake, "launch 2") for mistake in GOLDEN), *(("forward", each) for each in LAUNCHERS if each != "launch 2")],
)
def test_each_mistake_on_two_ranks_and_one_of_them_under_every_launcher(mistake, launcher, tmp_path):
    code, lines = lines_of(tmp_path, launcher, mistake)
    assert code == 1
    lines = [line.removeprefix("[rank 0] ").removeprefix("[rank 1] ") for line in lines]
    assert lines[0] == HEADER
    number = 5 if mistake == "forward" else 3
    assert lines[number] == "cyxtrain.errors.ConfigError: " + GOLDEN[mistake].format(
        rows=20 if launcher.endswith("2") else 40, numbers=80 if launcher.endswith("2") else 160
    )
    own = len(lines) if "torchrun" not in launcher else next(n for n, line in enumerate(lines) if "torch/" in line)
    assert own == number + 1


@pytest.mark.nightly
@pytest.mark.parametrize("launcher", ["launch 2", "launch 1", "python"])
@pytest.mark.parametrize("moment", ["ctrl-c in imports", "ctrl-c outside", "ctrl-c"])
def test_ctrl_c_at_three_moments(moment, launcher, tmp_path):
    process = start(tmp_path, launcher, moment)
    try:
        ranks = 2 if launcher == "launch 2" else 1
        wait_until(lambda: len(list(tmp_path.glob("ready?"))) == ranks, SECONDS)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    if launcher != "python":
        assert (process.returncode, err) == (130, "all ranks were stopped by SIGINT\n")
    else:
        assert process.returncode == -signal.SIGINT  # a shell's 130
        assert err == "" or moment != "ctrl-c"


@pytest.mark.nightly
def test_a_rank_that_exits_without_joining_ends_the_run_at_once(tmp_path):
    code, lines = lines_of(tmp_path, "launch 2", "exits", DISTRIBUTED_TIMEOUT_MS="1000000")
    assert code == 1
    assert lines[0].startswith("[rank 0] cyxtrain.errors.RendezvousError: rank 1 has exited with code 0 without ")
    assert lines[1].startswith('[rank 0]   File "')
    assert len(lines) == 5


@pytest.mark.nightly
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_ctrl_c_in_a_fit_is_one_line_of_the_launcher(num_ranks, tmp_path):
    process = start(tmp_path, {1: "python", 2: "launch 2"}[num_ranks], "ctrl-c")
    try:
        wait_until(lambda: len(list(tmp_path.glob("ready?"))) == num_ranks, SECONDS)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    # A shell's exit code for -SIGINT is 130.
    ends = {1: (-signal.SIGINT, "", ""), 2: (130, "", "all ranks were stopped by SIGINT\n")}
    assert (process.returncode, out, err) == ends[num_ranks]
