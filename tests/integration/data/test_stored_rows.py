"""Claims about HDF5 datasets as X and y: the bits of the array, and no rank reads rows that it does not use."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from fitting import (
    FEATURES,
    Floats,
    SaveAt,
    adam,
    everywhere,
    fingerprint,
    flat,
    make_model,
    make_rows,
    one_process,
    run_new_world,
    run_world,
)
from markers import by_night
from refusals import refusal
from torch import Tensor, nn

import cyxtrain as cx

h5py = pytest.importorskip("h5py")
pytestmark = pytest.mark.usefixtures("rank_server")

ROWS, BATCH = 2000, 20
FIT: dict[str, Any] = {"epochs": 1, "effective_batch_size": BATCH, "verbose": False}
WAYS: dict[str, dict[str, Any]] = {
    "shuffled": {},
    "in order": {"shuffle": False, "accumulation_steps": 2},
    "split": {"validation_split": 0.25},
    "split by class": {"validation_split": 0.25, "validation_stratify": True, "class_weight": {0: 1, 1: 2, 2: 3}},
}


def write(path: Path, rows: int = ROWS) -> str:
    """Writes rows to a file in chunks of 64, with a mask as a y of several numbers per sample."""
    inputs, targets = make_rows(rows)
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=inputs.numpy(), chunks=(64, FEATURES), compression="gzip")
        file.create_dataset("y", data=targets.numpy())
        file.create_dataset("mask", data=inputs.numpy().argsort(1) % 3)
    return str(path)


@contextlib.contextmanager
def rows_read() -> Iterator[Counter[str]]:
    """Counts the rows of each dataset that are read within."""
    counts: Counter[str] = Counter()
    read = h5py.Dataset.__getitem__

    def counting(dataset: Any, *arguments: Any, **keywords: Any) -> Any:
        found = read(dataset, *arguments, **keywords)
        counts[dataset.name] += len(found)
        return found

    with mock.patch.object(h5py.Dataset, "__getitem__", counting):
        yield counts


def fitted(inputs: Any, targets: Any, **settings: Any) -> tuple[str, Any]:
    """Returns the bits of the model, and the history."""
    model = make_model()
    trainer = cx.DistributedTrainer(model, "cross_entropy", adam(model))
    history = trainer.fit(inputs, targets, **{**FIT, **settings})
    return fingerprint(model), history.history


def train_both(path: str) -> dict[str, bool]:
    """Returns in which ways a fit of the file and one of the arrays come to the same bits."""
    same = {}
    with h5py.File(path) as file:
        inputs = file["x"][:]
        targets = file["y"][:]
        for name, settings in WAYS.items():
            same[name] = fitted(file["x"], file["y"], **settings) == fitted(inputs, targets, **settings)
        held_out = (file["x"], file["y"])
        expected = fitted(inputs, targets, validation_data=(inputs, targets))
        same["validation_data"] = fitted(file["x"], targets, validation_data=held_out) == expected
        model = make_model()
        trainer = cx.DistributedTrainer(model, "cross_entropy", adam(model))
        predictions = trainer.predict(file["x"])
        same["predict"] = bool(np.array_equal(predictions, trainer.predict(inputs)))
        same["evaluate"] = [*trainer.evaluate(file["x"], file["y"])] == [*trainer.evaluate(inputs, targets)]
        same["an array"] = isinstance(predictions, np.ndarray)
    return same


@pytest.mark.parametrize("world_size", [by_night(1), 2])
def test_a_file_trains_evaluates_and_predicts_with_the_bits_of_the_array(tmp_path, world_size):
    path = write(tmp_path / "rows.h5", 500)
    for same in everywhere(world_size, train_both, path):
        assert [name for name, is_same in same.items() if not is_same] == []


def count_rows(path: str) -> list[int]:
    """Returns how many rows of X this rank reads in an epoch, in a prediction, and to plan a fit of one step."""
    counts = []
    with h5py.File(path) as file:
        single_step = {"max_steps": 1, "validation_split": 0.25, "validation_stratify": True, "validation_steps": 1}
        for settings in ({}, single_step):
            with rows_read() as read:
                fitted(file["x"], file["y"], **settings)
            counts.append(read["/x"])
        trainer = cx.DistributedTrainer(make_model(), "cross_entropy")
        with rows_read() as read:
            trainer.predict(file["x"])
        counts.append(read["/x"])
    return counts


@pytest.mark.parametrize("world_size", [by_night(1), 2])
def test_a_rank_reads_its_own_rows_once_and_hundreds_for_checks(tmp_path, world_size):
    path = write(tmp_path / "rows.h5")
    for epoch, single_step, prediction in everywhere(world_size, count_rows, path):
        share = ROWS // world_size
        assert share <= epoch <= share + 300
        assert single_step <= 900
        assert share <= prediction <= share + 300 + 64


def resume(path: str, folder: str) -> tuple[bool, int]:
    """Returns whether a fit that resumes in the middle of an epoch ends with the same bits, and the rows it reads."""
    with h5py.File(path) as file:
        steps = ROWS // BATCH
        at = steps - 20
        expected, _ = fitted(file["x"], file["y"], callbacks=[SaveAt(f"{folder}/middle.ckpt", at)])
        with rows_read() as read:
            found, _ = fitted(file["x"], file["y"], resume=f"{folder}/middle.ckpt")
    return found == expected, read["/x"]


@pytest.mark.parametrize("world_size", [by_night(1), 2])
def test_resuming_in_mid_epoch_reads_the_rest_alone(tmp_path, world_size):
    path = write(tmp_path / "rows.h5")
    for is_same, read in everywhere(world_size, resume, path, str(tmp_path)):
        assert is_same
        assert read <= 20 * BATCH + 300


class Pixels(nn.Module):
    """Gives scores of 3 classes for each of the numbers of a row."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = make_model(outputs=3 * FEATURES)

    def forward(self, rows: Tensor) -> Tensor:
        return self.layer(rows).reshape(len(rows), 3, FEATURES)


