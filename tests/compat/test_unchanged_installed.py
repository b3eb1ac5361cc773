"""Over "ring" too: other trainers. Each is installed in its own virtual environment.

PyTorch's wheel for Linux brings CUDA's libraries (5 GB). An index with wheels for CPUs alone, where there is one, is
taken from PIP_EXTRA_INDEX_URL.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from installed import ROOT, installed, run
from worlds import SUPPORT, TESTS, free_port

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(sys.platform == "win32", reason="it stops what hangs by process groups"),
]


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
