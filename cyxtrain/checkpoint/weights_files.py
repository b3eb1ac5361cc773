"""Weights that this or another library has saved: safetensors, `torch.save`, Lightning, folders of Hugging Face."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import struct
import zipfile
from collections.abc import Iterator
from typing import Any

import safetensors.torch
import torch

from cyxtrain.checkpoint.checkpoint_file import unpack_checkpoint
from cyxtrain.checkpoint.files import content_of, open_to_read, read_file
from cyxtrain.checkpoint.format.archive import look_at_archive
from cyxtrain.checkpoint.format.encoding import decode_tree
from cyxtrain.checkpoint.format.tensors import TensorLayout, decode_tensors
from cyxtrain.environment.regular_files import path_or_url
from cyxtrain.errors import CheckpointError, brief

METADATA_KEY = "cyxtrain"
"""The key in a safetensors file's metadata for what the format cannot express."""
_FIRST_BYTES = 512  # contain the first entry's name of torch.save's zip
_BEFORE_ZIP = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # how torch.save began before PyTorch 1.6
_HEADER_LIMIT_BYTES = 100_000_000  # safetensors' limit
_ALIGNMENT_BYTES = 16  # of the widest number, complex128
# What `save_pretrained` writes, in the order in which `from_pretrained` looks for them.
_NAMES_IN_FOLDERS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
# Where programs keep the weights among other things: Lightning and timm; PyTorch's tutorial.
_KEYS = ("state_dict", "model_state_dict")


def read_weights(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the state dict in a file, in the shards of an index, or in a folder of `save_pretrained`.

    Local files are mapped, so that tensors take no memory until they are read. Checkpoints, URLs, and files from before
    PyTorch 1.6 are read into memory.
    """
    where = path_or_url("the path of a weights file", path)
    if os.path.isdir(where):
        where = _file_in(where)
    if where.endswith(".json"):
        return _read_shards(where)
    return _read_file(where)


def _file_in(folder: str) -> str:
    for name in _NAMES_IN_FOLDERS:
        path = os.path.join(folder, name)
        if os.path.exists(path):
            return path
    raise CheckpointError(
        f"Cannot read weights file {folder}: it is a folder, not a file, and has none of "
        f"{', '.join(_NAMES_IN_FOLDERS)}. Give the name of a file."
    )


def _read_shards(index: str) -> dict[str, Any]:
    """Return the tensors of all files that an index lists; these are in its folder."""
    content = read_file(index, "weights index")
    name = os.path.basename(index)
    with _blaming(index, "an index of shards"):
        shards = sorted({*json.loads(content)["weight_map"].values()})
        for shard in shards:
            if os.path.basename(shard) != shard:
                raise ValueError(f"the shard {shard} is in another folder")
    state: dict[str, Any] = {}
    for shard in shards:
        state |= _read_file(f"{index.removesuffix(name)}{shard}")
    return state


def _read_file(path: str) -> dict[str, Any]:
    with open_to_read(path, "weights file") as file:
        begins = file.read(_FIRST_BYTES)
        is_zip = begins.startswith(b"PK")
        if begins.startswith(_BEFORE_ZIP) or (is_zip and b"/data.pkl" in begins):
            return _state_of_torch_save(file, path, is_zip=is_zip)
        if is_zip:  # a checkpoint, of which every byte is checked
            look_at_archive(file, path)
            return unpack_checkpoint(content_of(file), path).model
        with _blaming(path, "a safetensors file"):
            return _state_of_safetensors(file, path)


@contextlib.contextmanager
def _blaming(path: str, kind: str) -> Iterator[None]:
    """Turn the errors that a corrupt file causes into a CheckpointError with its name."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{path} is corrupt or is not {kind}: {brief(str(error))}. Use a file of save_weights()."
        ) from error


