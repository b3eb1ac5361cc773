"""A model's weights as a plain safetensors file, for other programs too; and weights that others have saved."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import safetensors.torch
import torch

from cyxtrain.checkpoint.files import replacing
from cyxtrain.checkpoint.format.encoding import encode_tree
from cyxtrain.checkpoint.format.names import (
    custom_loading,
    load_plain_state,
    plain_name,
    plain_state,
    resizable_buffers,
)
from cyxtrain.checkpoint.format.tensors import encode_tensors, tied_names
from cyxtrain.checkpoint.weights_files import METADATA_KEY, read_weights
from cyxtrain.config.settings import names_checked
from cyxtrain.errors import CheckpointError, ConfigError, brief

_DDP_PREFIX = "module."  # of all names in a state_dict of PyTorch's DistributedDataParallel
_SHAPES_CHARACTERS = 2000  # in an error


class IncompatibleKeys(NamedTuple):
    """Names that only a model or only a file has, as PyTorch's `load_state_dict` returns them."""

    missing_keys: list[str]
    unexpected_keys: list[str]


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
        metadata[METADATA_KEY] = json.dumps(own, allow_nan=False)
    # Not safetensors' save_file: it neither synchronizes nor keeps the folder's usual permissions.
    content = safetensors.torch.save(stored, metadata)
    with replacing(path, "weights file") as file:
        file.write(content)


@names_checked
def load_weights(model: torch.nn.Module, path: str | os.PathLike[str], strict: bool = True) -> IncompatibleKeys:
    """Load weights of this or another library into a model; copy none before all names and shapes match.

    Reads safetensors, files of `torch.save` (only by its `weights_only=True`, which runs no code), checkpoints of
    Lightning and Cyxtrain, shards, and folders of Hugging Face. Tied weights need one of their names. The prefixes of
    `torch.compile` and PyTorch's DistributedDataParallel are removed. Values are converted to the model's dtypes and
    devices. The names of a table's columns are not weights: afterwards, `evaluate` and `predict` take any columns.

    Each rank that calls it reads the file. Cost: local files are mapped, so that only the system's cache holds them;
    checkpoints, URLs, files from before PyTorch 1.6, and the tensors of modules with their own loading code take memory
    of their size.

    Args:
        model: The same architecture, on any device.
        path: A file; the index of shards, such as "model.safetensors.index.json"; or a local folder of
            `save_pretrained`.
        strict: If False, skip names that only the model or only the file has; at least one must match. Shapes must
            match in any case.

    Returns:
        `missing_keys` and `unexpected_keys`, as `load_state_dict` of PyTorch does; empty if `strict`.

    Raises:
        ConfigError: `model` is not a module.
        CheckpointError: The file is missing or corrupt, or holds objects that PyTorch refuses; or names or shapes
            differ, with all of them.
    """
    _require_model("load_weights", model)
    state = _without_ddp(read_weights(path), plain_state(model))
    return load_model_state(model, _without_mapped(model, state), f"weights {path}", strict=strict)


