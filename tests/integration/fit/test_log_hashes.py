"""Claims about log_hashes and `cyxtrain bisect`: a flipped bit is named, and pairs without one are equal."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from fitting import everywhere, fingerprint, keep_only, make_rows, seeded
from launching import call_command_line
from torch import Tensor, nn
from worlds import child_environment

import cyxtrain as cx
from cyxtrain.environment import process_env
from cyxtrain.launch.bisect import Difference, bisect, first_difference, other_differences, read_hashes
from cyxtrain.launch.replay import replay
from cyxtrain.world.slices import owned_by

pytestmark = pytest.mark.usefixtures("rank_server")
V = 8
STEPS = 6
TENSORS = ["0.weight", "0.bias", "3.weight", "3.bias"]


class Flip(NamedTuple):
    """One bit of a float32 that is flipped: of a weight, or of a gradient or a sample in one slice of a rank."""

    kind: str
    step: int
    rank: int
    slice: int
    tensor: int
    bit: int


def flipped(tensor: Tensor, bit: int) -> Tensor:
    """Returns a copy with one bit of its first element flipped."""
    found = tensor.detach().clone()
    found.view(torch.int32).view(-1)[0] ^= 1 << bit
    return found


class Flipping(cx.callbacks.Callback):
    """Flips the bit, on its rank; counts this rank's slices."""

    def __init__(self, model: nn.Module, flip: Flip, ranks: int) -> None:
        super().__init__()
        self.flip = flip
        self.parameter = [*model.parameters()][flip.tensor]
        self.first = owned_by(flip.rank, ranks, V).start
        self.slices = 0
        self.is_now = False
        model.register_forward_pre_hook(self.flip_samples)
        self.parameter.register_hook(self.flip_gradient)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.slices = 0
        self.is_now = self.trainer.step + 1 == self.flip.step and cx.get_rank() == self.flip.rank
        if self.flip.kind == "weight" and self.is_now:
            self.parameter.data.copy_(flipped(self.parameter, self.flip.bit))

    def is_in_slice(self, kind: str) -> bool:
        return self.flip.kind == kind and self.first + self.slices == self.flip.slice and self.is_now

    def flip_samples(self, module: nn.Module, inputs: Any) -> Any:
        (samples,) = inputs
        return (flipped(samples, self.flip.bit),) if self.is_in_slice("sample") else None

    def flip_gradient(self, gradient: Tensor) -> Tensor | None:
        found = flipped(gradient, self.flip.bit) if self.is_in_slice("gradient") else None
        self.slices += 1
        return found


def train(folder: str, flip: Flip | None, ranks: int, more: dict[str, Any]) -> str:
    """Returns a hash of the weights after a fit that logs hashes to a folder."""
    with seeded():
        model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 3))
    callbacks: list[cx.callbacks.Callback] = []
    if flip is not None:
        callbacks.append(Flipping(model, flip, ranks))
    if "csv" in more:
        callbacks.append(cx.callbacks.CSVLogger(more["csv"]))
    trainer = cx.DistributedTrainer(model, nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters(), 1e-2))
    settings: dict[str, Any] = {"virtual_ranks": V, "batch_size": 2, "epochs": 2, "verbose": False, "log_hashes": 1}
    settings["check_replicas_every_n_steps"] = 0  # it would end a fit with a flipped weight
    settings |= {name: value for name, value in more.items() if name not in ("csv", "steps")}
    rows = make_rows(V * 2 * more.get("steps", STEPS) // 2 - 5)
    trainer.fit(*rows, checkpoint_dir=folder, callbacks=callbacks, **settings)
    return fingerprint(model)


def logged(folder: Path, ranks: int, flip: Flip | None = None, **more: Any) -> str:
    """Trains on some ranks; returns the folder."""
    hashes = everywhere(ranks, train, str(folder), flip, ranks, more)
    assert flip is not None or len(set(hashes)) == 1
    return str(folder)


def difference_of(first: str, second: str) -> Difference | None:
    return first_difference(read_hashes(first), read_hashes(second))


def random_flip(seed: int, ranks: int) -> Flip:
    generator = random.Random(seed)
    rank = generator.randrange(ranks)
    own = generator.choice(owned_by(rank, ranks, V))
    kind = ("weight", "gradient", "sample")[seed % 3]
    step = generator.randint(2, STEPS)
    return Flip(kind, step, rank, own, generator.randrange(len(TENSORS)), generator.randint(0, 22))


def check_flip(folder: Path, seed: int, ranks: int, others: int) -> None:
    flip = random_flip(seed, ranks)
    clean = logged(folder / "clean", others)
    found = difference_of(clean, logged(folder / "flipped", ranks, flip))
    if flip.kind == "sample" and found is None:
        return  # the last bits of a sample need not change a gradient
    assert found is not None
    assert found.step == flip.step
    assert found.equal_step == flip.step - 1
    if flip.kind == "sample":
        assert (found.part, [*found.tensors]) == ("slices", [flip.slice])
        return
    part, place = ("start", flip.rank) if flip.kind == "weight" else ("slices", flip.slice)
    assert (found.part, found.tensors) == (part, {place: [TENSORS[flip.tensor]]})


@pytest.mark.parametrize(("seed", "ranks", "others"), [(0, 3, 1), (1, 3, 3), (2, 1, 3)])
def test_a_flipped_bit_is_named_by_step_tensor_and_slice_or_rank(tmp_path, seed, ranks, others):
    check_flip(tmp_path, seed, ranks, others)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(3, 24))
