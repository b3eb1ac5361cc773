"""Claims about the checkpoint file: it brings back every bit, finds every damage, and runs nothing."""

import ast
import dataclasses
import io
import json
import math
import random
import zipfile
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from checkpoints import pack_checkpoint

import cyxtrain.training
from cyxtrain.checkpoint.checkpoint_file import FORMAT, FORMAT_VERSION, CheckpointState, records_of, unpack_checkpoint
from cyxtrain.checkpoint.format.archive import write_archive
from cyxtrain.checkpoint.format.encoding import decode_tree, encode_tree
from cyxtrain.checkpoint.format.tensors import encode_tensors, safetensors_parts
from cyxtrain.checkpoint.validation import HISTORY
from cyxtrain.errors import CheckpointError
from cyxtrain.progress.history import TrainingHistory

DTYPES = [
    torch.bool,
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
    *(torch.complex64, torch.complex128),
]


def state(**fields):
    values = {
        "model": {"weight": torch.arange(6.0).reshape(2, 3), "bias": torch.tensor([0.5, -0.0])},
        "optimizer": {"weight": {"step": torch.tensor(3.0), "exp_avg": torch.ones(2, 3), "kind": "slow"}},
        "optimizer_groups": [{"lr": 1e-3, "betas": (0.9, 0.999), "foreach": None, "params": ["weight", "bias"]}],
        "position": {"epoch": 3},
        "history": {"train_losses": [0.1 + 0.2, math.inf]},
        "config": {"seed": 2**64 - 1, "name": "Grüße \ud800"},
        "others": {"scheduler": {"last": 3}, "average": {"weight": torch.ones(2)}},
        "ranks": [{"torch": "00ff"}, {"torch": "0102"}],
        "run": {"id": "a run"},
        "world_size": 2,
    }
    return CheckpointState(**{**values, **fields})


