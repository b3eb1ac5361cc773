"""The checkpoint file: all that a run needs to continue, and no code.

    model.safetensors      parameters and buffers, tied ones once
    optimizer.safetensors  the tensors of the optimizer's state and hyperparameters
    others.safetensors     the tensors of everything else
    state.json             everything else: lists of names, position, history, config, versions

`archive.py` adds the checksums; safetensors reads the tensors; loading never unpickles. A single
safetensors file would take more code: its header has no checksum, and older files would still need this reader.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import json
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import safetensors.torch
import torch

from cyxtrain.checkpoint.files import read_file, replacing
from cyxtrain.checkpoint.format.archive import Buffer, blaming, look_at_archive, read_archive, write_archive
from cyxtrain.checkpoint.format.encoding import decode_tree, encode_tree
from cyxtrain.checkpoint.format.tensors import TensorLayout, decode_tensors, encode_tensors, safetensors_parts
from cyxtrain.errors import CheckpointError

FORMAT = "cyxtrain-checkpoint"
FORMAT_VERSION = 2

_MODEL = "model.safetensors"
_OPTIMIZER = "optimizer.safetensors"
_OTHERS = "others.safetensors"
_TENSOR_FILES = (_MODEL, _OPTIMIZER, _OTHERS)
STATE = "state.json"
STATE_LIMIT_BYTES = 1 << 28


def library_versions() -> dict[str, str]:
    """Return the versions of the libraries that the numbers of a run depend on."""
    return {"cyxtrain": _own_version(), "torch": str(torch.__version__), "python": platform.python_version()}


@functools.cache
def _own_version() -> str:
    """Return cyxtrain's version; looking it up takes longer than many a step."""
    try:
        return importlib.metadata.version("cyxtrain")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


@dataclass
class CheckpointState:
    """All that a run needs to continue, for any number of ranks except `ranks`.

    All parts but the model, the optimizer's and the others are JSON values.
    """

    model: dict[str, Any]
    """The model's `state_dict`: tensors, and JSON values of modules with `get_extra_state`."""
    optimizer: dict[str, dict[str, Any]] = field(default_factory=dict)
    """State by parameter name: tensors and JSON values."""
    optimizer_groups: list[dict[str, Any]] = field(default_factory=list)
    """Hyper-parameters, and "params": the names of the group's parameters."""
    others: dict[str, Any] = field(default_factory=dict)
    """Other states by name, such as the scheduler's and callbacks': tensors and JSON values."""
    ranks: list[dict[str, Any]] = field(default_factory=list)
    """State of each rank, such as its generators; may be empty."""
    position: dict[str, Any] = field(default_factory=dict)
    """Position in the run, such as the epoch."""
    history: dict[str, Any] = field(default_factory=dict)
    """`TrainingHistory.to_dict()`."""
    config: dict[str, Any] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)
    """Which run it is from."""
    arithmetic: dict[str, Any] = field(default_factory=dict)
    """What the bits of the results depend on besides the versions."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """The user's data, such as the experiment."""
    versions: dict[str, Any] = field(default_factory=library_versions)
    world_size: int = 1


# What state.json holds unchanged; the tensors of the others are in the tensor files.
_PLAIN_FIELDS = {
    **dict.fromkeys(("position", "history", "config", "run", "arithmetic", "metadata", "versions"), dict),
    "ranks": list,
    "world_size": int,
}


def write_checkpoint(path: str | os.PathLike[str], state: CheckpointState) -> None:
    """Write a checkpoint atomically: a power cut leaves either the new file or the old one.

    Cost: one write of all bytes; tensors on the CPU are not copied.
    """
    write_records(path, records_of(state), summary_of(state))


def write_records(path: str | os.PathLike[str], entries: Mapping[str, list[Buffer]], summary: object) -> None:
    """Write the results of `records_of` and `summary_of` as `write_checkpoint` does."""
    with replacing(path, "checkpoint") as file:
        write_archive(file, FORMAT, FORMAT_VERSION, entries, summary)


def summary_of(state: CheckpointState) -> dict[str, dict[str, Any]]:
    """Return the summary for the manifest, by which the checkpoints of a folder are compared."""
    return {"position": state.position, "run": state.run}


def read_checkpoint(path: str | os.PathLike[str]) -> CheckpointState:
    """Read and verify a checkpoint; tensors are on the CPU."""
    return unpack_checkpoint(checkpoint_bytes(path), str(path))


def checkpoint_bytes(path: str | os.PathLike[str]) -> bytes:
    """Return the bytes of a checkpoint's file; refuse an obviously different file before reading it all."""
    return read_file(path, "checkpoint", lambda file: look_at_archive(file, str(path)))


