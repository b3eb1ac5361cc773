"""The core of the suite on every version of PyTorch that cyxtrain says it is tested with, in its own environment.

`pytest -m nightly tests/compat/test_torch_versions.py` runs it. `-k 2.15` takes one version, and
`--python 2.15=/path/python` a Python that has that version and the tests' requirements already. pip's configuration (a
limit for torch, say) does not apply here unless PIP_CONFIG_FILE names the file.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from installed import PYTEST, ROOT, installed, run
from worlds import TESTS

import cyxtrain
from cyxtrain.environment import torch_compat

CORE = ("examples", "invariants", "unchanged", "resume", "notebooks", "stepping", "torch_compat")
"""The digits, the invariants, PyTorch's DDP and FSDP2 over the ring, resume, the notebook, and private names."""
OF_THE_ENDS = (
    *("allocator", "collectives", "compile", "ddp", "features", "fused", "joining", "key_values", "nonfinite"),
    *("precision", "relays"),
    *("own_steps", "optimizers", "on_batch", "logged", "metrics", "whole_sets", "validations", "prediction_folders"),
    *("ready_callbacks", "schedules", "views"),
)
"""With all of the ring, on the oldest and the newest version alone."""
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(7200),
    pytest.mark.skipif(sys.platform == "win32", reason="it stops what hangs by process groups"),
]


def python_of(version: str, given: list[str], folder: Path) -> Path:
    """Returns a Python with this version of PyTorch and the tests' requirements: one of those given, or a new one."""
    for entry in given:
        name, _, path = entry.partition("=")
        if name == version:
            return Path(path)
    project = folder / "project"  # pip builds where the project lies
    package = Path(cyxtrain.__file__).parent
    shutil.copytree(package, project / package.name)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, project)
    return installed(folder / "environment", f"torch=={version}.*", f"{project}[test]", inherit=False)


def file_of(name: str) -> Path:
    return next(TESTS.rglob(f"test_{name}.py"))


@pytest.mark.parametrize("version", torch_compat.TESTED_VERSIONS)
def test_core_of_the_suite(version, pytestconfig, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PIP_CONFIG_FILE", os.environ.get("PIP_CONFIG_FILE", os.devnull))
    monkeypatch.delenv("PIP_CONSTRAINT", raising=False)
    python = python_of(version, pytestconfig.getoption("--python"), tmp_path)
    found = run(python, "-c", "import torch; print(torch.__version__)", seconds=300, folder=tmp_path)
    assert found.startswith(f"{version}.")
    tests = [file_of(name) for name in CORE]
    if version in (torch_compat.TESTED_VERSIONS[0], torch_compat.TESTED_VERSIONS[-1]):
        tests += [*sorted(TESTS.rglob("test_ring_*.py")), *map(file_of, OF_THE_ENDS)]
    try:
        output = run(python, *PYTEST, *tests, seconds=6000, folder=tmp_path)
    except subprocess.CalledProcessError as error:
        output = error.output
    last = output.strip().splitlines()[-1]
    with capsys.disabled():
        print(f"\nPyTorch {found.strip()}: {last}")
    assert " passed" in last, output[-10_000:]
    assert "failed" not in last, output[-10_000:]
    assert "error" not in last, output[-10_000:]
