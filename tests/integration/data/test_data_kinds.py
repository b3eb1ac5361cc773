"""The table of the kinds of data in docs/data.md is true: what is split, in which order, and read how often."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
from fitting import Floats, SaveAt, adam, fingerprint, flat, make_model, make_rows, run_world
from pages import ROOT
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

import cyxtrain as cx

pytestmark = pytest.mark.usefixtures("rank_server")

ROWS, BATCH, RANKS, SAVED = 900, 20, 2, 36
INPUTS, TARGETS = make_rows(ROWS)
FIT: dict[str, Any] = {"epochs": 1, "effective_batch_size": BATCH, "verbose": False}
CHECKS = 300
"""Rows that checks read at most, before the first step."""


class Numbered(Dataset[Any]):
    """Notes the samples that it gives."""

    def __init__(self) -> None:
        self.given: list[int] = []

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        self.given.append(row)
        return INPUTS[row], TARGETS[row]


class Streamed(IterableDataset[Any]):
    """Notes the samples that it gives."""

    def __init__(self) -> None:
        self.given: list[int] = []

    def __iter__(self) -> Iterator[Any]:
        for row in range(ROWS):
            self.given.append(row)
            yield INPUTS[row], TARGETS[row]


class Stateful(Streamed):
    """Continues from a state."""

    first = 0

    def __iter__(self) -> Iterator[Any]:
        while self.first < ROWS:
            row = self.first
            self.first += 1
            self.given.append(row)
            yield INPUTS[row], TARGETS[row]
        self.first = 0

    def state_dict(self) -> dict[str, int]:
        return {"first": self.first}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.first = state["first"]


def part_of_rows(given: list[int], reader: int, readers: int) -> Iterator[Any]:
    """Notes the samples that it gives."""
    for row in range(reader, ROWS, readers):
        given.append(row)
        yield INPUTS[row], TARGETS[row]


@contextlib.contextmanager
def opened(kind: str, folder: str) -> Iterator[tuple[tuple[Any, ...], list[int] | None]]:
    """Yields the data, and a list that grows with each sample that is read; None: nobody counts."""
    numbered = Numbered()
    streamed = Streamed()
    if kind == "arrays, tensors":
        yield (INPUTS, TARGETS), None
    elif kind == "tables":
        pandas: Any = importlib.import_module("pandas")
        yield (pandas.DataFrame(INPUTS.numpy()), pandas.Series(TARGETS.numpy())), None
    elif kind == "memory maps":
        yield (np.load(f"{folder}/x.npy", mmap_mode="r"), np.load(f"{folder}/y.npy", mmap_mode="r")), None
    elif kind == "HDF5 datasets":
        with opened_file(f"{folder}/rows.h5") as found:
            yield found
    elif kind == "`Dataset`":
        yield (numbered,), numbered.given
    elif kind == "`DataLoader`":
        yield (DataLoader(numbered, batch_size=BATCH // RANKS, shuffle=True),), numbered.given
    elif kind == "generators, `IterableDataset`":
        yield (streamed,), streamed.given
    elif kind == "iterables with a `state_dict`":
        stateful = Stateful()
        yield (stateful,), stateful.given
    elif kind == "data in parts, with `readers`":
        given: list[int] = []
        yield (functools.partial(part_of_rows, given),), given


@contextlib.contextmanager
def opened_file(path: str) -> Iterator[tuple[tuple[Any, ...], list[int]]]:
    import h5py

    given: list[int] = []
    read = h5py.Dataset.__getitem__

    def noting(dataset: Any, *arguments: Any, **keywords: Any) -> Any:
        found = read(dataset, *arguments, **keywords)
        if dataset.name == "/x":
            given.extend([0] * len(found))
        return found

    with h5py.File(path) as file, mock.patch.object(h5py.Dataset, "__getitem__", noting):
        yield (file["x"], file["y"]), given


def train(kind: str, folder: str) -> dict[str, Any]:
    """Returns the bits of a fit and of one that resumes in mid-epoch, and how many samples this rank reads for each."""
    found: dict[str, Any] = {"bits": [], "read": []}
    checkpoint = f"{folder}/middle.ckpt"
    settings = FIT
    if kind.startswith(("generators", "iterables")):
        settings = {**FIT, "batch_size": BATCH // RANKS, "effective_batch_size": None, "sharded_data": False}
    if kind.startswith("data in parts"):
        settings = {**FIT, "readers": RANKS}
    for more in ({"callbacks": [SaveAt(checkpoint, SAVED)]}, {"resume": checkpoint}):
        with opened(kind, folder) as (data, given):
            model = make_model()
            cx.DistributedTrainer(model, "cross_entropy", adam(model)).fit(*data, **settings, **more)
            found["bits"].append(fingerprint(model))
            found["parameters"] = flat(model.parameters())
            found["read"].append(None if given is None else len(given))
    return found


def table() -> dict[str, list[str]]:
    """Returns the cells of the table, by the kind of data."""
    text = (ROOT / "docs/data.md").read_text(encoding="utf-8")
    section = text.partition("## Kinds of data")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")][2:]
    return {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in rows}


@pytest.mark.parametrize("kind", table())
def test_each_kind_of_data_is_read_as_the_table_says(kind, tmp_path):
    split, order, read, again = table()[kind]
    np.save(tmp_path / "x.npy", INPUTS.numpy())
    np.save(tmp_path / "y.npy", TARGETS.numpy())
    if kind == "tables":
        pytest.importorskip("pandas")
    if kind == "HDF5 datasets":
        h5py = pytest.importorskip("h5py")
        with h5py.File(tmp_path / "rows.h5", "w") as file:
            file.create_dataset("x", data=INPUTS.numpy(), chunks=(16, INPUTS.shape[1]))
            file["y"] = TARGETS.numpy()
    ranks = run_world(RANKS, train, kind, str(tmp_path))
    assert split == ("by batches" if read == "all by each rank" else "by samples")
    for found in ranks:
        whole, resumed = found["bits"]
        assert resumed == whole
        is_alike = np.allclose(found["parameters"], in_memory(), rtol=1e-4, atol=1e-6)  # up to rounding
        assert is_alike == (order in ("shuffled by `seed`", "its sampler's"))
        if found["read"][0] is not None:
            check_counts(found["read"], read, again)


def check_counts(counts: list[int], read: str, again: str) -> None:
    """Compares how many samples one of two ranks has read, in an epoch and on resume, with the words of the table."""
    in_epoch, on_resume = counts
    left = (ROWS - SAVED * BATCH) // RANKS
    if read == "each by one rank":
        assert ROWS // RANKS <= in_epoch <= ROWS // RANKS + CHECKS
    else:
        assert read == "all by each rank"
        assert in_epoch >= ROWS
    if again in ("none", "the last step"):
        if read == "all by each rank":
            left *= RANKS
        assert left <= on_resume <= left + CHECKS
    else:
        assert again == "all before the checkpoint"
        assert on_resume >= in_epoch


@functools.cache
def in_memory() -> Floats:
    """Returns the parameters after a fit of the arrays on as many ranks."""
    parameters: Floats = run_world(RANKS, train_in_memory)[0]
    return parameters


def train_in_memory() -> Floats:
    model = make_model()
    cx.DistributedTrainer(model, "cross_entropy", adam(model)).fit(INPUTS, TARGETS, **FIT)
    return flat(model.parameters())