def test_a_y_of_several_numbers_per_sample_stays_in_the_file(tmp_path):
    path = write(tmp_path / "rows.h5")
    [(losses, expected, read)] = everywhere(1, train_pixels, path)
    assert losses == pytest.approx(expected, rel=1e-6)
    assert read <= 600


def train_pixels(path: str) -> tuple[list[float], list[float], int]:
    """Returns the losses of a fit of the file and of one of the arrays, and how many rows of y the first one reads."""
    with h5py.File(path) as file:
        with rows_read() as read:
            losses = pixel_losses(file["x"], file["mask"])
        return losses, pixel_losses(file["x"][:], file["mask"][:]), read["/mask"]


def pixel_losses(inputs: Any, targets: Any) -> list[float]:
    model = Pixels()
    trainer = cx.DistributedTrainer(model, "cross_entropy", adam(model))
    return trainer.fit(inputs, targets, max_steps=5, **FIT).train_losses


def test_a_closed_file_is_refused_before_anything_starts(tmp_path):
    with h5py.File(write(tmp_path / "rows.h5")) as file:
        inputs = file["x"]
        targets = file["y"][:]
    assert "X is in an HDF5 file that is closed" in run_world(2, refused, str(tmp_path / "rows.h5"))[1]
    with one_process():
        assert "call fit, evaluate or predict before" in refusal(fitted, inputs, targets)


def refused(path: str) -> str:
    with h5py.File(path) as file:
        inputs = file["x"]
        if cx.is_master():
            return refusal(fitted, inputs, file["y"])
    return refusal(fitted, inputs, make_rows(ROWS)[1])


class ByName(nn.Module):
    """The small model, which takes its rows by name."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = make_model()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def train_arrow(folder: str) -> list[Floats]:
    """Returns the parameters after a fit of an Arrow file, and after one of the arrays by name."""
    import datasets

    inputs, targets = make_rows(ROWS)
    found = []
    for data in ((datasets.load_from_disk(folder).with_format("torch"),), ({"x": inputs}, targets)):
        model = ByName()
        cx.DistributedTrainer(model, "cross_entropy", adam(model)).fit(*data, **FIT)
        found.append(flat(model.parameters()))
    return found


@pytest.mark.nightly
@pytest.mark.parametrize("world_size", [1, 2])
def test_an_arrow_file_of_hugging_face_trains_as_the_array(tmp_path, monkeypatch, world_size):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # a progress bar, also a disabled one, leaves a thread
    inputs, targets = make_rows(ROWS)
    made = datasets.Dataset.from_dict({"x": inputs.numpy(), "label": targets.numpy()})
    made.save_to_disk(str(tmp_path / "arrow"))
    for found, expected in everywhere(world_size, train_arrow, str(tmp_path / "arrow")):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


def anonymous_megabytes() -> float:
    """Returns the memory of this process that is no file's."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.partition("RssAnon:")[2].split()[0]) / 1024


def train_on_gigabytes(path: str) -> float:
    """Returns the most megabytes that a fit of the file has more than one of few rows."""
    width = 1024
    peak: list[float] = []
    note = cx.callbacks.LambdaCallback(on_train_batch_end=lambda *_: peak.append(anonymous_megabytes()))
    settings = {**FIT, "effective_batch_size": 64, "callbacks": [note]}
    trainer = cx.DistributedTrainer(nn.Linear(width, 2), "cross_entropy", "sgd")
    trainer.fit(np.zeros((640, width), "float32"), np.zeros(640, "int64"), **settings)
    before = anonymous_megabytes()
    peak.clear()
    with h5py.File(path) as file:
        trainer.fit(file["x"], file["y"], validation_split=0.25, validation_steps=5, max_steps=40, **settings)
        peak.append(anonymous_megabytes())
    return max(peak) - before


@pytest.mark.nightly
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="only Linux tells")
def test_a_file_of_4_gb_takes_at_most_200_mb_of_each_rank(tmp_path):
    path = tmp_path / "large.h5"
    rows = 1_000_000
    with h5py.File(path, "w") as file:
        # Chunks that nobody has written have the fill value, and are not on disk.
        file.create_dataset("x", (rows, 1024), "float32", chunks=(64, 1024), fillvalue=0.5)
        file["y"] = np.zeros(rows, "int64")
        assert file["x"].nbytes > 4e9
    assert max(run_new_world(2, train_on_gigabytes, str(path))) < 200
