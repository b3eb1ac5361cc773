"""Claims about checkpoints in a bad world: kills, broken bits, full and failing disks, power cuts."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import shutil
import struct
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import durable_saves
import pytest
import torch
from fitting import adam, fingerprint, make_rows, one_process, run_new_world, seeded
from markers import by_night
from rank_processes import run_ranks, values
from refusals import warning_texts
from torch import nn
from worlds import child_environment

import cyxtrain as cx
from cyxtrain.checkpoint.checkpoint_file import read_checkpoint
from cyxtrain.checkpoint.folder import CheckpointFolder

pytestmark = [
    pytest.mark.usefixtures("rank_server"),
    pytest.mark.skipif(sys.platform != "linux", reason="what happens here is Linux's: ptrace, tmpfs, strace, ioctl"),
]
needs_root = pytest.mark.skipif(sys.platform == "win32" or os.geteuid() != 0, reason="only root mounts file systems")
INPUTS, TARGETS = make_rows(24)


# --- kills -----------------------------------------------------------------------------------------------------------


def check_kills_at_calls(folder: Path, every: int) -> int:
    [found] = values(run_ranks(1, durable_saves.kill_at_each_call, str(folder), every, seconds=300.0))
    *killed, whole = found
    assert whole == (3, [], True)
    assert {step for step, _, _ in killed} == {2, 3}
    assert all(bad == [] for _, bad, _ in killed)
    steps = [step for step, _, _ in killed]
    assert steps == sorted(steps)  # from one call on it is the new one
    return len(killed)


def test_a_kill_at_some_system_calls_of_a_save_leaves_this_step_or_the_one_before(tmp_path):
    assert check_kills_at_calls(tmp_path, 23) > 5


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_a_kill_at_every_system_call_of_a_save_leaves_this_step_or_the_one_before(tmp_path):
    assert check_kills_at_calls(tmp_path, 1) > 100


@pytest.mark.nightly
@pytest.mark.parametrize("kills", [10, 200])
def test_a_kill_at_any_time_leaves_the_last_step_that_was_saved_or_the_one_after(kills, tmp_path):
    [found] = values(run_ranks(1, durable_saves.kill_while_saving, str(tmp_path), kills, kills, seconds=300.0))
    assert len(found) == kills
    assert all(step in (returned, returned + 1) for returned, step in found), found
    assert found[-1][1] > kills / 3  # many of them came while something was being saved


# --- broken bits -----------------------------------------------------------------------------------------------------


def fit(folder: Path, **settings: Any) -> tuple[cx.DistributedTrainer, cx.TrainingHistory]:
    """Fits three epochs, with a model that draws random numbers."""
    with seeded():
        model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.2), nn.Linear(16, 3))
    trainer = cx.DistributedTrainer(model, "cross_entropy", adam(model))
    common = {"epochs": 3, "effective_batch_size": 12, "checkpoint_dir": str(folder), "verbose": False}
    return trainer, trainer.fit(INPUTS, TARGETS, **{**common, **settings})


def parts_of(path: Path) -> dict[str, list[int]]:
    """Returns the places of each byte of a checkpoint: in tensors, in JSON, in the zip's own records."""
    size = path.stat().st_size
    found: dict[str, list[int]] = {"tensors": [], "JSON": [], "zip": []}
    data = path.read_bytes()
    end = 0
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            name, extra = struct.unpack("<HH", data[entry.header_offset + 26 : entry.header_offset + 30])
            begin = entry.header_offset + 30 + name + extra
            found["zip"] += range(end, begin)
            end = begin + entry.file_size
            found["tensors" if entry.filename.endswith(".safetensors") else "JSON"] += range(begin, end)
    found["zip"] += range(end, size)
    assert sum(map(len, found.values())) == size
    return found


