"""Over "ring" too: other trainers. Each is installed in a virtual environment of its own.

PyTorch's wheel for Linux brings CUDA's libraries (5 GB). An index with wheels for CPUs alone, where there is one, is
taken from PIP_EXTRA_INDEX_URL.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
import torch
from worlds import SUPPORT, TESTS, child_environment, free_port

ROOT = TESTS.parent
PYTEST = ("-m", "pytest", "-p", "no:cacheprovider", "-q", "-c", ROOT / "pyproject.toml")
NO_REGISTRY = ("connection broken by", "Failed to establish a new connection", "Temporary failure in name resolution")
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(sys.platform == "win32", reason="it stops what hangs by process groups"),
]


def run(*command: object, seconds: float, folder: Path, **variables: str) -> str:
    """Runs a command in a folder, and returns what it wrote; nothing outlives it."""
    process = subprocess.Popen(
        [str(part) for part in command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env=child_environment(**variables),
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command[1:], output)
    return output


def installed(folder: Path, *requirements: object, inherit: bool) -> Path:
    """Returns the Python of a new virtual environment with these requirements.

    Args:
        folder: Empty.
        requirements: As pip takes them.
        inherit: What the running Python has is there too, and its PyTorch stays.
    """
    venv.create(folder, with_pip=True)
    python, kept = folder / "bin" / "python", folder / "kept.txt"
    if inherit:
        packages = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
        (Path(packages) / "inherited.pth").write_text(sysconfig.get_path("purelib") + "\n")
    kept.write_text(f"torch=={torch.__version__}\n" if inherit else "")
    try:
        run(python, "-m", "pip", "install", "-c", kept, *requirements, seconds=1200, folder=folder, PYTHONPATH="")
    except subprocess.CalledProcessError as error:
        if any(sign in error.output for sign in NO_REGISTRY):
            pytest.skip(f"pip reaches no registry: {error.output[-500:]}")
        raise AssertionError(error.output[-3000:]) from None
    return python


@pytest.fixture(scope="module")
def trainers(tmp_path_factory):
    """A Python with Lightning, torchmetrics and Accelerate beside the PyTorch that runs the tests."""
    python = installed(tmp_path_factory.mktemp("trainers"), "lightning", "torchmetrics", "accelerate", inherit=True)
    found = run(python, "-c", "import torch; print(torch.__version__, torch.__file__)", seconds=60, folder=SUPPORT)
    assert found.split() == [torch.__version__, torch.__file__]
    return python


def same_on_both_backends(folder: Path) -> None:
    for rank in range(2):
        ours, theirs = torch.load(folder / f"ring{rank}"), torch.load(folder / f"gloo{rank}")
        assert len(ours) >= 4
        assert list(ours) == list(theirs)
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def test_lightning_trains_as_over_gloo_bit_by_bit(trainers, tmp_path):
    for backend in ("ring", "gloo"):
        run(trainers, SUPPORT / "unchanged_lightning.py", backend, tmp_path, seconds=120, folder=tmp_path)
    same_on_both_backends(tmp_path)


def test_accelerate_trains_as_over_gloo_bit_by_bit(trainers, tmp_path):
    launch = (trainers, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port")
    for backend in ("ring", "gloo"):
        program = (free_port(), SUPPORT / "unchanged_accelerate.py", backend, tmp_path)
        run(*launch, *program, seconds=120, folder=tmp_path)
    same_on_both_backends(tmp_path)


def test_torchmetrics_computes_over_all_ranks(trainers, tmp_path):
    command = (
        trainers,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-q",
        "-m",
        "nightly or not nightly",
        "-k",
        "metrics_of",
    )
    output = run(
        *command, TESTS / "compat" / "test_unchanged.py", "-c", ROOT / "pyproject.toml", seconds=180, folder=tmp_path
    )
    assert "2 passed" in output


def test_checkpoints_are_saved_by_a_process_in_the_background(tmp_path):
    """By a world from nothing: the ranks of the other tests may not have children."""
    from unchanged import run_cases
    from worlds import run_processes

    case = "checkpoints_in_another_process"
    for result in run_processes(2, run_cases, "unchanged_sharding", [case], str(tmp_path), seconds=120):
        assert result.value == {case: None}