def test_every_flipped_bit_is_named(tmp_path, seed):
    generator = random.Random(seed)
    check_flip(tmp_path, seed, generator.choice((1, 2, 3, 4)), generator.choice((1, 2, 3)))


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(20))
def test_pairs_without_a_flip_are_equal(tmp_path, seed):
    generator = random.Random(seed)
    first, second = (logged(tmp_path / name, generator.choice((1, 2, 3, 4, 8)), None, seed=seed) for name in "ab")
    assert difference_of(first, second) is None


def test_runs_on_1_and_3_ranks_are_equal_and_what_else_differs_is_shown(tmp_path, capsys):
    first = logged(tmp_path / "one", 1)
    second = logged(tmp_path / "three", 3)
    assert bisect(first, second) == 0
    out = capsys.readouterr().out
    assert f"{STEPS} steps from 1 to {STEPS}, on 1 rank\n" in out
    assert f"equal: all hashes of {STEPS} steps, of 4 tensors\n" in out
    assert out.endswith("\nWhat else differs (A / B):\n  the number of ranks: 1 / 3\n")
    lines = [json.loads(line) for line in next((tmp_path / "three").glob("hashes-*")).read_text().splitlines()]
    assert lines[0]["tensors"] == TENSORS
    assert lines[0]["ranks"][2]["the processor"]
    assert [*lines[1]["slices"]] == [*map(str, range(V))]


def test_hashes_every_third_step_name_an_interval(tmp_path, capsys):
    flip = Flip("weight", 5, 1, 0, 2, 20)
    first = logged(tmp_path / "clean", 2, log_hashes=3)
    second = logged(tmp_path / "flipped", 2, flip, log_hashes=3)
    assert bisect(first, second) == 1
    out = capsys.readouterr().out
    assert "different: the parameters when step 6 begins" in out
    assert "All is equal after step 3: the difference arises in steps 4 to 5." in out
    assert [*read_hashes(first).steps] == [3, 6]


def test_other_settings_are_named(tmp_path):
    first = read_hashes(logged(tmp_path / "a", 1))
    second = read_hashes(logged(tmp_path / "b", 1, seed=7))
    found = first_difference(first, second)
    assert found is not None
    assert (found.step, found.part, len(found.tensors), found.equal_step) == (1, "slices", V, None)
    assert "the setting seed: 42 / 7" in other_differences(first, second)


def test_a_fit_that_continues_adds_to_its_file(tmp_path):
    whole = logged(tmp_path / "whole", 1, checkpoint_every_n_steps=2)
    folder = tmp_path / "resumed"
    logged(folder, 1, checkpoint_every_n_steps=2)
    keep_only(folder, 4)
    (file,) = folder.glob("hashes-*")
    begun = file.read_text().splitlines()
    # As a killed process leaves it: four steps, and a part of the next line.
    file.write_text("\n".join(begun[:5]) + "\n" + begun[5][:30])
    logged(folder, 3, checkpoint_every_n_steps=2, resume="auto")
    assert [*folder.glob("hashes-*")] == [file]
    assert difference_of(whole, str(folder)) is None
    assert [*read_hashes(str(folder)).steps] == [*range(1, STEPS + 1)]


def test_without_virtual_ranks_a_slice_is_a_rank_and_one_rank_has_averages(tmp_path):
    more = {"virtual_ranks": None, "effective_batch_size": 8, "log_hashes": 2}
    first = read_hashes(logged(tmp_path / "one", 1, **more))
    second = read_hashes(logged(tmp_path / "two", 2, **more))
    assert first.steps[2].hashes["slices"] == {}
    assert [*second.steps[2].hashes["slices"]] == ["0", "1"]
    assert first.steps[2].hashes["average"][0] != second.steps[2].hashes["average"][0]


