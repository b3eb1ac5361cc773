"""Claims about what travels between a notebook and its workers: nothing is changed, and arrays are not pickled."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cyxtrain.notebook.sharing import as_bytes, from_bytes, read, returning, shared_file, write

NUMBERS = np.random.default_rng(0).normal(size=(100, 100))


def sent(value: Any, *, mapped: bool = True, is_data: bool = False, **known: Any) -> tuple[Any, int]:
    """Returns what arrives, and how many bytes were written for it."""
    with shared_file() as path:
        write(value, path, known, is_data=is_data)
        return read(path, known, mapped=mapped), os.stat(path).st_size


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize(
    "array",
    [
        NUMBERS,
        NUMBERS[::2, ::3],
        NUMBERS[::-1],
        np.asfortranarray(NUMBERS),
        NUMBERS.astype("float16"),
        NUMBERS.astype(">f8"),
        NUMBERS.astype(np.longdouble),
        NUMBERS.astype("complex128"),
        (NUMBERS > 0),
        (NUMBERS * 1000).astype("uint16"),
        NUMBERS[:0],
        np.zeros(()),
        np.array([1, "a", None], dtype=object),
        np.array(["2026-11-23"] * 1000, dtype="datetime64[D]"),
        np.array([(1, 2.0)] * 1000, dtype=[("a", "i4"), ("b", "f8")]),
        np.array(["word"] * 2000),
        np.ma.masked_greater(NUMBERS, 0.5),
    ],
    ids=lambda array: f"{array.dtype}{list(array.shape)}",
)
def test_arrays_arrive_as_they_are(array, mapped):
    found, _ = sent({"it": array}, mapped=mapped)
    assert (type(found["it"]), found["it"].dtype, found["it"].shape) == (type(array), array.dtype, array.shape)
    assert found["it"].tolist() == array.tolist()
    if array.size:
        found["it"][...] = found["it"]  # it may be written to


def test_a_read_only_array_can_be_sent():
    array = NUMBERS.copy()
    array.flags.writeable = False
    assert (sent(array)[0] == NUMBERS).all()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.rand(100, 100),
        torch.rand(100, 100).t(),
        torch.rand(10, 3, dtype=torch.bfloat16),
        torch.ones(3, 3).to_sparse(),
    ],
)
def test_tensors_arrive_as_they_are(tensor):
    found, _ = sent(tensor)
    assert torch.equal(found.to_dense(), tensor.to_dense())
    assert (found.dtype, found.layout) == (tensor.dtype, tensor.layout)


def test_what_is_shared_stays_shared():
    model = nn.LSTM(3, 5)
    tied = nn.Linear(4, 4)
    array = NUMBERS.copy()
    (model, weights, first, second, x, same), _ = sent(
        (model, list(model.parameters()), tied, nn.Sequential(tied, tied), array, [array]), mapped=False
    )
    assert all(weight is own for weight, own in zip(weights, model.parameters(), strict=True))
    assert first is second[0] is second[1]
    assert x is same[0]


def test_parameters_that_are_calculated_stay_so():
    model = nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(4, 8)), nn.utils.parametrizations.weight_norm(nn.Linear(8, 2))
    ).eval()
    found, _ = sent(model, mapped=False)
    rows = torch.rand(5, 4)
    assert [type(part).__name__ for part in found] == ["ParametrizedLinear"] * 2
    assert torch.equal(found(rows), model(rows))
    assert found.state_dict().keys() == model.state_dict().keys()
    found[1].weight = torch.ones(2, 8)
    assert torch.allclose(found[1].weight, torch.ones(2, 8))


def test_what_the_receiver_has_stays_its_own():
    model, optimizer = nn.Linear(3, 4), object()
    found, _ = sent([model, {"deep": [model, optimizer]}, NUMBERS.__class__], model=model, optimizer=optimizer)
    assert found == [model, {"deep": [model, optimizer]}, np.ndarray]
    assert found[0] is found[1]["deep"][0] is model


def test_classes_and_functions_of_no_module_go_along():
    class Own(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return helper(x) + 1

    def helper(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    assert sent(Own())[0](torch.ones(1)).item() == 3


@pytest.mark.parametrize("is_data", [False, True])
def test_what_comes_back_is_of_the_very_classes_and_functions_that_were_sent(is_data):
    class OwnError(ValueError):
        def method(self) -> int:
            return 1

    def helper() -> int:
        return 2

    def wrapped() -> int:
        return 3

    ours: dict[str, Any] = {}
    theirs: dict[str, Any] = {}
    with shared_file() as path:
        write((OwnError("x"), helper), path, {}, is_data=is_data, sent=ours)
        error, function = read(path, {}, mapped=False, is_data=is_data, sent=theirs)
    method = OwnError.method
    functools.update_wrapper(wrapped, function)  # takes over all that a function keeps, but is another one
    found, own, other = from_bytes(as_bytes((error, [function], wrapped), returning(theirs)), ours)
    assert type(found) is OwnError
    assert OwnError.method is method
    assert own[0] is helper
    assert other() == 3


def test_functions_that_look_at_gradients_go_along():
    layer = nn.Linear(2, 2, bias=False)
    layer.weight.register_hook(lambda gradient: gradient * 0)
    seen: list[int] = []
    layer.weight.register_post_accumulate_grad_hook(lambda weight: seen.append(1))
    found, _ = sent(layer, mapped=False)
    found(torch.ones(1, 2)).sum().backward()
    assert found.weight.grad.abs().sum() == 0
    assert found.weight._post_accumulate_grad_hooks
    assert type(found.weight) is nn.Parameter


def test_an_optimizer_keeps_its_hooks_and_what_its_user_keeps_in_it():
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(layer.parameters(), 0.1)
    optimizer.register_step_post_hook(lambda optimizer, *_: setattr(optimizer, "count", optimizer.count + 1))
    optimizer.count = 5
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    (model, found), _ = sent((layer, optimizer), mapped=False)
    model(torch.ones(1, 2)).sum().backward()
    found.step()
    assert found.count == 7
    assert found.state[model.weight]["step"] == 2
    assert found.param_groups[0]["params"][0] is model.weight


# --- nothing goes that need not ---------------------------------------------------------------------------------------


def test_a_view_of_much_data_goes_alone():
    rows = torch.rand(100_000, 10)
    found, size = sent(rows[:10], is_data=True)
    assert torch.equal(found, rows[:10])
    assert size < 10_000


@pytest.fixture
def stored(tmp_path: Path) -> str:
    np.save(tmp_path / "rows.npy", np.arange(400_000.0).reshape(1000, 400))
    return str(tmp_path / "rows.npy")


@pytest.mark.parametrize("mode", ["r", "r+"])
@pytest.mark.parametrize(
    "part",
    [slice(None), slice(10, 20), slice(0, 1000, 3), (slice(5, 50), slice(300, 390, 7)), (slice(None), 3)],
    ids=str,
)
def test_a_memory_map_goes_by_the_name_of_its_file(stored, mode, part):
    rows = np.load(stored, mmap_mode=mode)[part]
    found, size = sent(rows)
    assert size < 5000
    assert isinstance(found, np.memmap)
    assert found.dtype == rows.dtype
    assert (found == rows).all()


def test_what_is_written_to_a_memory_map_is_seen_and_what_a_receiver_writes_is_not(stored):
    rows = np.load(stored, mmap_mode="r+")
    rows[3] = -1.0
    found, _ = sent(rows)
    assert (found[3] == -1).all()
    found[4] = -2.0
    assert (np.load(stored)[4] != -2).all()


def test_a_memory_map_in_fortrans_order(tmp_path):
    rows = np.memmap(tmp_path / "rows", "float32", "w+", offset=24, shape=(30, 200), order="F")
    rows[...] = np.arange(6000).reshape(30, 200)
    rows.flush()
    found, size = sent(rows[3:, ::5])
    assert size < 5000
    assert (found == rows[3:, ::5]).all()


@pytest.mark.parametrize("change", ["private", "removed", "replaced", "calculated"])
def test_a_memory_map_that_its_file_does_not_have_is_sent_whole(stored, change):
    rows = np.load(stored, mmap_mode="c" if change == "private" else "r")
    if change == "private":
        rows[0] = 7.0
    elif change == "removed":
        Path(stored).unlink()
    elif change == "replaced":
        Path(stored).rename(f"{stored}.old")
        np.save(stored, np.zeros((1000, 400)))
    else:
        rows = rows + 1.0
    found, size = sent(rows)
    assert size > rows.nbytes
    assert (found == rows).all()


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_file_is_gone_when_it_is_closed_and_what_was_read_stays():
    with shared_file() as path:
        write(NUMBERS, path, {})
        found = read(path, {}, mapped=True)
    assert not os.path.exists(path)
    assert (found == NUMBERS).all()


def test_what_cannot_be_sent_says_why():
    with pytest.raises(TypeError, match="cannot pickle 'generator' object"):
        sent({"rows": (row for row in NUMBERS)})


def test_what_comes_back_of_a_known_tensors_memory_shows_the_receivers_own():
    there, here = torch.arange(12.0).reshape(3, 4), torch.zeros(3, 4)
    found = from_bytes(as_bytes(there.t()[1:], returning({"rows": there})), {"rows": here})
    assert (found.shape, found.stride()) == ((3, 3), (1, 4))
    here[2, 3] = 7
    assert found[2, 2] == 7


def test_where_memory_has_no_files_a_temporary_one_is_gone_when_it_is_closed(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with shared_file() as path:
        write({"it": NUMBERS}, path, {})
        assert (read(path, {}, mapped=False)["it"] == NUMBERS).all()
    assert not os.path.exists(path)


def test_where_the_system_shows_no_mappings_a_memory_map_goes_by_the_file_of_its_name(stored, monkeypatch):
    array = np.load(stored, mmap_mode="r")
    monkeypatch.setattr(sys, "platform", "darwin")
    found = from_bytes(as_bytes(array, returning({})))
    assert isinstance(found, np.memmap)
    assert (found == array).all()
