"""Claims about programs as people bring them: each has the losses of one rank on several, up to rounding."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from fitting import everywhere, run_world

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
PORTED, SIDE = EXAMPLES / "ported", EXAMPLES / "side_by_side"

pytestmark = [pytest.mark.usefixtures("rank_server"), pytest.mark.timeout(300)]


class Ported(NamedTuple):
    """What a program promises.

    Attributes:
        path: Its file.
        line: A pattern of the last line that rank 0 prints.
        least: Lower limit of each number in that line.
        most: Upper limit of each number in that line.
        packages: What it imports that tests do not need.
        tolerance: Of the history on several ranks, relative and absolute.
    """

    path: Path
    line: str
    least: tuple[float, ...]
    most: tuple[float, ...]
    packages: tuple[str, ...] = ()
    tolerance: float = 1e-6


SECONDS = 250.0
NUMBER = r"(\d+\.\d+)"
PROGRAMS = {
    "forecaster": Ported(
        PORTED / "forecaster.py",
        f"mean absolute error: {NUMBER}, of last week's value: {NUMBER}",
        (0.07, 0.1),
        (0.1, 0.12),
    ),
    "vae": Ported(PORTED / "vae.py", f"squared error per pixel: {NUMBER}", (0.02,), (0.04,)),
    "tabular": Ported(PORTED / "tabular.py", f"auc {NUMBER}", (0.8,), (0.9,)),
    "char_rnn": Ported(PORTED / "char_rnn.py", r"invented: \S+.*", (), ()),
    "seq2seq": Ported(PORTED / "seq2seq.py", f"translated: {NUMBER}", (0.9,), (1,)),
    "text": Ported(SIDE / "text_cyxtrain.py", f"loss {NUMBER}  accuracy {NUMBER}", (0, 0.95), (0.2, 1)),
    "gan": Ported(SIDE / "gan_cyxtrain.py", rf"clusters (\d)  near one {NUMBER}", (8, 0.7), (8, 1)),
    "frozen_resnet": Ported(
        PORTED / "frozen_resnet.py",
        f"test loss {NUMBER}  accuracy {NUMBER}",
        (0.5, 0.7),
        (1, 1),
        packages=("torchvision",),
    ),
    "gpt2": Ported(
        SIDE / "gpt2_cyxtrain.py",
        f"loss {NUMBER}  accuracy {NUMBER}",
        (0, 0.95),
        (0.2, 1),
        packages=("transformers",),
        tolerance=1e-4,  # its loss is computed in float32
    ),
    "lora": Ported(
        PORTED / "lora.py",
        f"trained {NUMBER}% of the parameters, accuracy {NUMBER}",
        (5, 0.95),
        (6, 1),
        packages=("transformers", "peft"),
    ),
}
Histories = dict[str, list[float]]


def run_program(path: str) -> tuple[Histories, str]:
    """Run a program as a rank, in float64; return its history, and its last line."""
    before = [*sys.path]
    torch.set_default_dtype(torch.float64)  # in float32, some of these models amplify rounding
    sys.path.insert(0, str(Path(path).parent))  # as Python does for a script
    try:
        with contextlib.redirect_stdout(io.StringIO()) as said:
            history = runpy.run_path(path)["main"]()
    finally:
        sys.path[:] = before
        torch.set_default_dtype(torch.float32)
    return history.history, (said.getvalue().splitlines() or [""])[-1]


def check_ending(program: Ported, last: str) -> None:
    found = re.fullmatch(program.line, last)
    assert found, last
    for number, least, most in zip(map(float, found.groups()), program.least, program.most, strict=True):
        assert least <= number <= most, last


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "world_size"), [*((name, 2) for name in PROGRAMS), ("vae", 4), ("tabular", 4), ("gan", 4)]
)
def test_it_has_the_losses_of_one_rank_on_several(name, world_size):
    program = PROGRAMS[name]
    for package in program.packages:
        pytest.importorskip(package)
    [(alone, last)] = everywhere(1, run_program, str(program.path))
    check_ending(program, last)
    first, *others = run_world(world_size, run_program, str(program.path), seconds=SECONDS)
    check_ending(program, first[1])
    assert all(line == "" for _, line in others)
    for history, _ in (first, *others):
        assert history.keys() == alone.keys()
        for measured, values in alone.items():
            assert history[measured] == pytest.approx(values, rel=program.tolerance, abs=program.tolerance), measured


@pytest.mark.nightly
@pytest.mark.parametrize("library", ["lightning", "accelerate", "transformers"])
@pytest.mark.parametrize("task", ["text", "gpt2", "gan"])
def test_the_same_program_in_another_library_reaches_the_same(task, library):
    for package in ("transformers",) * (task == "gpt2"):
        pytest.importorskip(package)
    pytest.importorskip(library)
    path = SIDE / f"{task}_{'trainer' if library == 'transformers' else library}.py"
    if not path.exists():
        pytest.skip("Hugging Face's Trainer has one optimizer")
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    check_ending(PROGRAMS[task], done.stdout.splitlines()[-1])