def unpack_checkpoint(data: bytes | memoryview, name: str) -> CheckpointState:
    """Return the state in a checkpoint's bytes, after verifying all of it; tensors are on the CPU.

    Cost: memory for the tensors, and for one more entry while it is unpacked.
    """
    entries = read_archive(bytes(data), name, FORMAT, FORMAT_VERSION, (*_TENSOR_FILES, STATE))
    with blaming(name, STATE):
        values = _state_values(entries[STATE])
        plain = {key: _typed(decode_tree(values[key]), kind) for key, kind in _PLAIN_FIELDS.items()}
        model_values = _typed(decode_tree(values["model_values"]), dict)
        model_order = values["model_order"]
        layouts = {entry: TensorLayout(**layout) for entry, layout in values["layouts"].items()}
    tensors = {}
    for entry in _TENSOR_FILES:
        with blaming(name, entry):
            tensors[entry] = decode_tensors(safetensors.torch.load(bytes(entries[entry])), layouts[entry])
    with blaming(name, STATE):
        model = {**tensors[_MODEL], **model_values}
        return CheckpointState(
            model={key: model[key] for key in model_order},
            optimizer=_typed(decode_tree(values["optimizer"], tensors[_OPTIMIZER]), dict),
            optimizer_groups=_typed(decode_tree(values["optimizer_groups"], tensors[_OPTIMIZER]), list),
            others=_typed(decode_tree(values["others"], tensors[_OTHERS]), dict),
            **plain,
        )


def _state_values(content: memoryview) -> dict[str, Any]:
    """Return the values in state.json, still encoded."""
    if len(content) > STATE_LIMIT_BYTES:
        raise ValueError(f"it has {len(content):,} bytes, and may have {STATE_LIMIT_BYTES:,}")
    return {"metadata": {}, **json.loads(bytes(content))}  # older checkpoints have no metadata


def records_of(
    state: CheckpointState, copy: Callable[[str, str, torch.Tensor], torch.Tensor] | None = None
) -> dict[str, list[Buffer]]:
    """Return the parts of each entry of a checkpoint's archive.

    `copy` copies a tensor of an entry, given both names; without it, the parts are the memory of tensors on the CPU,
    which must not change until written.
    """
    values, tensors = _separated(state)
    values["layouts"] = {}
    entries: dict[str, list[Buffer]] = {}
    for entry, named in tensors.items():
        owner = entry.removesuffix(".safetensors")
        stored, layout = encode_tensors(named, owner, copy and partial(copy, entry))
        values["layouts"][entry] = dataclasses.asdict(layout)
        entries[entry] = safetensors_parts(stored)
    content = json.dumps(values, allow_nan=False, separators=(",", ":")).encode("ascii")
    if len(content) > STATE_LIMIT_BYTES:
        raise CheckpointError(
            f"Without its tensors the state has {len(content):,} bytes as JSON, and a checkpoint holds at most "
            f"{STATE_LIMIT_BYTES:,}. Store large values, such as arrays in a callback's state, as tensors."
        )
    entries[STATE] = [content]
    return entries


def _separated(state: CheckpointState) -> tuple[dict[str, Any], dict[str, dict[str, torch.Tensor]]]:
    """Return the values of state.json, and the tensors of each tensor file by name."""
    model = {name: value for name, value in state.model.items() if isinstance(value, torch.Tensor)}
    optimizer: dict[str, torch.Tensor] = {}
    others: dict[str, torch.Tensor] = {}
    model_values = {name: value for name, value in state.model.items() if name not in model}
    values: dict[str, Any] = {name: encode_tree(getattr(state, name), name) for name in _PLAIN_FIELDS}
    values["model_order"] = list(state.model)  # lost otherwise: tensors and values are stored apart
    values["model_values"] = {name: encode_tree(value, name) for name, value in model_values.items()}
    values["optimizer"] = {name: encode_tree(value, name, optimizer) for name, value in state.optimizer.items()}
    values["optimizer_groups"] = encode_tree(state.optimizer_groups, "group", optimizer)
    values["others"] = {name: encode_tree(value, name, others) for name, value in state.others.items()}
    return values, {_MODEL: model, _OPTIMIZER: optimizer, _OTHERS: others}


def _typed(value: Any, kind: type) -> Any:
    """Return a value of the file; refuse another type than it should have."""
    if not isinstance(value, kind):
        raise TypeError(f"it holds a {type(value).__name__} where a {kind.__name__} belongs")
    return value
