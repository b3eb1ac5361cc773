"""Each short example runs on one process and on two ranks, and ends as its docstring says."""

from __future__ import annotations

import ast
import os
import re
import runpy
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from kept_worlds import on_ranks
from markers import nightly_where
from page_runs import run_program
from rank_processes import run_ranks, values

import cyxtrain as cx

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e-\d+)?")
SECONDS = 60.0

pytestmark = pytest.mark.usefixtures("rank_server")


@dataclass
class Ending:
    """The expected last line of an example.

    Attributes:
        line: A pattern of the whole line.
        least: Lower limit of each number in the line.
        most: Upper limit of each number in the line.
        same_on_two_ranks: Whether two ranks print the same as one, up to rounding.
    """

    line: str
    least: tuple[float, ...] = ()
    most: tuple[float, ...] = ()
    same_on_two_ranks: bool = True


ACCURACY = r"(0\.\d{4})"
SHORT = {
    "accumulation": Ending("equal: True"),
    "callbacks": Ending(r"ended after (\d+) and (\d+) of 30 epochs", (2, 4), (4, 9)),
    "collectives": Ending(r"ranks counted: (\d)", (1,), (2,), same_on_two_ranks=False),
    "contrastive": Ending(
        f"test accuracy with 50 labels: {ACCURACY} on features, {ACCURACY} on pixels",
        (0.5, 0.2),
        (0.8, 0.45),
        same_on_two_ranks=False,
    ),
    "custom_loop": Ending(f"test accuracy: {ACCURACY}", (0.95,), (0.99,)),
    "distillation": Ending(
        f"test accuracy: teacher {ACCURACY}  student alone {ACCURACY}  with the teacher {ACCURACY}",
        (0.94, 0.8, 0.91),
        (0.98, 0.9, 0.97),
    ),
    "imbalanced": Ending(f"recall: {ACCURACY} with equal weights {ACCURACY} with class_weight", (0, 0.6), (0.3, 0.9)),
    "mixed_precision": Ending(
        f"test accuracy: fp32 {ACCURACY}  bf16 {ACCURACY}  fp16 {ACCURACY}",
        (0.95, 0.95, 0.95),
        (0.99, 0.99, 0.99),
        same_on_two_ranks=False,
    ),
    "powersgd": Ending(
        rf"(17\.3) times fewer bytes, accuracy {ACCURACY}", (17, 0.94), (18, 0.99), same_on_two_ranks=False
    ),
    "regression": Ending(f"test mae {ACCURACY}  r2 {ACCURACY}", (0.08, 0.96), (0.12, 0.99)),
    "resume": Ending("bit for bit: True", same_on_two_ranks=False),  # dropout differs between ranks
    "gan": Ending(
        r"new ones: mean (0\.\d\d), variance between pictures (0\.\d{3})",
        (0.24, 0.03),
        (0.38, 0.09),
        same_on_two_ranks=False,
    ),
    "sam": Ending(r"SAM: test loss (0\.\d{3}), test accuracy (0\.\d{3})", (0.55, 0.79), (0.66, 0.84)),
    "text_bytes": Ending(r"Although practicality beats purity\."),
    "vae": Ending(
        f"squared error per pixel: {ACCURACY}, of the mean picture {ACCURACY}",
        (0.02, 0.07),
        (0.04, 0.08),
        same_on_two_ranks=False,
    ),
}
SHORT["vae_gan"] = Ending(SHORT["vae"].line, (0.015, 0.07), (0.03, 0.08), same_on_two_ranks=False)
DAILY = ("callbacks", "collectives")
LONGER = {"draw_pictures", "train_cyxtrain", "train_digits", "train_torch"}
"""Examples that tests/docs/test_examples.py runs, and one that needs a browser."""


def check_ending(name: str, said: str) -> None:
    ending, last = SHORT[name], said.splitlines()[-1]
    found = re.fullmatch(ending.line, last)
    assert found, last
    for number, least, most in zip(map(float, found.groups()), ending.least, ending.most, strict=True):
        assert least <= number <= most, last


def check_same(said: str, other: str) -> None:
    """Assert that words are equal and numbers nearly equal, because sums of other parts round differently."""
    assert NUMBER.split(said) == NUMBER.split(other)
    assert list(map(float, NUMBER.findall(said))) == pytest.approx(list(map(float, NUMBER.findall(other))), abs=0.03)


@nightly_where(lambda name: name not in DAILY)
@pytest.mark.parametrize("name", SHORT)
def test_alone_and_on_two_ranks_it_ends_as_it_says(name, tmp_path):
    program = str(EXAMPLES / f"{name}.py")
    (alone,) = values(run_ranks(1, run_program, program, str(tmp_path), seconds=SECONDS))
    first, second = values(run_ranks(2, run_program, program, str(tmp_path), seconds=SECONDS))
    check_ending(name, alone)
    check_ending(name, first)
    assert second == ""
    assert list(tmp_path.iterdir()) == []
    if SHORT[name].same_on_two_ranks:
        check_same(first, alone)


@on_ranks(2)
def test_powersgd_sends_as_many_bytes_as_the_example_says():
    example = runpy.run_path(str(EXAMPLES / "powersgd.py"))
    model, columns, sent = example["make_model"](), example["COLUMNS"], [0]
    all_reduce = dist.all_reduce

    def counting(tensor, *arguments, **keywords):
        sent[0] += tensor.numel() * tensor.element_size()
        return all_reduce(tensor, *arguments, **keywords)

    ddp = cx.DistributedDataParallel(model, compression="powersgd", matrix_approximation_rank=columns)
    with mock.patch.object(dist, "all_reduce", counting):
        ddp(torch.ones(2, 64)).sum().backward()
    gradients = example["sent_bytes"](model, columns)
    assert gradients <= sent[0] < gradients + 100  # plus a few flags
    assert 17 < example["sent_bytes"](model, 0) / gradients < 18


@pytest.mark.nightly
@pytest.mark.parametrize("launcher", [(), ("-m", "cyxtrain", "launch", "-n", "2", "--", sys.executable)])
@pytest.mark.parametrize("name", SHORT)
def test_it_runs_as_a_user_starts_it(name, launcher, tmp_path):
    command = [sys.executable, *launcher, str(EXAMPLES / f"{name}.py")]
    # One thread: with other tests on the machine, several threads would wait for each other.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "[rank 1]" not in run.stdout
    check_ending(name, run.stdout.replace("[rank 0] ", ""))
    assert list(tmp_path.iterdir()) == []


def test_every_example_is_tried():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*SHORT, *LONGER}


@pytest.mark.parametrize("name", SHORT)
def test_it_is_short_and_begins_with_what_it_shows_how_to_run_it_and_what_to_expect(name):
    text = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    assert 30 <= len(text.splitlines()) <= 80
    shows, runs, *expects = (ast.get_docstring(ast.parse(text)) or "").split("\n\n")
    assert "\n" not in shows
    assert runs.startswith("Run it ")
    commands = {line.strip() for line in expects[0].splitlines()}
    assert commands == {f"python examples/{name}.py", f"cyxtrain launch -n 2 -- python examples/{name}.py"}
    assert re.search(r"\bExpect\s", expects[-1])


def test_readme_of_the_examples_names_each_of_them_and_nothing_else():
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    named = re.findall(r"`([\w/]+(?:\.\w+|/))`", "\n".join(re.findall(r"^\| (`.+?) \|", text, flags=re.MULTILINE)))
    there = {f"{path.name}/" if path.is_dir() else path.name for path in EXAMPLES.iterdir()}
    assert sorted(named) == sorted(there - {"README.md", "guides/", "pictures/", "__pycache__/"})