def same(first, second):
    """Equal types, keys, order and bits."""
    if type(first) is not type(second):
        return False
    if isinstance(first, torch.Tensor):
        equal_kind = (first.dtype, first.shape) == (second.dtype, second.shape)
        return equal_kind and bits(first) == bits(second)
    if isinstance(first, dict):
        return list(first) == list(second) and all(same(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(same(*pair) for pair in zip(first, second, strict=True))
    return first == second or (first != first and second != second)


def bits(tensor):
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else b""


def same_state(first, second):
    names = [field.name for field in dataclasses.fields(CheckpointState)]
    return all(same(getattr(first, name), getattr(second, name)) for name in names)


def round_trip(original):
    return unpack_checkpoint(pack_checkpoint(original), "test.ckpt")


def test_a_checkpoint_brings_everything_back():
    assert same_state(round_trip(state()), state())


def test_an_empty_checkpoint_comes_back_empty():
    assert same_state(round_trip(CheckpointState(model={})), CheckpointState(model={}))


def test_equal_states_give_equal_bytes():
    assert pack_checkpoint(state()) == pack_checkpoint(state())


def test_a_view_of_received_bytes_is_as_good_as_bytes():
    tensor = torch.frombuffer(bytearray(pack_checkpoint(state())), dtype=torch.uint8)
    assert same_state(unpack_checkpoint(memoryview(tensor.numpy()), "received"), state())


def test_the_file_is_a_stored_zip_that_other_tools_read():
    with zipfile.ZipFile(io.BytesIO(pack_checkpoint(state()))) as archive:
        assert archive.testzip() is None
        assert all(entry.compress_type == zipfile.ZIP_STORED for entry in archive.infolist())
        manifest = json.loads(archive.read("manifest.json"))
        assert manifest["format"] == "cyxtrain-checkpoint"
        assert manifest["version"] == 2
        sizes = {name: entry["size_bytes"] for name, entry in manifest["entries"].items()}
        assert sizes == {name: archive.getinfo(name).file_size for name in archive.namelist() if name in sizes}
        assert sorted([*sizes, "manifest.json"]) == sorted(archive.namelist())


def tensor_of_bits(dtype, shape):
    raw = np.random.RandomState(1).bytes(math.prod(shape) * dtype.itemsize)
    if dtype is torch.bool:
        raw = bytes(byte & 1 for byte in raw)
    return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(shape) if raw else torch.empty(shape, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_type_and_shape_keeps_its_bits(dtype):
    for shape in ((), (0,), (3, 0), (1,), (4, 3)):
        tensor = tensor_of_bits(dtype, shape)
        loaded = round_trip(state(model={"x": tensor}, optimizer={"x": {"y": tensor.clone()}}))
        assert same(loaded.model["x"], tensor), shape
        assert same(loaded.optimizer["x"]["y"], tensor), shape


def test_tied_weights_are_stored_once_and_come_back_as_one_tensor():
    weight = torch.randn(100, 100)
    tied = {"first": weight, "between": torch.zeros(1), "second": weight.view(100, 100), "third": weight.detach()}
    data = pack_checkpoint(state(model=tied))
    assert len(data) < 1.5 * weight.numel() * weight.element_size()
    model = unpack_checkpoint(data, "test").model
    assert list(model) == list(tied)
    assert model["first"] is model["second"] is model["third"]
    assert torch.equal(model["first"], weight)


def test_tensors_that_overlap_or_are_strided_come_back_whole():
    memory = torch.arange(12.0)
    model = {
        "all": memory,
        "part": memory[3:7],
        "shape": memory.reshape(3, 4),
        "transposed": memory.reshape(3, 4).t(),
        "expanded": memory[:1].expand(5),
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "conjugated": torch.randn(3, dtype=torch.complex64).conj(),
        "negative": torch.randn(3, dtype=torch.complex64).conj().imag,
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    loaded = round_trip(state(model=model)).model
    for name, tensor in model.items():
        assert torch.equal(loaded[name], tensor), name
    loaded["all"].zero_()
    assert torch.equal(loaded["part"], torch.arange(3.0, 7.0))


def test_halves_of_one_memory_are_not_copied_and_do_not_disturb_each_other():
    flat = torch.arange(10.0)
    loaded = round_trip(state(model={"low": flat[:5], "high": flat[5:]})).model
    assert torch.equal(torch.cat([loaded["low"], loaded["high"]]), flat)


def test_sparse_tensors_come_back_in_their_place_with_their_layout():
    dense = torch.tensor([[0.0, 2.0], [0.0, 0.0]])
    kinds = {"coo": dense.to_sparse(), "csr": dense.to_sparse_csr(), "csc": dense.to_sparse_csc()}
    blocks = torch.eye(4, dtype=torch.complex64).to_sparse_bsr((2, 2))
    model = {"first": dense, **kinds, "blocks": blocks, "none": torch.zeros(3).to_sparse(), "last": dense.clone()}
    loaded = round_trip(state(model=model)).model
    assert list(loaded) == list(model)
    for name, tensor in model.items():
        assert loaded[name].layout is tensor.layout
        assert torch.equal(loaded[name].to_dense(), tensor.to_dense())


@pytest.mark.parametrize(
    "tensor",
    [torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]), torch.zeros(2, device="meta")],
    ids=["nested", "meta"],
)
def test_a_tensor_without_values_of_its_own_is_refused_by_name(tensor):
    with pytest.raises(CheckpointError, match=r"'layer\.weight' of the model"):
        pack_checkpoint(state(model={"layer.weight": tensor}))


def test_extra_state_in_json_types_is_kept_in_its_place():
    model = {"a._extra_state": {"scale": (1, 2.5), 3: None, "$x": math.nan}, "b": torch.ones(1)}
    assert same(round_trip(state(model=model)).model, model)


@pytest.mark.parametrize(
    "value",
    [object(), {1, 2}, b"bytes", 1j, np.zeros(2), torch.float32, [torch.zeros(1)]],
    ids=lambda each: type(each).__name__,
)
def test_extra_state_that_is_not_json_is_refused_by_name(value):
    with pytest.raises(CheckpointError, match=r"'head\._extra_state"):
        pack_checkpoint(state(model={"head._extra_state": value}))


@pytest.mark.parametrize(
    "value",
    [
        None,
        (1, (2, [3, ()])),
        {"$tuple": [1]},
        {"$tensor": "x", "y": 1},
        {1: "a", (2, 3): "b", None: "c"},
        {},
        [],
        [math.nan, math.inf, -math.inf, -0.0, 5e-324, 1.7976931348623157e308, 0.1],
        10**30,
        {"nested": [{"t": torch.ones(2)}, (torch.zeros(1),)]},
    ],
    ids=str,
)
def test_values_come_back_from_strict_json_with_their_types(value):
    tensors = {}
    text = json.dumps(encode_tree(value, "v", tensors), allow_nan=False)
    assert same(decode_tree(json.loads(text), tensors), value)


def test_numpys_scalars_come_back_as_pythons():
    assert encode_tree([np.int64(3), np.float32(0.5), np.bool_(True)], "v") == [3, 0.5, True]


def test_two_values_of_one_path_do_not_become_one():
    optimizer = {"a": {"b.c": torch.ones(1)}, "a.b": {"c": torch.zeros(1)}}
    assert same(round_trip(state(optimizer=optimizer)).optimizer, optimizer)


def test_entries_beyond_the_limit_of_plain_zip_load(monkeypatch):
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 50)
    assert same_state(round_trip(state()), state())


DATA = pack_checkpoint(state())
POSITIONS = sorted({*random.Random(0).sample(range(len(DATA)), 500), *range(40), *range(len(DATA) - 350, len(DATA))})


def is_refused(data):
    try:
        unpack_checkpoint(data, "run/7.ckpt")
    except CheckpointError as error:
        return "run/7.ckpt" in str(error)
    return False


def test_every_flipped_bit_is_found():
    generator = random.Random(1)
    for position in POSITIONS:
        for mask in {1 << generator.randrange(8), generator.randrange(1, 256)}:
            flipped = bytearray(DATA)
            flipped[position] ^= mask
            assert is_refused(bytes(flipped)), (position, mask)


@pytest.mark.parametrize(
    "entry", ["model.safetensors", "optimizer.safetensors", "others.safetensors", "state.json", "manifest.json"]
)
def test_a_flipped_bit_in_an_entry_is_found_and_the_entry_is_named(entry):
    with zipfile.ZipFile(io.BytesIO(DATA)) as archive:
        content = archive.read(entry)
    start = DATA.index(content)
    for position in range(start, start + len(content), 7):
        flipped = bytearray(DATA)
        flipped[position] ^= 16
        with pytest.raises(CheckpointError, match=rf"run/7\.ckpt is corrupt or is not a checkpoint: {entry}"):
            unpack_checkpoint(bytes(flipped), "run/7.ckpt")


def test_every_truncation_is_found():
    for length in [*range(0, len(DATA), 7), *range(len(DATA) - 100, len(DATA))]:
        with pytest.raises(CheckpointError):
            unpack_checkpoint(DATA[:length], "cut")


def test_a_cut_checkpoint_is_not_taken_for_one_that_lies_in_a_tensor():
    inner = torch.frombuffer(bytearray(DATA), dtype=torch.uint8)
    outer = pack_checkpoint(state(model={"checkpoint": inner}))
    cut = outer[: outer.index(DATA) + len(DATA)]
    with pytest.raises(CheckpointError, match="before the first entry"):
        unpack_checkpoint(cut, "cut")


def rewritten(change):
    """The small checkpoint with other entries, in a zip whose own checksums are right."""
    with zipfile.ZipFile(io.BytesIO(DATA)) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    compression = change(entries) or zipfile.ZIP_STORED
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", compression) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return target.getvalue()


def with_manifest(**fields):
    def change(entries):
        entries["manifest.json"] = json.dumps({**json.loads(entries["manifest.json"]), **fields}).encode()

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda entries: entries.update({"evil.pkl": b""}), "the entries are"),
        (lambda entries: entries.pop("optimizer.safetensors") and None, "the entries are"),
        (lambda entries: zipfile.ZIP_DEFLATED, "compressed"),
        (with_manifest(version=1), "version 1 of the format, and this cyxtrain reads version 2"),
        (with_manifest(format="zip"), "the format is 'zip'"),
        (with_manifest(entries={}), "must list"),
        (lambda entries: entries.update({"manifest.json": b"[]"}), "manifest.json"),
        (lambda entries: entries.update({"manifest.json": b" " * 10**6}), "manifest.json"),
        (lambda entries: entries.update({"state.json": entries["state.json"][:-1]}), "state.json: it has"),
        (lambda entries: entries.update({"state.json": b"x" * len(entries["state.json"])}), "state.json: its checksum"),
    ],
)
def test_a_zip_that_is_no_checkpoint_is_refused_with_the_reason(change, message):
    with pytest.raises(CheckpointError, match=message):
        unpack_checkpoint(rewritten(change), "foreign.zip")