def damages(path: Path, count: int) -> Iterator[tuple[str, bytes]]:
    """Gives (what was done, the damaged bytes): as many flipped bits, a third in each kind of place, as cuts."""
    draw, data, parts = random.Random(count), path.read_bytes(), parts_of(path)
    for number in range(count):
        kind = [*parts][number % 3]
        place, bit = draw.choice(parts[kind]), draw.randrange(8)
        flipped = bytearray(data)
        flipped[place] ^= 1 << bit
        yield f"bit {bit} of byte {place} ({kind}) flipped", bytes(flipped)
        kept = draw.randrange(len(data))
        yield f"cut after {kept} bytes", data[:kept]


@pytest.mark.parametrize("count", [6, by_night(500)])
def test_every_flipped_bit_and_every_cut_is_found_and_the_checkpoint_before_is_used(count, tmp_path):
    with one_process():
        trainer, history = fit(tmp_path, checkpoint_every_n_epochs=1)
        whole = [fingerprint(trainer.model), history.history]
        CheckpointFolder(tmp_path).file("epoch-0003").unlink()
        newest = CheckpointFolder(tmp_path).file("epoch-0002")
        for what, data in damages(newest, count):
            newest.write_bytes(data)
            with pytest.warns(UserWarning, match=r"epoch-0002\.ckpt.* It is skipped") as caught:
                trainer, history = fit(tmp_path, resume="auto")
            assert len(caught) == 1, what
            assert [fingerprint(trainer.model), history.history] == whole, what