def _without_mapped(model: torch.nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with copies of what modules with their own code may keep; PyTorch itself copies the rest.

    Otherwise a program that writes the file again would change the module, or crash the process.
    """
    is_custom = custom_loading(model)
    found = dict(state)
    for name in [name for name in state if is_custom(name) or name.endswith("_extra_state")]:
        value = state[name]
        if isinstance(value, torch.Tensor):
            found[name] = value.detach().clone()
        else:
            found[name] = copy.deepcopy(value)
    return found


def _without_ddp(state: Mapping[str, Any], expected: Collection[str]) -> Mapping[str, Any]:
    """Return a state without the prefix of PyTorch's DistributedDataParallel."""
    plain = {plain_name(name): value for name, value in state.items()}
    is_wrapped = all(name.startswith(_DDP_PREFIX) for name in plain)
    if is_wrapped and not any(name.startswith(_DDP_PREFIX) for name in expected):
        return {name.removeprefix(_DDP_PREFIX): value for name, value in plain.items()}
    return plain


def _require_model(function: str, model: object) -> None:
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(
            f"{function} takes a torch.nn.Module, got {type(model).__name__}: pass the model itself, such as "
            "trainer.model."
        )


def load_model_state(
    model: torch.nn.Module, state: Mapping[str, Any], source: str, *, strict: bool = True
) -> IncompatibleKeys:
    """Load a `state_dict` into a model: nothing is copied before all names (if `strict`) and shapes match."""
    given, keys = _compared(model, state, source, strict=strict)
    try:
        missing, unexpected = load_plain_state(model, given, strict=strict)
    except RuntimeError as error:
        raise CheckpointError(
            f"Cannot load {source}: {brief(str(error))}. Build the model as it was when it was saved."
        ) from error
    # Modules with their own loading code find other names.
    return IncompatibleKeys(sorted({*keys.missing_keys, *missing}), sorted({*keys.unexpected_keys, *unexpected}))


def fitting_state(model: torch.nn.Module, state: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return a state with all of the model's plain names, tied ones too, without loading it."""
    given, _ = _compared(model, state, source, strict=True)
    return given


def _compared(
    model: torch.nn.Module, state: Mapping[str, Any], source: str, *, strict: bool
) -> tuple[dict[str, Any], IncompatibleKeys]:
    """Return a state under plain names, tied ones too, and the names that differ from the model's."""
    expected = plain_state(model)
    given = {plain_name(name): value for name, value in state.items()}
    is_custom = custom_loading(model)
    tensors = {name: value for name, value in expected.items() if isinstance(value, torch.Tensor)}
    comparable = {name: tensor for name, tensor in tensors.items() if not is_custom(name)}
    _complete_ties(given, tied_names(comparable))
    free = _free_names(model, expected, given, is_custom)
    keys = IncompatibleKeys(
        sorted(expected.keys() - given.keys() - free), sorted(given.keys() - expected.keys() - free)
    )
    has_matches = bool(given.keys() & (expected.keys() | free))
    compared = {name: value for name, value in expected.items() if name not in free}
    differences = _differing_shapes(compared, given)
    if strict or not has_matches:
        differences = [*_differing_names(keys), *differences]
    if differences:
        remedy = _remedy(expected, given)
        raise CheckpointError(f"Cannot load {source}: {'; '.join(differences)}. {remedy}")
    return given, keys


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


def _differing_names(keys: IncompatibleKeys) -> list[str]:
    """Return parts of a message."""
    differing = {"missing": keys.missing_keys, "unexpected": keys.unexpected_keys}
    return [f"{what} {brief(names)}" for what, names in differing.items() if names]


def _differing_shapes(expected: Mapping[str, Any], state: Mapping[str, Any]) -> list[str]:
    """Return a part of a message if shapes differ, with all of them."""
    shapes = []
    for name, own in expected.items():
        given = state.get(name)
        if isinstance(own, torch.Tensor) and isinstance(given, torch.Tensor) and own.shape != given.shape:
            shapes.append(f"{name} is {list(given.shape)} there and {list(own.shape)} in the model")
    if not shapes:
        return []
    return [f"different shapes: {brief(', '.join(shapes), _SHAPES_CHARACTERS)}"]


def _remedy(expected: Collection[str], given: Collection[str]) -> str:
    """Return what to do if names or shapes differ; some programs save the model as a part of another module."""
    first = next(iter(expected), "")
    for other in given:
        prefix = other.removesuffix(f".{first}")
        if first in given or prefix == other or not all(f"{prefix}.{name}" in given for name in expected):
            continue
        holder = "model"
        for part in reversed(prefix.split(".")):
            holder = f'torch.nn.ModuleDict({{"{part}": {holder}}})'
        rest = ""
        if len(given) > len(expected):
            rest = ", strict=False"
        return brief(f"All names of the model follow {prefix!r} there: use load_weights({holder}, path{rest}).", 500)
    return "Build the model as it was when it was saved."