@pytest.mark.parametrize(
    ("entry", "wrong", "message"),
    [
        ("model.safetensors", lambda content: b"\xff" * 64, "header"),
        ("optimizer.safetensors", lambda content: content.replace(b"weight.step", b"weight.stop"), "only in the file"),
        ("state.json", lambda content: b"[" * 100_000, "."),
        ("state.json", lambda content: content.replace(b'{"epoch":3}', b"3"), "holds a int where a dict belongs"),
        ("state.json", lambda content: b"{}", "position"),
    ],
)
def test_a_right_checksum_over_wrong_content_is_still_an_error_with_the_entry(entry, wrong, message):
    entries = {name: [b"".join(parts)] for name, parts in records_of(state()).items()}
    entries[entry] = [wrong(entries[entry][0])]
    target = io.BytesIO()
    write_archive(target, FORMAT, FORMAT_VERSION, entries)
    with pytest.raises(CheckpointError, match=f"{entry}: .*{message}"):
        unpack_checkpoint(target.getvalue(), "hostile")


def test_a_zip_that_another_tool_wrote_again_is_no_checkpoint_of_ours_any_more():
    with pytest.raises(CheckpointError, match="the zip records: their checksum is wrong"):
        unpack_checkpoint(rewritten(lambda entries: None), "rewritten.zip")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_safetensors_library_reads_what_we_write(dtype):
    tensors = {
        "empty": torch.zeros(0, 3),
        "one": torch.tensor(1.5),
        "ü": torch.ones(3, 5).to(dtype),
        "b": torch.ones(7) > 0,
    }
    stored, _ = encode_tensors(tensors, "model")
    loaded = safetensors.torch.load(b"".join(safetensors_parts(stored)))
    assert set(loaded) == set(stored)
    assert all(same(loaded[name], tensor) for name, tensor in stored.items())


@pytest.mark.parametrize("data", [b"", b"PK", b"x" * 1000, b"PK\x05\x06" + b"\xff" * 18])
def test_what_is_no_zip_is_refused(data):
    with pytest.raises(CheckpointError, match="corrupt or is not a checkpoint"):
        unpack_checkpoint(data, "nothing")


def test_nothing_that_saves_or_loads_can_unpickle():
    forbidden = {"pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
    for file in Path(cyxtrain.training.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                assert not forbidden & {alias.name.split(".")[0] for alias in node.names}, file
            if isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] not in forbidden, file
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert (node.value.id, node.attr) not in {("torch", "load"), ("torch", "save")}, file


def test_the_checked_fields_of_a_history_are_its_fields():
    assert HISTORY.keys() == {field.name for field in dataclasses.fields(TrainingHistory)}