def _state_of_safetensors(file: io.BufferedReader | io.BytesIO, path: str) -> dict[str, Any]:
    """Return the state in a safetensors file, with the tied names in its metadata."""
    size_bytes = file.seek(0, io.SEEK_END)
    file.seek(0)
    header_bytes = int.from_bytes(file.read(8), "little")
    if not 0 < header_bytes <= min(size_bytes - 8, _HEADER_LIMIT_BYTES):
        raise ValueError(f"a file of {size_bytes:,} bytes cannot have a header of {header_bytes:,}")
    header = file.read(header_bytes)
    if isinstance(file, io.BytesIO):
        stored = safetensors.torch.load(file.getvalue())
    else:
        stored = safetensors.torch.load_file(path)
    metadata: dict[str, str] = json.loads(header).get("__metadata__", {})
    metadata.pop("format", None)  # "pt", and a model may have a tensor of that name
    aliases = {name: kept for name, kept in metadata.items() if kept in stored and name not in stored}
    own = json.loads(metadata.get(METADATA_KEY, "{}"))
    layout = TensorLayout([*stored, *aliases], aliases, own.get("dtypes", {}), own.get("sparse", {}))
    # A number that is not at a multiple of its size may crash the process; complex numbers are stored as two.
    if any(
        tensor.data_ptr() % (tensor.element_size() * (1 + (name in layout.dtypes))) for name, tensor in stored.items()
    ):
        stored = safetensors.torch.load(content_of(file))
    return {**decode_tensors(stored, layout), **decode_tree(own.get("values", {}))}


def _state_of_torch_save(file: io.BufferedReader | io.BytesIO, path: str, *, is_zip: bool) -> dict[str, Any]:
    """Return the state dict in a file of `torch.save`, read by PyTorch's unpickler for tensors and plain values."""
    try:
        is_mapped = is_zip and not isinstance(file, io.BytesIO) and _can_be_mapped(file)
        file.seek(0)
        source: Any = path if is_mapped else file
        found = torch.load(source, map_location="cpu", weights_only=True, mmap=is_mapped)
    except MemoryError:
        raise
    except Exception as error:
        raise _refusal(file, path, error) from error
    for key in _KEYS:
        if isinstance(found, dict) and isinstance(found.get(key), dict):
            found = found[key]
    if _is_state(found):
        state: dict[str, Any] = found
        return state
    held = type(found).__name__
    if isinstance(found, dict):
        held = f"dict with the keys {brief([*found])}"
    raise CheckpointError(
        f"{path} holds a {held}, which is not a state_dict. Load it with torch.load(path, weights_only=True), and its "
        "weights with model.load_state_dict()."
    )


def _can_be_mapped(file: io.BufferedReader) -> bool:
    """Return whether the entries of a zip are as PyTorch writes them: not compressed, and aligned."""
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
    for entry in entries:
        file.seek(entry.header_offset + 26)  # the lengths of its name and of an extra field, before these
        begin = entry.header_offset + 30 + sum(struct.unpack("<HH", file.read(4)))
        if entry.compress_type != zipfile.ZIP_STORED or begin % _ALIGNMENT_BYTES:
            return False
    return True


def _is_state(found: object) -> bool:
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        return False
    return any(isinstance(value, torch.Tensor) for value in found.values())


def _refusal(file: io.BufferedReader | io.BytesIO, path: str, error: Exception) -> CheckpointError:
    """Return an error that names what PyTorch refuses in a file of `torch.save`, or what else is wrong with it."""
    text = str(error)
    refused = re.findall(r"GLOBAL (\S+)", text)[:1]
    with contextlib.suppress(Exception):  # it is from before PyTorch 1.6, or corrupt: the error names the first one
        file.seek(0)
        refused = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file))
    if not refused:
        reason = brief(text.rpartition("WeightsUnpickler error:")[2]).rstrip(".") or type(error).__name__
        return CheckpointError(
            f"{path} is corrupt, or PyTorch cannot read it with weights_only=True: {reason}. Save the model's "
            "state_dict() with torch.save(), or use save_weights()."
        )
    names = brief(", ".join(refused))
    return CheckpointError(
        f"{path} holds more than tensors and plain values: {names}. PyTorch refuses such a file (weights_only=True), "
        "because it could run code. If you trust it, allow them with torch.serialization.add_safe_globals"
        f"([{names}]), or save the state_dict alone with torch.save()."
    )
