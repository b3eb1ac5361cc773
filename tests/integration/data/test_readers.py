"""Data in parts: readers give the same samples to each step on any number of ranks, each read by one rank."""

from __future__ import annotations

import functools
import importlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fitting import FEATURES, everywhere, fingerprint, flat, keep_only, make_model, make_rows, one_process, seeded
from kept_worlds import close_worlds
from markers import by_night
from refusals import ending, refuses
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import cyxtrain as cx

pytestmark = pytest.mark.usefixtures("rank_server")
FILES = (9, 4, 2, 13, 6, 1, 3, 5)
"""Rows of each file: readers end at different steps."""
ROWS = sum(FILES)
BATCH = 12
INPUTS, TARGETS = make_rows(ROWS)
FIT: dict[str, Any] = {"epochs": 2, "effective_batch_size": BATCH, "readers": 4, "verbose": False}
STEPS = {4: 6, 8: 7}
"""Of an epoch, by readers: reader 3 has 18 rows of 4 readers, and gives 3 to each; of 8 it has 13, and gives 2."""


class Files:
    """The rows of files, dealt to readers; notes which were read, and the epochs that it was told of."""

    def __init__(self, noise: float = 0.1) -> None:
        self.noise = noise
        self.read: list[int] = []
        self.told: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.told.append(epoch)

    def __call__(self, reader: int, readers: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        ends = np.cumsum(FILES)
        for file in range(reader, len(FILES), readers):
            for row in range(ends[file] - FILES[file], ends[file]):
                self.read.append(row)
                yield INPUTS[row] + self.noise * torch.randn(FEATURES) * float(np.random.rand()), TARGETS[row]


class Noting(nn.Module):
    """Notes what it is trained on, and draws its own random numbers."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.layers = make_model("float64")
        self.drop = nn.Dropout(drop)
        self.seen: list[float] = []

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self.training and torch.is_grad_enabled():
            self.seen += rows[:, 0].tolist()
        return self.layers(self.drop(rows))


class Steps(cx.callbacks.Callback):
    """Notes how many rows this rank has seen after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[int] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.ends.append(len(self.trainer.model.seen))


def trained(data: Any, *, drop: float = 0.0, **settings: Any) -> dict[str, Any]:
    with seeded():
        model = Noting(drop)
    steps = Steps()
    trainer = cx.DistributedTrainer(model, "cross_entropy", torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    history = trainer.fit(data, callbacks=[steps], **{**FIT, **settings})
    starts = [0, *steps.ends]
    return {
        "bits": fingerprint(model),
        "parameters": flat(model.parameters()),
        "history": history.history,
        "steps": [model.seen[begin:end] for begin, end in zip(starts, steps.ends, strict=False)],
        "read": getattr(data, "read", []),
        "told": getattr(data, "told", []),
    }


def of_all_ranks(ranks: list[dict[str, Any]]) -> list[list[float]]:
    """Returns the rows of each step over all ranks, sorted."""
    return [sorted(row for own in each for row in own) for each in zip(*(rank["steps"] for rank in ranks), strict=True)]


def fit_files(settings: dict[str, Any]) -> dict[str, Any]:
    return trained(Files(), **settings)


@functools.cache
def alone(readers: int = 4) -> dict[str, Any]:
    with one_process():
        return fit_files({"readers": readers})


@pytest.mark.parametrize(
    ("world_size", "settings"),
    [
        (1, {"accumulation_steps": 2}),
        (2, {}),
        by_night(2, {"accumulation_steps": 3}),
        by_night(3, {}),
        by_night(4, {}),
        by_night(8, {"readers": 8}),
    ],
)
def test_steps_have_the_same_rows_on_any_number_of_ranks_each_read_once(world_size, settings):
    readers = settings.get("readers", 4)
    expected = alone(readers)
    found = everywhere(world_size, fit_files, settings)
    assert len(expected["steps"]) == 2 * STEPS[readers]
    assert of_all_ranks(found) == of_all_ranks([expected])
    assert sorted(row for each in found for row in each["read"]) == sorted(2 * [*range(ROWS)])
    assert len({each["bits"] for each in found}) == 1
    for each in found:
        np.testing.assert_allclose(each["parameters"], expected["parameters"], atol=1e-12)
        np.testing.assert_allclose(each["history"]["loss"], expected["history"]["loss"], atol=1e-12)


def test_a_step_takes_its_rows_from_the_readers_in_turn():
    with one_process():
        first = trained(Files(noise=0.0), epochs=1)["steps"][0]
    starts = [0, 9, 13, 15, 28, 34, 35, 38]  # of each file
    readers = [
        [*range(starts[r], starts[r] + FILES[r]), *range(starts[r + 4], starts[r + 4] + FILES[r + 4])] for r in range(4)
    ]
    rows = [readers[i % 4][i // 4] for i in range(BATCH) if i // 4 < len(readers[i % 4])]
    assert first == INPUTS[rows, 0].double().tolist()


def test_data_are_told_the_number_of_each_pass():
    with one_process():
        assert sorted({*trained(Files(), epochs=3)["told"]}) == [0, 1, 2]


def test_epochs_of_some_steps_continue_in_the_data():
    with one_process():
        whole = trained(Files(), epochs=1)["steps"]
        found = trained(Files(), epochs=4, steps_per_epoch=2)["steps"]
    assert found[: STEPS[4]] == whole
    assert len(found) == 8


# --- resumed --------------------------------------------------------------------------------------------------------


def interrupted(folder: str, resume: str | None, settings: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(cx.get_rank() + 100 * (resume is not None))
    saving = {"checkpoint_every_n_steps": 2, "checkpoint_dir": folder}
    return trained(Files(), drop=0.3, resume=resume, **{**saving, **settings})


@pytest.mark.parametrize(("settings", "step"), [({}, 8), by_night({"steps_per_epoch": 3}, 4)])
def test_two_ranks_resume_in_the_middle_of_a_pass_with_the_same_bits(settings, step, tmp_path):
    through = everywhere(2, interrupted, str(tmp_path), None, settings)
    keep_only(tmp_path, step)
    close_worlds()  # what resumes is another process
    again = everywhere(2, interrupted, str(tmp_path), "auto", settings)
    for before, after in zip(through, again, strict=True):
        assert before["bits"] == after["bits"]
        assert before["history"] == after["history"]
        assert before["steps"][step:] == after["steps"]


@pytest.mark.parametrize(("before", "after"), [(2, 1), by_night(1, 4), by_night(4, 2)])
def test_another_number_of_ranks_resumes_with_the_same_rows(before, after, tmp_path):
    settings = {"drop": 0.0}
    through = everywhere(before, resumable, str(tmp_path), None, settings)
    keep_only(tmp_path, 8)
    found = everywhere(after, resumable, str(tmp_path), "auto", settings)
    assert of_all_ranks(found) == of_all_ranks(through)[8:]
    np.testing.assert_allclose(found[0]["parameters"], through[0]["parameters"], atol=1e-12)


def resumable(folder: str, resume: str | None, settings: dict[str, Any]) -> dict[str, Any]:
    return trained(Files(), resume=resume, checkpoint_every_n_steps=2, checkpoint_dir=folder, **settings)


def test_another_number_of_readers_cannot_resume(tmp_path):
    with one_process():
        resumable(str(tmp_path), None, {})
        with pytest.raises(cx.ConfigError, match="readers is 2 and was 4"):
            resumable(str(tmp_path), "auto", {"readers": 2, "epochs": 3})


# --- evaluation and prediction --------------------------------------------------------------------------------------


def evaluated() -> list[Any]:
    with seeded():
        model = make_model("float64")
    trainer = cx.DistributedTrainer(model, "cross_entropy", torch.optim.SGD(model.parameters(), 0.0))
    of_arrays = tuple(trainer.evaluate(INPUTS, TARGETS, batch_size=6))
    files = Files(noise=0.0)
    history = trainer.fit(Files(0.0), validation_data=files, **{**FIT, "epochs": 1})
    validated = (history.history["val_loss"][0], history.history["val_accuracy"][0])
    found = [of_arrays, validated, tuple(trainer.evaluate(Files(0.0)))]
    return [*found, trainer.predict(INPUTS).tolist(), trainer.predict(Files(0.0)).tolist(), files.read]


@pytest.mark.parametrize("world_size", [1, 2, by_night(4)])
def test_evaluation_and_prediction_read_each_row_once_in_the_order_of_the_readers(world_size):
    ranks = everywhere(world_size, evaluated)
    for expected, validated, measured, outputs, predicted, _ in ranks:
        np.testing.assert_allclose([validated, measured], [expected, expected], rtol=1e-6)
        order = [row for reader in range(4) for row, _ in of_reader(reader)]
        np.testing.assert_allclose(predicted, np.array(outputs)[order], atol=1e-12)
    assert sorted(row for each in ranks for row in each[-1]) == [*range(ROWS)]


def of_reader(reader: int) -> list[tuple[int, int]]:
    ends = np.cumsum(FILES)
    return [
        (row, file) for file in range(reader, len(FILES), 4) for row in range(int(ends[file]) - FILES[file], ends[file])
    ]


# --- refusals -------------------------------------------------------------------------------------------------------


class Rows(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(zip(INPUTS, TARGETS, strict=True))


def batches() -> Iterator[Any]:
    yield INPUTS, TARGETS


def number(reader: int, readers: int) -> int:
    return reader + readers


def nothing(reader: int, readers: int) -> list[Any]:
    return []


LOADER = DataLoader(TensorDataset(INPUTS, TARGETS), 4)
test_what_cannot_work_is_refused = refuses(
    (lambda: trained(Files(), readers=None), "X is Files, which readers share: set readers, such as readers=8"),
    (lambda: trained(LOADER), "readers=4 is for data in parts, and X is DataLoader, which has none"),
    (lambda: trained(Rows()), "readers=4 is for data in parts, and X is Rows"),
    (lambda: trained(batches), "X is batches, which has none: leave readers out, or give a function of"),
    (lambda: trained(INPUTS, y=TARGETS), "readers=4 is for data in parts, and X is Tensor"),
    (lambda: trained(Files(), effective_batch_size=3), "a step has 3 samples over all ranks: some readers"),
    (lambda: trained(Files(), drop_last=True), "drop_last is set, and the number of samples of X is unknown"),
    (lambda: trained(Files(), sharded_data=True), "readers=4 and sharded_data=True are set"),
    (lambda: trained(Files(), y=TARGETS), "which gives y itself"),
    (lambda: trained(number), "the function number, which returned a int: it must return an iterable of samples"),
    (lambda: trained(nothing), "the nothing gives no batch"),
)


def with_one_reader() -> str:
    return ending(trained, Files(), readers=1)


def broken(reader: int, readers: int) -> Iterator[Any]:
    yield from zip(INPUTS[:20], TARGETS[:20], strict=True)
    if reader == 3:
        raise OSError("the file of reader 3 is gone")


def with_a_broken_reader() -> str:
    return ending(trained, broken)


def test_fewer_readers_than_ranks_and_errors_of_a_reader_are_told_to_all_ranks():
    for text in everywhere(2, with_one_reader):
        assert "ConfigError" in text
        assert "readers=1, and there are 2 ranks" in text
    found = everywhere(2, with_a_broken_reader)
    assert all("the file of reader 3 is gone" in text for text in found), found


# --- other people's data --------------------------------------------------------------------------------------------


def write_parquet(folder: Path) -> Path:
    """Writes 3 files of Parquet, of 3, 3 and 2 row groups with the rows of `FILES`."""
    import pyarrow
    from pyarrow import parquet

    groups = iter(zip(FILES, np.cumsum(FILES), strict=True))
    for name, count in (("a", 3), ("b", 3), ("c", 2)):
        writer = None
        for rows, end in [next(groups) for _ in range(count)]:
            part = slice(int(end) - rows, int(end))
            features = pyarrow.array(list(INPUTS[part].numpy()), pyarrow.list_(pyarrow.float32(), FEATURES))
            columns = {"rows": features, "text": ["a"] * rows, "label": TARGETS[part].numpy()}
            table = pyarrow.table(columns)
            writer = writer or parquet.ParquetWriter(folder / f"{name}.parquet", table.schema)
            writer.write_table(table, row_group_size=max(rows, 1))
        assert writer is not None
        writer.close()
    return folder


def fit_parquet(folder: str, settings: dict[str, Any]) -> dict[str, Any]:
    import pyarrow.dataset

    return trained(pyarrow.dataset.dataset(folder, format="parquet"), **settings)


def fit_stream(settings: dict[str, Any]) -> dict[str, Any]:
    import datasets

    rows = {"rows": INPUTS.numpy(), "label": TARGETS.numpy()}
    stream = datasets.Dataset.from_dict(rows).to_iterable_dataset(num_shards=6).with_format("torch")
    return trained(stream.shuffle(seed=3, buffer_size=5), **settings)


@pytest.mark.nightly
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_parquet_is_read_by_row_groups(world_size, tmp_path):
    pytest.importorskip("pyarrow.dataset")
    folder = str(write_parquet(tmp_path))
    with one_process():
        expected = trained(Files(noise=0.0))
    found = everywhere(world_size, fit_parquet, folder, {})
    assert of_all_ranks(found) == of_all_ranks([expected])
    for each in found:
        np.testing.assert_allclose(each["parameters"], expected["parameters"], atol=1e-12)


@pytest.mark.nightly
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_stream_of_hugging_face_is_read_by_shards(world_size, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # a progress bar, also a disabled one, leaves a thread
    with one_process():
        expected = fit_stream({})
    found = everywhere(world_size, fit_stream, {})
    assert of_all_ranks(found) == of_all_ranks([expected])
    rows = [row for step in of_all_ranks(found) for row in step]
    assert sorted(rows) == sorted(2 * INPUTS[:, 0].double().tolist())


class Tars:
    """The rows of tar files, one for each of `FILES`, as WebDataset reads them; notes which were decoded."""

    def __init__(self, folder: str, shuffles: bool) -> None:
        self.urls = sorted(str(path) for path in Path(folder).glob("*.tar"))
        self.shuffles = shuffles
        self.read: list[int] = []

    def noted(self, sample: dict[str, Any]) -> dict[str, Any]:
        self.read.append(int(sample["__key__"]))
        return sample

    def __call__(self, reader: int, readers: int) -> Any:
        webdataset: Any = importlib.import_module("webdataset")
        # A reader has its own files: WebDataset must not deal them to ranks again.
        order = 100 if self.shuffles else False
        data = webdataset.WebDataset(self.urls[reader::readers], nodesplitter=None, shardshuffle=order)
        if self.shuffles:
            data = data.shuffle(5, seed=random.randrange(1 << 30))
        return data.decode().map(self.noted).to_tuple("npy", "cls")


def write_tars(folder: Path) -> str:
    """Writes a tar file of each of `FILES`."""
    webdataset: Any = importlib.import_module("webdataset")
    ends = np.cumsum(FILES)
    for file, rows in enumerate(FILES):
        with webdataset.TarWriter(str(folder / f"{file}.tar")) as writer:
            for row in range(int(ends[file]) - rows, int(ends[file])):
                writer.write({"__key__": f"{row:03d}", "npy": INPUTS[row].numpy(), "cls": int(TARGETS[row])})
    return str(folder)


def fit_tars(tars: str, shuffles: bool, settings: dict[str, Any]) -> dict[str, Any]:
    return trained(Tars(tars, shuffles), **settings)


@pytest.mark.nightly
@pytest.mark.parametrize("shuffles", [False, True])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 4), (4, 1)])
def test_tar_files_of_webdataset_are_decoded_once_and_resume_on_another_number_of_ranks(
    before, after, shuffles, tmp_path
):
    pytest.importorskip("webdataset")
    (tmp_path / "tars").mkdir()
    tars = write_tars(tmp_path / "tars")
    settings = {"checkpoint_every_n_steps": 2, "checkpoint_dir": str(tmp_path / "checkpoints")}
    with one_process():
        expected = trained(Tars(tars, shuffles) if shuffles else Files(noise=0.0))
    through = everywhere(before, fit_tars, tars, shuffles, settings)
    assert of_all_ranks(through) == of_all_ranks([expected])
    assert sorted(row for each in through for row in each["read"]) == sorted(2 * [*range(ROWS)])
    steps = of_all_ranks(through)
    half = len(steps) // 2
    assert (steps[:half] != steps[half:]) == shuffles
    keep_only(tmp_path / "checkpoints", 8)
    found = everywhere(after, fit_tars, tars, shuffles, {**settings, "resume": "auto"})
    assert of_all_ranks(found) == steps[8:]
    for each in [*through, *found]:
        np.testing.assert_allclose(each["parameters"], expected["parameters"], atol=1e-12)


@pytest.mark.nightly
def test_fewer_parts_than_readers_and_filtered_files_are_refused(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)
    dataset = pytest.importorskip("pyarrow.dataset")
    folder = str(write_parquet(tmp_path))
    data = dataset.dataset(folder, format="parquet")
    with one_process():
        assert "readers=7, and X has 6 shards" in ending(fit_stream, {"readers": 7})
        assert "readers=9, and X has 8 row groups" in ending(fit_parquet, folder, {"readers": 9})
        assert "which readers share: set readers" in ending(fit_parquet, folder, {"readers": None})
        assert "Remove the filtering" in ending(trained, data.filter(dataset.field("label") == 1))