# --- disks ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def mounted(folder: Path, *how: str) -> Iterator[Path]:
    """A separate file system on a folder."""
    folder.mkdir(exist_ok=True)
    subprocess.run(["mount", *how, str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


class Heavy(nn.Module):
    """A model whose checkpoints have some 700 KB, with Adam's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.ballast = nn.Linear(4, 3), nn.Parameter(torch.zeros(58_000))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layer(rows) + 0 * self.ballast.sum()
        return output


def fit_on(folder: str, on_save_error: str) -> list[Any]:
    """Fits with checkpoints; returns the epochs, the warnings and the error."""
    model = Heavy()
    trainer = cx.DistributedTrainer(model, "cross_entropy", adam(model))
    settings = {"epochs": 3, "effective_batch_size": 12, "verbose": False, "checkpoint_every_n_epochs": 1}
    error = ""
    with warning_texts() as caught:
        try:
            trainer.fit(INPUTS, TARGETS, checkpoint_dir=folder, on_save_error=on_save_error, **settings)
        except cx.CheckpointError as found:
            error = str(found)
    return [trainer.history.epochs, caught, error]


@needs_root
@pytest.mark.parametrize("world_size", [by_night(1), 2])
def test_a_full_disk_lets_training_go_on_or_ends_it_on_every_rank_and_the_last_good_checkpoint_stays(
    world_size, tmp_path
):
    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=1m", "none") as folder:
        for rank, (epochs, said, error) in enumerate(run_new_world(world_size, fit_on, str(folder), "warn")):
            assert (epochs, error) == ([1, 2, 3], "")
            assert len(said) == (2 if rank == 0 else 0), said  # by the rank that writes: why, and in the end how many
            assert not said or "No space left on device. Free space there" in said[0]
            assert not said or said[1] == f"2 checkpoints could not be written to {folder}."
        [path] = folder.iterdir()
        assert read_checkpoint(path).position["epoch"] == 1
        path.unlink()
        for epochs, _, error in run_new_world(world_size, fit_on, str(folder), "raise"):
            assert "No space left on device. Free space there" in error
            assert epochs in ([1, 2], [1, 2, 3])  # found out when the next one is saved
        [path] = folder.iterdir()
        assert read_checkpoint(path).position["epoch"] == 1


@needs_root
def test_on_a_full_disk_what_would_go_afterwards_goes_first(tmp_path):
    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=1700k", "none") as folder, one_process():
        model = Heavy()
        trainer = cx.DistributedTrainer(model, "cross_entropy", adam(model))
        settings = {"epochs": 5, "effective_batch_size": 12, "verbose": False, "checkpoint_dir": str(folder)}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            trainer.fit(INPUTS, TARGETS, checkpoint_every_n_epochs=1, keep_last=2, on_save_error="raise", **settings)
        assert sorted(path.name for path in folder.iterdir()) == ["epoch-0004.ckpt", "epoch-0005.ckpt"]


@needs_root
def test_a_read_only_disk_lets_training_go_on_and_what_it_holds_is_resumed(tmp_path):
    with mounted(tmp_path / "disk", "-t", "tmpfs", "none") as folder, one_process():
        fit(folder, checkpoint_every_n_epochs=1, epochs=1)
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        with pytest.warns(UserWarning, match="Read-only file system.* another folder. Training continues without"):
            _, history = fit(folder, checkpoint_every_n_epochs=1, resume="auto")
        assert history.epochs == [1, 2, 3]
        assert [path.name for path in folder.iterdir()] == ["epoch-0001.ckpt"]


FAILING_FIT = """
import json, sys
sys.path.insert(0, sys.argv[1])
import test_durability
from refusals import warning_texts
from pathlib import Path
with warning_texts() as caught:
    _, history = test_durability.fit(Path(sys.argv[2]), checkpoint_every_n_epochs=1)
print(json.dumps([history.epochs, caught]))
"""


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace makes the disk fail")
@pytest.mark.parametrize(("call", "first"), [("fsync", 3), ("rename,renameat", 2)])
def test_a_disk_that_fails_lets_training_go_on_and_leaves_what_was_good(call, first, tmp_path):
    folder, failing = tmp_path / "disk", f"inject={call}:error=EIO:when={first}+"
    command = ["strace", "-f", "-qq", "-o", "/dev/null", "-e", f"trace={call}", "-e", failing]
    command += [sys.executable, "-c", FAILING_FIT]
    done = subprocess.run(
        [*command, str(Path(__file__).parent), str(folder)],
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    epochs, said = json.loads(done.stdout.splitlines()[-1])
    assert epochs == [1, 2, 3]
    assert said
    assert "Input/output error. Check the disk" in said[0]
    assert said[1:] == [f"2 checkpoints could not be written to {folder}."]
    [path] = folder.iterdir()
    assert read_checkpoint(path).position["epoch"] == 1


# --- a power cut -----------------------------------------------------------------------------------------------------

_SHUT_DOWN, _WITHOUT_THE_LOG = 0x8004587D, 2  # EXT4_IOC_SHUTDOWN, EXT4_GOING_FLAGS_NOLOGFLUSH


def cut_power(folder: str, draw_seconds: float) -> int:
    """Saves step after step until the file system is gone; returns the last one for which saving had returned."""
    return durable_saves.save_until(Path(folder), draw_seconds, lambda: _shut_down(folder))


def _shut_down(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.ioctl(descriptor, _SHUT_DOWN, struct.pack("I", _WITHOUT_THE_LOG))
    finally:
        os.close(descriptor)


@needs_root
@pytest.mark.skipif(shutil.which("mkfs.ext4") is None, reason="an ext4 file system is made here")
@pytest.mark.parametrize("cuts", [1, by_night(30)])
def test_what_save_has_returned_for_survives_a_power_cut(cuts, tmp_path):
    image, draw = tmp_path / "disk.img", random.Random(cuts)
    with open(image, "wb") as file:
        file.truncate(128 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True)
    last = 0
    for _ in range(cuts):
        with mounted(tmp_path / "disk", "-o", "loop", str(image)) as folder:
            path = folder / "checkpoints"
            [returned] = values(run_ranks(1, cut_power, str(path), draw.uniform(0.0, 0.3)))
            assert returned > last
        with mounted(tmp_path / "disk", "-o", "loop", str(image)):
            last = durable_saves.newest(path)
            assert last in (returned, returned + 1)
            assert durable_saves.damaged(path) == []
