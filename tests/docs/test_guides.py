"""The guides in examples/guides do what their docstrings say, on one rank and on two."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from markers import by_night, nightly_where
from page_runs import run_program
from rank_processes import run_ranks, values
from worlds import SUPPORT, child_environment, free_port

from cyxtrain.world.devices import why_no_nccl

ROOT = Path(__file__).resolve().parents[2]
GUIDES = sorted((ROOT / "examples" / "guides").glob("*.py"))
API = SUPPORT / "guide_api.py"
DEADLINE_SECONDS = 110
ROUNDING = 0.01
"""Ranks add in another order, so a row or two of the test or validation data may be classified differently."""


def numbers(said: str, name: str) -> list[float]:
    """Return every number that follows a name."""
    found = re.findall(rf"{re.escape(name)}:? (\d+\.?\d*)", said)
    assert found, f"no {name!r} in:\n{said}"
    return [float(number) for number in found]


def check_process_group(said: str, world_size: int) -> None:
    missing = why_no_nccl()
    assert ("BackendUnavailableError: NCCL library not available" in said) == bool(missing), said
    assert ("NCCL library available" in said) != bool(missing), said
    total = sum(range(1, world_size + 1))
    assert f"all_reduce: SUM {total}, MAX {world_size}, MIN 1" in said
    assert f"all_gather: {[float(rank) for rank in range(world_size)]}" in said
    assert "broadcast, on the last rank: [3.0, 1.0, 4.0]" in said
    losses = numbers(said, "loss")
    assert len(losses) == 8
    assert losses[-1] < 0.1 < losses[0]
    assert numbers(said, "test accuracy")[0] >= 0.94
    assert "alone: rank 0 of 1, SUM 7" in said


def check_data_parallel(said: str, world_size: int) -> None:
    assert f"{world_size} ranks: DataParallel and DistributedDataParallel give the same parameters" in said
    for rank in range(world_size):
        assert f"rank {rank}: {1408 // world_size} samples in 44 batches" in said
        assert f"rank {rank} received [{10.0 * rank}, {10.0 * rank}]" in said
    losses = numbers(said, "loss")
    assert len(losses) == 6
    assert losses[-1] < 0.1 < losses[0]
    assert "no_sync: the gradients of two batches are those of one process" in said
    assert numbers(said, "test accuracy")[0] >= 0.94


def check_quick_start(said: str, world_size: int) -> None:
    for rank in range(world_size):
        assert f"rank {rank} of {world_size}" in said
    assert f"32 samples a step, {world_size} ranks" in said
    assert numbers(said, "losses from")[0] > 0.5
    assert f"{1408 // world_size} of 1408 samples on this rank, in 88 batches" in said
    assert numbers(said, "test accuracy by fit")[0] >= 0.94
    assert numbers(said, "test accuracy by hand")[0] >= 0.94


def check_config_and_models(said: str, world_size: int) -> None:
    assert "gradient checkpointing changes no bit: True" in said
    for name in ("test loss by fit", "test loss by hand"):
        assert 24 < numbers(said, name)[0] < 30
    exact, mean = numbers(said, "of eleven samples")[0], numbers(said, f"as the mean over {world_size} ranks")[0]
    if world_size == 1:
        assert mean == pytest.approx(exact, abs=ROUNDING)
    else:
        assert 0.001 < abs(mean - exact) < 1


def check_amp_trainer(said: str, world_size: int) -> None:
    assert "rate for a step of 96 samples: 0.01 (linear), 0.005 (sqrt, used)\n" in said
    scales = [int(scale.replace(",", "")) for scale in re.findall(r"epoch \d: loss scale ([\d,]+)", said)]
    assert len(scales) == 6
    assert all(1 < scale < 2**30 for scale in scales)
    loop, weights = numbers(said, "loop: accuracy")[0], numbers(said, "% of the checkpoint: accuracy")[0]
    assert loop == weights >= 0.93
    assert numbers(said, "fit: accuracy")[0] >= 0.94


CHECKS = {name.removeprefix("check_"): check for name, check in globals().items() if name.startswith("check_")}
SAME_ON_ANY_NUMBER_OF_RANKS = {
    "data_parallel": ["loss", "test accuracy"],
    "quick_start": ["loss", "val_loss", "validation accuracy", "test accuracy by fit", "test accuracy by hand"],
}
"""Numbers that are the same on any number of ranks."""
FILES = {"quick_start": ["checkpoints/by_fit.safetensors", "checkpoints/by_hand.safetensors"]}
"""The only files that each guide leaves behind."""


def by_name(path: Path) -> str:
    return path.stem


def test_each_guide_is_checked():
    assert sorted(CHECKS) == [path.stem for path in GUIDES]


@nightly_where(lambda path: by_name(path) != "amp_trainer")
@pytest.mark.usefixtures("rank_server")
@pytest.mark.parametrize("path", GUIDES, ids=by_name)
def test_guides_do_on_one_rank_and_on_two_what_they_say(path, tmp_path):
    said = {}
    for world_size in (1, 2):
        (folder := tmp_path / str(world_size)).mkdir()
        said[world_size] = "".join(values(run_ranks(world_size, run_program, str(path), str(folder))))
        CHECKS[path.stem](said[world_size], world_size)
        left = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
        assert left == FILES.get(path.stem, [])
    for name in SAME_ON_ANY_NUMBER_OF_RANKS.get(path.stem, ()):
        assert numbers(said[1], name) == pytest.approx(numbers(said[2], name), abs=ROUNDING)


@pytest.mark.usefixtures("rank_server")
@pytest.mark.parametrize("world_size", [1, by_night(2)])
def test_every_line_of_the_api_sections_runs_as_typed(world_size, tmp_path):
    said = values(run_ranks(world_size, run_program, str(API), str(tmp_path)))
    for rank, own in enumerate(said):
        assert f"rank {rank} of {world_size}: every line ran" in own


def commands(path: Path) -> list[str]:
    """Return the commands in a guide's docstring."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return re.findall(r"^    (\S.*)$", docstring, flags=re.MULTILINE)


@pytest.mark.parametrize("path", GUIDES, ids=by_name)
def test_guides_say_how_they_are_started(path):
    name = f"examples/guides/{path.name}"
    ways = [f"python {name}", f"cyxtrain launch -n 2 -- python {name}", f"torchrun --nproc-per-node 2 {name}"]
    assert commands(path)[:3] == ways


@pytest.mark.nightly
@pytest.mark.parametrize("way", range(3), ids=["python", "launcher", "torchrun"])
@pytest.mark.parametrize("path", GUIDES, ids=by_name)
def test_guides_run_as_they_are_started(path, way, tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    modules = {"cyxtrain": "cyxtrain", "torchrun": "torch.distributed.run"}
    first, *rest = shlex.split(commands(path)[way])
    command = [sys.executable, *(["-m", modules[first]] if first in modules else []), *rest]
    binaries = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = child_environment(PATH=binaries, **({"PET_MASTER_PORT": str(free_port())} if way == 2 else {}))
    run = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=DEADLINE_SECONDS
    )
    assert run.returncode == 0, run.stdout + run.stderr
    # Under torchrun, two ranks may write to one line.
    said = re.sub(r"^\[rank \d\] ", "", run.stdout, flags=re.MULTILINE)
    starts_two = path.stem == "config_and_models"  # also without a launcher
    CHECKS[path.stem](said, 2 if way or starts_two else 1)
