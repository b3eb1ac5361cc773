"""Each program of the guide for Keras users runs, on one process and on several ranks."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from markers import nightly_where
from rank_processes import run_ranks, values

import cyxtrain as cx

GUIDE = (Path(__file__).parents[2] / "examples" / "keras_to_cyxtrain.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^(<!-- keras -->\n)?```python\n(.*?)^```$", GUIDE, flags=re.MULTILINE | re.DOTALL)
KERAS = [program for is_keras, program in BLOCKS if is_keras]
PROGRAMS = [program for is_keras, program in BLOCKS if not is_keras]
EXPECTED = [("Test accuracy", 0.93), ("Validation accuracy", 0.8), ("Recall of the rare class", 0.5)]
"""The name and the lower limit of the number in each program's last line."""


def test_each_of_kerass_programs_has_one_of_ours():
    assert len(KERAS) == len(PROGRAMS) == len(EXPECTED) == 3


@pytest.mark.parametrize("program", KERAS)
def test_kerass_programs_are_python(program):
    compile(program, "guide", "exec")


def run_program(number: int, folder: str) -> str:
    """Run a program as a rank, in an empty folder; return its output."""
    os.chdir(folder)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(PROGRAMS[number], "train.py", "exec"), {"__name__": "__main__"})
        cx.finalize()
    return said.getvalue()


def check(number: int, said: str) -> None:
    name, least = EXPECTED[number]
    found = re.findall(rf"{name}: ([\d.]+)", said)
    assert len(found) == 1, said
    assert float(found[0]) >= least


@nightly_where(lambda number: number > 0)
@pytest.mark.usefixtures("rank_server")
@pytest.mark.parametrize("number", range(3))
def test_programs_run_and_learn_on_two_ranks(number, tmp_path):
    first, second = values(run_ranks(2, run_program, number, str(tmp_path), seconds=100.0))
    check(number, first)
    assert not second


@pytest.mark.nightly
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("number", range(3))
def test_programs_run_as_they_are_started(number, world_size, tmp_path):
    (tmp_path / "train.py").write_text(PROGRAMS[number], encoding="utf-8")
    command = [sys.executable, "-m", "cyxtrain.launch", str(world_size), "train.py"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=110)
    assert run.returncode == 0, run.stdout + run.stderr
    check(number, run.stdout)
