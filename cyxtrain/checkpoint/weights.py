"""A model's weights as a plain safetensors file, for other programs too."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO

import safetensors.torch
import torch

from cyxtrain.checkpoint.checkpoint_file import unpack_checkpoint
from cyxtrain.checkpoint.files import read_file, replacing
from cyxtrain.checkpoint.format.archive import look_at_archive
from cyxtrain.checkpoint.format.encoding import decode_tree, encode_tree
from cyxtrain.checkpoint.format.names import (
    custom_loading,
    load_plain_state,
    plain_name,
    plain_state,
    resizable_buffers,
)
from cyxtrain.checkpoint.format.tensors import TensorLayout, decode_tensors, encode_tensors, tied_names
from cyxtrain.config.settings import names_checked
from cyxtrain.errors import CheckpointError, ConfigError, brief

# the key in the file's metadata for what a plain safetensors file cannot express
_METADATA_KEY = "cyxtrain"
_FIRST_BYTES = 512  # contain the first entry's name of torch.save's zip
_HEADER_LIMIT_BYTES = 100_000_000  # safetensors' limit


@names_checked
def save_weights(model: torch.nn.Module, path: str | os.PathLike[str]) -> None:
    """Write a model's `state_dict` as one safetensors file, atomically: a failed write keeps the old file.

    Tied weights are stored once; the metadata has their other names, as with `safetensors.torch.save_model`. Unlike a
    checkpoint, the file has no checksums.

    Args:
        model: Names in the file are the model's own, also if it is compiled.
        path: The file; its folder is created if missing. Cost: memory for the weights once more, on the CPU.

    Raises:
        ConfigError: `model` is not a module.
        CheckpointError: The disk refuses, or the state holds a value that the file cannot hold; the error names it.
    """
    _require_model("save_weights", model)
    state = plain_state(model)
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    values = {name: encode_tree(value, name) for name, value in state.items() if name not in tensors}
    stored, layout = encode_tensors(tensors, "model")
    metadata = {**layout.aliases, "format": "pt"}
    if values or layout.dtypes or layout.sparse:
        own = {"dtypes": layout.dtypes, "values": values, "sparse": layout.sparse}
        metadata[_METADATA_KEY] = json.dumps(own, allow_nan=False)
    # Not safetensors' save_file: it neither synchronizes nor keeps the folder's usual permissions.
    content = safetensors.torch.save(stored, metadata)
    with replacing(path, "weights file") as file:
        file.write(content)


@names_checked
def load_weights(model: torch.nn.Module, path: str | os.PathLike[str]) -> None:
    """Load a safetensors file into a model, strictly: nothing is copied before all names and shapes match.

    Tied weights need one of their names in the file. Values are converted to the model's dtypes and devices. The names
    of a table's columns are not weights: afterwards, `evaluate` and `predict` take any columns.

    Args:
        model: The same architecture, on any device.
        path: A file of `save_weights`, another safetensors file with the model's names, or a checkpoint.

    Raises:
        ConfigError: `model` is not a module.
        CheckpointError: The file is missing or is not a safetensors file, or names or shapes differ, with the names.
    """
    _require_model("load_weights", model)
    load_model_state(model, _read_weights(path), f"weights {path}")


def _require_model(function: str, model: object) -> None:
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(
            f"{function} takes a torch.nn.Module, got {type(model).__name__}: pass the model itself, such as "
            "trainer.model."
        )


def load_model_state(model: torch.nn.Module, state: Mapping[str, Any], source: str) -> None:
    """Load a `state_dict` into a model, strictly: nothing is copied before all names and shapes match."""
    given = fitting_state(model, state, source)
    try:
        load_plain_state(model, given)
    except RuntimeError as error:
        raise CheckpointError(
            f"Cannot load {source}: {brief(str(error))}. Build the model as it was when it was saved."
        ) from error


def fitting_state(model: torch.nn.Module, state: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return a state with all of the model's plain names, tied ones too, without loading it."""
    expected = plain_state(model)
    given = {plain_name(name): value for name, value in state.items()}
    is_custom = custom_loading(model)
    tensors = {name: value for name, value in expected.items() if isinstance(value, torch.Tensor)}
    comparable = {name: tensor for name, tensor in tensors.items() if not is_custom(name)}
    _complete_ties(given, tied_names(comparable))
    free = _free_names(model, expected, given, is_custom)
    differences = _differences(_without(expected, free), _without(given, free))
    if differences:
        raise CheckpointError(f"Cannot load {source}: {differences}. Build the model as it was when it was saved.")
    return given