def again(variable: str, flip: Flip | None, ranks: int, more: dict[str, Any]) -> object:
    """Trains as `cyxtrain replay` lets a program; returns the code with which it ends, or the fit's result."""
    with mock.patch.dict(os.environ, {process_env.REPLAY: variable}):
        try:
            return train("not used", flip, ranks, more)
        except SystemExit as end:
            return end.code


def replayed(monkeypatch: Any, run: str, step: int, ranks: int, flip: Flip | None = None, **more: Any) -> int:
    """Calls `replay` with a fit on some ranks in place of a program."""

    def call(command: list[str], env: dict[str, str]) -> int:
        assert command == ["python", "train.py"]
        codes = everywhere(ranks, again, env[process_env.REPLAY], flip, ranks, more)
        assert codes == [0] * ranks
        return 0

    monkeypatch.setattr(subprocess, "call", call)
    return replay(run, step, ["python", "train.py"], {})


@pytest.mark.parametrize(("ranks", "begins"), [(1, 4), pytest.param(2, 4, marks=pytest.mark.nightly), (3, None)])
def test_a_step_is_computed_again_on_another_number_of_ranks(tmp_path, monkeypatch, capsys, ranks, begins):
    often = {"checkpoint_every_n_steps": 2} if begins else {}
    run = logged(tmp_path / "run", 2, **often)
    files = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert replayed(monkeypatch, run, 5, ranks, checkpoint_every_n_steps=2, csv=str(tmp_path / "log.csv")) == 0
    out = capsys.readouterr().out
    origin = f"{tmp_path / 'run' / 'step-00000004.ckpt'}" if begins else "scratch"
    assert f"B  the same, computed again from {origin}\n" in out
    compared = "1 step" if begins else "5 steps"
    assert f"equal: all hashes of {compared}, of 4 tensors\n" in out
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == files
    assert not (tmp_path / "log.csv").exists()


def test_replay_tells_which_run_has_departed(tmp_path, monkeypatch, capsys):
    flip = Flip("gradient", 5, 1, 6, 2, 20)
    clean = logged(tmp_path / "clean", 2, checkpoint_every_n_steps=4, log_hashes=3)
    departed = logged(tmp_path / "departed", 2, flip, checkpoint_every_n_steps=4, log_hashes=3)
    assert bisect(clean, departed) == 1
    assert replayed(monkeypatch, clean, 6, 1) == 0
    capsys.readouterr()
    assert replayed(monkeypatch, departed, 6, 1) == 1
    out = capsys.readouterr().out
    assert "different: the parameters when step 6 begins\n  rank 0: 3.weight\n" in out
    assert "All is equal after step 4: the difference arises in step 5." in out


@pytest.mark.parametrize(
    ("step", "settings", "compared", "found"),
    [
        (
            4,
            {"checkpoint_every_n_steps": 2},
            "4 steps from 3 to 6",
            "different: the gradients of step 4, before they are added up\n  slice 6: 3.weight\n",
        ),
        (
            5,
            {"log_hashes": 2},
            "3 steps from 2 to 6",
            "All is equal after step 4: the difference arises in step 5.\n",
        ),
    ],
)
def test_replay_compares_each_logged_step_after_the_checkpoint(
    tmp_path, monkeypatch, capsys, step, settings, compared, found
):
    run = logged(tmp_path / "run", 2, Flip("gradient", step, 1, 6, 2, 20), **settings)
    keep_only(tmp_path / "run", 2)
    assert replayed(monkeypatch, run, 6, 1) == 1
    out = capsys.readouterr().out
    assert f".jsonl: {compared}, on 2 ranks\nB  the same" in out
    assert found in out


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(12))
def test_hashes_every_50_steps_name_the_interval_and_replay_the_run(tmp_path, monkeypatch, capsys, seed):
    generator = random.Random(seed)
    ranks, others, again = (generator.choice((1, 2, 3)) for _ in range(3))
    # One of its large bits, which changes what is computed with it.
    flip = random_flip(seed, ranks)._replace(step=generator.randint(51, 99), bit=22)
    often = {"steps": 100, "log_hashes": 50, "checkpoint_every_n_steps": 50}
    clean = logged(tmp_path / "clean", others, **often)
    departed = logged(tmp_path / "departed", ranks, flip, **often)
    assert bisect(clean, departed) == 1
    out = capsys.readouterr().out
    assert "different: the parameters when step 100 begins\n" in out
    assert "All is equal after step 50: the difference arises in steps 51 to 99." in out
    assert replayed(monkeypatch, clean, 100, again, **often) == 0
    assert replayed(monkeypatch, departed, 100, again, **often) == 1


