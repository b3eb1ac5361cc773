"""Claims about rows of an HDF5 dataset: they have the values of the array, and only those that are used are read."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from refusals import refusal

from cyxtrain.data.batches.rows import as_rows, gather, sampled_hash
from cyxtrain.data.batches.stored import StoredTensor
from cyxtrain.notebook.sharing import as_bytes, from_bytes, returning

h5py = pytest.importorskip("h5py")

ROWS, WIDTH = 3000, 6
VALUES = np.random.default_rng(0).random((ROWS, WIDTH)) * 100
ORDERS = {
    "shuffled": np.random.default_rng(1).permutation(ROWS)[:700],
    "repeated": np.array([5, 2, 2999, 5, 0, 5]),
    "neighbors": np.arange(40, 900),
    "near": np.arange(100, 160, 2)[::-1].copy(),
    "none": np.array([], dtype=np.int64),
}


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Any]:
    """A file with a dataset `x` in chunks, open for reading."""
    with h5py.File(tmp_path / "rows.h5", "w") as made:
        made.create_dataset("x", data=VALUES, chunks=(64, WIDTH), compression="gzip")
        made.create_dataset("plain", data=VALUES)
        made.create_dataset("y", data=np.arange(ROWS))
        made.create_dataset("words", (4, 2), h5py.string_dtype())
    with h5py.File(tmp_path / "rows.h5", "r") as opened:
        yield opened


@pytest.fixture
def rows_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each read of a dataset returned."""
    counts: list[int] = []
    read = h5py.Dataset.__getitem__

    def counting(dataset: Any, *arguments: Any, **keywords: Any) -> Any:
        found = read(dataset, *arguments, **keywords)
        counts.append(len(found))
        return found

    monkeypatch.setattr(h5py.Dataset, "__getitem__", counting)
    return counts


@pytest.mark.parametrize("name", ["x", "plain"])
@pytest.mark.parametrize("order", ORDERS)
def test_rows_have_the_values_of_the_array_in_any_order(file, name, order):
    tensor = as_rows(file[name]).inputs
    assert isinstance(tensor, StoredTensor)
    expected = torch.from_numpy(VALUES[ORDERS[order]])
    found = gather(tensor, torch.from_numpy(ORDERS[order]))
    assert type(found) is torch.Tensor
    assert torch.equal(found, expected)
    part = tensor[100:2500]
    inside = ORDERS[order] % 2400
    assert torch.equal(gather(part, torch.from_numpy(inside)), torch.from_numpy(VALUES[100:2500][inside]))
    picked = part.chosen(np.arange(0, 2400, 3))[10:500]
    assert torch.equal(picked.read(), torch.from_numpy(VALUES[100:2500:3][10:500]))


TYPES = ["float16", ">f4", "float64", "longdouble", "int8", ">i4", "uint8", "uint16", "uint64", "bool", "complex64"]


@pytest.mark.parametrize("dtype", TYPES)
def test_types_are_those_of_the_array(tmp_path, dtype):
    values = (VALUES[:50] % 2).astype(dtype)
    with h5py.File(tmp_path / "typed.h5", "w") as made:
        made["x"] = values
        stored, array = as_rows(made["x"]).inputs, as_rows(values).inputs
        rows = torch.tensor([7, 3, 44])
        assert stored.dtype == array.dtype
        assert torch.equal(gather(stored, rows), gather(array, rows))


def test_only_rows_that_are_used_are_read(file, rows_read):
    tensor = as_rows(file["x"]).inputs
    assert tensor.shape == (ROWS, WIDTH)
    assert (tensor.dtype, tensor.dim(), len(tensor[5:20]), tensor.numel()) == (torch.float64, 2, 15, VALUES.size)
    assert tensor.is_cpu
    assert tensor.device.type == "cpu"
    assert tensor.is_floating_point()
    assert tensor.layout is torch.strided
    assert not tensor.is_complex()
    tensor.chosen(np.arange(9))
    assert rows_read == []
    gather(tensor, torch.tensor([2000, 5, 900]))
    assert sum(rows_read) == 3
    rows_read.clear()
    gather(tensor, torch.from_numpy(ORDERS["shuffled"]))
    assert sum(rows_read) <= 4 * 700
    rows_read.clear()
    sampled_hash(tensor)
    assert sum(rows_read) <= 64
    rows_read.clear()
    tensor[:2].clone()
    assert rows_read == [2]


def test_any_other_operation_sees_the_values(file):
    tensor = as_rows(file["x"]).inputs[:30]
    plain = torch.from_numpy(VALUES[:30])
    for found, expected in (
        (tensor + 1, plain + 1),
        (torch.cat([tensor, plain]), torch.cat([plain, plain])),
        (tensor[3], plain[3]),
        (tensor[:, 2], plain[:, 2]),
        (tensor[::2], plain[::2]),
        (tensor.sum(dim=1), plain.sum(dim=1)),
        (torch.nn.functional.linear(tensor, plain), torch.nn.functional.linear(plain, plain)),
    ):
        assert type(found) is torch.Tensor
        assert torch.equal(found, expected)
    assert np.array_equal(tensor.numpy(), VALUES[:30])


def test_one_number_per_row_is_read_once(file, rows_read):
    rows = as_rows(file["x"], file["y"], file["y"])
    assert type(rows.targets) is torch.Tensor
    assert torch.equal(rows.targets, torch.arange(ROWS))
    assert type(rows.weights) is torch.Tensor


def test_several_datasets_and_groups_are_several_inputs(file):
    for inputs in ((file["x"], file["plain"]), [file["x"], file["plain"]], {"a": file["x"], "b": file["plain"]}):
        found = as_rows(inputs).tensors()
        assert [type(each) for each in found] == [StoredTensor] * 2
    with h5py.File(f"{file.filename}.group", "w") as made:
        made["a"] = VALUES
        made["b"] = VALUES[:, :2]
        assert [*as_rows(made).inputs] == ["a", "b"]


def test_a_closed_file_and_text_are_refused(file):
    assert "X is an HDF5 dataset of object values; it must hold numbers" in refusal(as_rows, file["words"])
    closed = file["x"]
    tensor = as_rows(closed).inputs
    file.close()
    assert "X is in an HDF5 file that is closed" in refusal(as_rows, closed)
    assert "X is in an HDF5 file that is closed" in refusal(as_rows, file)
    assert "y is in an HDF5 file that is closed" in refusal(as_rows, VALUES, closed)
    assert "closed while it was read" in refusal(gather, tensor, torch.tensor([0]))


def test_another_process_opens_the_file_itself(file):
    data = as_bytes({"x": file["x"], "all": file}, returning({}))
    assert len(data) < 1000
    found = from_bytes(data)
    assert np.array_equal(found["x"][:], VALUES)
    assert np.array_equal(found["all"]["plain"][5], VALUES[5])
    found["x"].file.close()
    found["all"].file.close()
    assert file["x"][0, 0] == VALUES[0, 0]


def test_a_file_that_others_cannot_open_is_not_sent(tmp_path):
    with h5py.File(tmp_path / "new.h5", "w") as made:
        made["x"] = VALUES
        assert "is open for writing" in refusal(as_bytes, made["x"], returning({}))
    with h5py.File("memory", "w", driver="core", backing_store=False) as made:
        made["x"] = VALUES
        assert "has no file on disk" in refusal(as_bytes, made["x"], returning({}))


def test_h5py_is_not_imported_for_other_data(monkeypatch):
    monkeypatch.delitem(sys.modules, "h5py")
    as_rows(VALUES, [1] * ROWS)
    assert "h5py" not in sys.modules