def _complete_ties(given: dict[str, Any], ties: Mapping[str, str]) -> None:
    """Give each tied tensor all of its names; `ties` maps the other names to the first one."""
    # Other writers keep any one of the names.
    for name, first in ties.items():
        if first not in given and name in given:
            given[first] = given[name]
    # A second loop: the first name may have come from any of the other names.
    for name, first in ties.items():
        if name not in given and first in given:
            given[name] = given[first]


def _free_names(
    model: torch.nn.Module, expected: Mapping[str, Any], given: Mapping[str, Any], is_custom: Callable[[str], bool]
) -> set[str]:
    """Return names that may differ: of custom loading, and of buffers that forward makes or replaces."""
    free = {name for name in {**expected, **given} if is_custom(name)}
    for name, (buffers, own_name) in resizable_buffers(model).items():
        is_not_made_yet = buffers[own_name] is None
        if name in given and (name in expected or is_not_made_yet):
            free.add(name)
    return free


def _without(state: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name not in names}


def _look_at_weights(file: BinaryIO, path: str | os.PathLike[str]) -> None:
    """Refuse a file that is neither a checkpoint nor a safetensors file, before reading all of it."""
    begins = file.read(_FIRST_BYTES)
    if b"/data.pkl" in begins:
        raise CheckpointError(
            f"{path} is a file of torch.save, which may hold code: load it with PyTorch (weights_only=True) and "
            "load_state_dict, then save it with save_weights()."
        )
    if begins.startswith(b"PK"):  # a zip: a checkpoint, of which every byte is checked
        look_at_archive(file, str(path))
        return
    with _as_safetensors(path):
        size_bytes = file.seek(0, io.SEEK_END)
        header_bytes = int.from_bytes(begins[:8], "little")
        if not 0 < header_bytes <= min(size_bytes - 8, _HEADER_LIMIT_BYTES):
            raise ValueError(f"a file of {size_bytes:,} bytes cannot have a header of {header_bytes:,}")


@contextlib.contextmanager
def _as_safetensors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn the errors that a corrupt file causes into a CheckpointError with its name."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{path} is corrupt or is not a safetensors file: {brief(str(error))}. Use a file of save_weights()."
        ) from error


def _read_weights(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the state dict in a file, with the tied names in its metadata."""
    data = read_file(path, "weights file", lambda file: _look_at_weights(file, path))
    if data.startswith(b"PK"):
        return unpack_checkpoint(data, str(path)).model
    with _as_safetensors(path):
        stored = safetensors.torch.load(data)
        header_bytes = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + header_bytes])
        metadata: dict[str, str] = header.get("__metadata__", {})
        aliases = {name: kept for name, kept in metadata.items() if kept in stored and name not in stored}
        own = json.loads(metadata.get(_METADATA_KEY, "{}"))
        layout = TensorLayout([*stored, *aliases], aliases, own.get("dtypes", {}), own.get("sparse", {}))
        return {**decode_tensors(stored, layout), **decode_tree(own.get("values", {}))}


def _differences(expected: Mapping[str, Any], state: Mapping[str, Any]) -> str:
    """Return missing and unexpected names and different shapes, for a message; "" if all match."""
    missing = sorted(expected.keys() - state.keys())
    unexpected = sorted(state.keys() - expected.keys())
    shapes = []
    for name, own in expected.items():
        given = state.get(name)
        if isinstance(own, torch.Tensor) and isinstance(given, torch.Tensor) and own.shape != given.shape:
            shapes.append(f"{name} is {list(given.shape)} there and {list(own.shape)} in the model")
    found = []
    if missing:
        found.append(f"missing {brief(missing)}")
    if unexpected:
        found.append(f"unexpected {brief(unexpected)}")
    if shapes:
        found.append(f"different shapes: {brief(', '.join(shapes))}")
    return "; ".join(found)