def test_replay_refuses_steps_that_were_not_logged_and_names_a_program_that_ends_before(tmp_path, monkeypatch, capsys):
    run = logged(tmp_path / "run", 1, log_hashes=2)
    with pytest.raises(cx.ConfigError, match=r"has no hashes of step 3\. Choose a step .* such as 2 or 4\."):
        replay(run, 3, ["python", "train.py"], {})
    with pytest.raises(cx.ConfigError, match="cannot start 'no-such-program': No such file"):
        replay(run, 2, ["no-such-program"], {})
    monkeypatch.setattr(subprocess, "call", lambda command, env: 3)
    assert replay(run, 2, ["python", "train.py"], {}) == 2
    assert "The program ended with exit code 3, before the end of step 2" in capsys.readouterr().out


def test_a_mistake_has_exit_code_2_and_a_difference_1(tmp_path, capsys):
    first = logged(tmp_path / "a", 1, log_hashes=2)
    second = logged(tmp_path / "b", 1, log_hashes=2, seed=7)
    program = ["--", "no-such-program"]
    for words, code, error in (
        (["bisect", first, first], 0, ""),
        (["bisect", first, second], 1, ""),
        (["bisect", first, "nowhere"], 2, "CheckpointError: Cannot read nowhere: No such file or directory.\n"),
        (["replay", first, "--step", "3", *program], 2, "ConfigError: .* has no hashes of step 3\\."),
        (["replay", first, "--step", "4", *program], 2, "ConfigError: cannot start 'no-such-program': No such file"),
    ):
        assert call_command_line(words, dict(os.environ)) == code, words
        assert re.match(error or "$", capsys.readouterr().err), words


def test_the_newest_file_of_a_folder_counts(tmp_path, capsys):
    folder = logged(tmp_path / "run", 1)
    (older,) = (tmp_path / "run").glob("hashes-*")
    logged(tmp_path / "run", 1, seed=7)
    (newer,) = {*(tmp_path / "run").glob("hashes-*")} - {older}
    assert bisect(folder, str(newer)) == 0
    assert f"A  {newer}: " in capsys.readouterr().out
    assert bisect(folder, str(older)) == 1


PROGRAM = """
import sys

import torch

import cyxtrain as cx

torch.manual_seed(0)
inputs, targets = torch.randn(40, 4), torch.arange(40) % 3
model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 3))
trainer = cx.DistributedTrainer(model, "cross_entropy", "adam")
settings = {"virtual_ranks": 4, "batch_size": 4, "num_processes": int(sys.argv[1]), "verbose": False}
trainer.fit(inputs, targets, epochs=3, checkpoint_every_n_steps=4, checkpoint_dir="run", log_hashes=1, **settings)
print("the fit is complete")
"""


@pytest.mark.nightly
def test_replay_of_a_program_on_processes_of_its_own(tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *words]
        return subprocess.run(
            command, cwd=tmp_path, env=child_environment(), capture_output=True, text=True, timeout=60, check=False
        )

    done = run("train.py", "2")
    assert done.stdout == "the fit is complete\n", done.stderr
    for command in (["train.py", "1"], ["train.py", "2"], ["cyxtrain", "launch", "-n", "3", "--", "train.py", "1"]):
        done = run("-m", "cyxtrain", "replay", "run", "--step", "7", "--", *command)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "step-00000004.ckpt" in done.stdout
        assert "equal: all hashes of 3 steps, of 4 tensors" in done.stdout
        assert "the fit is complete" not in done.stdout


def weights(folder: str, every: int | None) -> str:
    return train(folder, None, 2, {"log_hashes": every})


def test_logging_changes_no_bit(tmp_path):
    found = [everywhere(2, weights, str(tmp_path / str(every)), every)[0] for every in (None, 2)]
    assert found[0] == found[1]
    assert not (tmp_path / "None").exists()


def refused(folder: str) -> str:
    with pytest.raises(cx.CheckpointError) as error:
        train(folder, None, 2, {})
    return str(error.value)


def test_a_folder_that_cannot_be_written_is_refused_on_all_ranks(tmp_path):
    (tmp_path / "file").touch()
    for words in everywhere(2, refused, str(tmp_path / "file" / "runs")):
        assert "log_hashes: cannot write to" in words
        assert "Choose another checkpoint_dir." in words


def test_a_store_is_refused():
    with pytest.raises(cx.ConfigError, match="log_hashes=50 and checkpoint_dir='s3://bucket/run' are set"):
        cx.DistributedTrainingConfig(log_hashes=50, checkpoint_dir="s3://bucket/run").validate()


def test_a_folder_without_hashes_is_refused(tmp_path):
    with pytest.raises(cx.CheckpointError, match=r"has no hashes-\*\.jsonl: fit writes it there with log_hashes=50"):
        read_hashes(str(tmp_path))
