"""The checkpoint file: one stored zip that is trusted only after every checksum in it was right.

    model.safetensors      parameters and buffers, tied ones once
    optimizer.safetensors  the tensors of the optimizer's state and hyper-parameters
    state.json             everything else: the lists of names, position, history, config, versions
    manifest.json          format and version, and size and xxh3_128 of each entry above

Any zip tool opens it, and safetensors reads its tensors. Nothing in it is code: loading never unpickles.
This module knows no trainer and no ranks; the same bytes are a file, or a message to a new rank.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import io
import json
import os
import platform
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import IO, Any

import safetensors.torch
import torch
import xxhash

from cyxtrain.errors import CheckpointError
from cyxtrain.training.saving.files import read_file, replacing
from cyxtrain.training.saving.tensors import TensorLayout, decode_tensors, encode_tensors
from cyxtrain.training.saving.tree import decode_tree, encode_tree

FORMAT = "cyxtrain-checkpoint"
FORMAT_VERSION = 1

_MODEL, _OPTIMIZER, _STATE, _MANIFEST = "model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"
_CONTENT = (_MODEL, _OPTIMIZER, _STATE)
_MANIFEST_LIMIT_BYTES = 65536
_EPOCH_OF_ZIP = (1980, 1, 1, 0, 0, 0)

# Signature, then lengths of name and extra field: what the reader needs of an entry's own 30 bytes.
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_LOCAL_SIGNATURE = b"PK\x03\x04"


def library_versions() -> dict[str, str]:
    """Returns the versions that decide how numbers come about, for whoever compares two runs."""
    try:
        own = importlib.metadata.version("cyxtrain")
    except importlib.metadata.PackageNotFoundError:
        own = "not installed"
    return {"cyxtrain": own, "torch": str(torch.__version__), "python": platform.python_version()}


@dataclass
class CheckpointState:
    """All that a run needs to go on; independent of the number of ranks."""

    model: dict[str, Any]
    """The model's `state_dict`: tensors, and JSON values of modules with `get_extra_state`."""
    optimizer: dict[str, dict[str, Any]] = field(default_factory=dict)
    """State by parameter name: tensors and JSON values."""
    optimizer_groups: list[dict[str, Any]] = field(default_factory=list)
    """Hyper-parameters, and "params": the names of the group's parameters."""
    position: dict[str, Any] = field(default_factory=dict)
    """Where in the run this is, such as the epoch: JSON values."""
    history: dict[str, Any] = field(default_factory=dict)
    """`TrainingHistory.to_dict()`."""
    config: dict[str, Any] = field(default_factory=dict)
    """The settings of the run: JSON values."""
    versions: dict[str, Any] = field(default_factory=library_versions)
    """Versions of the libraries that wrote it."""
    world_size: int = 1
    """Number of ranks that wrote it."""


# What state.json holds as it is; model and optimizer are spread over the tensor files.
_PLAIN_FIELDS = {"position": dict, "history": dict, "config": dict, "versions": dict, "world_size": int}


def write_checkpoint(path: str | os.PathLike[str], state: CheckpointState) -> None:
    """Writes a checkpoint in one piece: afterwards it survives a power cut, before that the old one does.

    Temporary file in the same folder, fsync, rename, fsync of the folder. Cost: memory for the larger of
    model and optimizer (on the CPU), and one write of all bytes.

    Raises:
        CheckpointError: The disk refuses, or the state holds what a checkpoint cannot; nothing temporary is left.
    """
    with replacing(path, "checkpoint") as file:
        _write_archive(file, state)


def read_checkpoint(path: str | os.PathLike[str]) -> CheckpointState:
    """Reads what `write_checkpoint` wrote, after checking all of it; tensors are on the CPU.

    Raises:
        CheckpointError: There is no such file, or it is damaged, with the entry.
    """
    return unpack_checkpoint(read_file(path, "checkpoint"), str(path))


def pack_checkpoint(state: CheckpointState) -> bytes:
    """Returns a checkpoint as bytes, equal for equal states. Cost: the file and its largest entry in memory.

    Raises:
        CheckpointError: The state holds what a checkpoint cannot, with its name.
    """
    target = io.BytesIO()
    _write_archive(target, state)
    return target.getvalue()


def unpack_checkpoint(data: bytes | memoryview, name: str) -> CheckpointState:
    """Returns the state in a checkpoint's bytes, after checking all of it; tensors are on the CPU.

    Sizes are compared with the bytes that are there before anything is allocated. Cost, beside `data`:
    the tensors, and one entry more while it is taken apart.

    Args:
        data: What `pack_checkpoint` gave, or a file of `write_checkpoint` holds.
        name: The file's name, for messages.

    Raises:
        CheckpointError: It is no checkpoint, of another version, or damaged, with the entry.
    """
    entries = _checked_entries(memoryview(data).cast("B").toreadonly(), name)
    with _blaming(name, _STATE):
        values = json.loads(bytes(entries[_STATE]))
        plain = {key: _typed(decode_tree(values[key]), kind) for key, kind in _PLAIN_FIELDS.items()}
        extra = _typed(decode_tree(values["model_values"]), dict)
        order, layout = values["model_order"], TensorLayout(**values["model_tensors"])
        optimizer_layout = TensorLayout(**values["optimizer_tensors"])
    with _blaming(name, _MODEL):
        model = {**decode_tensors(safetensors.torch.load(bytes(entries[_MODEL])), layout), **extra}
        model = {key: model[key] for key in order}
    with _blaming(name, _OPTIMIZER):
        tensors = decode_tensors(safetensors.torch.load(bytes(entries[_OPTIMIZER])), optimizer_layout)
        optimizer = _typed(decode_tree(values["optimizer"], tensors), dict)
        groups = _typed(decode_tree(values["optimizer_groups"], tensors), list)
    return CheckpointState(model=model, optimizer=optimizer, optimizer_groups=groups, **plain)


def _write_archive(target: IO[bytes], state: CheckpointState) -> None:
    """Writes the entries, then the manifest, which knows their checksums."""
    listed: dict[str, dict[str, Any]] = {}
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
        for name, content in _contents(state):
            listed[name] = {"size_bytes": len(content), "xxh3_128": xxhash.xxh3_128_hexdigest(content)}
            _add(archive, name, content)
            del content  # else the loop holds it while the next one is made: a whole model more in memory
        _add(archive, _MANIFEST, _json({"format": FORMAT, "version": FORMAT_VERSION, "entries": listed}))


def _contents(state: CheckpointState) -> Iterator[tuple[str, bytes]]:
    """Gives name and bytes of each entry but the manifest, one at a time."""
    tensors = {name: value for name, value in state.model.items() if isinstance(value, torch.Tensor)}
    extra = {name: encode_tree(value, name) for name, value in state.model.items() if name not in tensors}
    optimizer_tensors: dict[str, torch.Tensor] = {}
    optimizer = {name: encode_tree(values, name, optimizer_tensors) for name, values in state.optimizer.items()}
    groups = encode_tree(state.optimizer_groups, "group", optimizer_tensors)
    plain = {name: encode_tree(getattr(state, name), name) for name in _PLAIN_FIELDS}
    stored, layout = encode_tensors(tensors, "model")
    yield _MODEL, safetensors.torch.save(stored)
    stored, optimizer_layout = encode_tensors(optimizer_tensors, "optimizer")
    yield _OPTIMIZER, safetensors.torch.save(stored)
    values = {
        **plain,
        "model_order": list(state.model),
        "model_values": extra,
        "model_tensors": dataclasses.asdict(layout),
        "optimizer": optimizer,
        "optimizer_groups": groups,
        "optimizer_tensors": dataclasses.asdict(optimizer_layout),
    }
    yield _STATE, _json(values)


def _add(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    entry = zipfile.ZipInfo(name, _EPOCH_OF_ZIP)
    entry.create_system = 3  # the same bytes on every operating system
    archive.writestr(entry, content)


def _json(value: Any) -> bytes:
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode("ascii")


def _typed(value: Any, kind: type) -> Any:
    """Returns a value of the file, if it is of its type."""
    if not isinstance(value, kind):
        raise TypeError(f"it holds a {type(value).__name__} where a {kind.__name__} belongs")
    return value


def _checked_entries(view: memoryview, name: str) -> dict[str, memoryview]:
    """Returns the content of each entry but the manifest, compared with its size and checksum; nothing is copied."""
    with _blaming(name, "the zip directory"):
        entries = _located_entries(view)
    with _blaming(name, _MANIFEST):
        manifest = _manifest(*entries.pop(_MANIFEST))
    for entry in _CONTENT:
        with _blaming(name, entry):
            content, _ = entries[entry]
            listed = manifest[entry]
            if listed["size_bytes"] != len(content):
                raise ValueError(f"it has {len(content)} bytes, and the manifest says {listed['size_bytes']}")
            if listed["xxh3_128"] != xxhash.xxh3_128_hexdigest(content):
                raise ValueError("its checksum is wrong")
    return {entry: content for entry, (content, _) in entries.items()}


def _located_entries(view: memoryview) -> dict[str, tuple[memoryview, zipfile.ZipInfo]]:
    """Returns where each entry's bytes are, after checking that the zip is one of ours in every other respect."""
    with zipfile.ZipFile(_ViewFile(view)) as archive:
        listed = archive.infolist()
    names = [entry.filename for entry in listed]
    expected = {*_CONTENT, _MANIFEST}
    if len(names) != len(expected) or set(names) != expected:
        raise ValueError(f"the entries are {names}, and must be {sorted(expected)}")
    # A cut file may end in another archive that lies inside a tensor: it does not begin at the beginning.
    if min(entry.header_offset for entry in listed) != 0:
        raise ValueError("there are bytes before the first entry")
    return {entry.filename: (_payload(view, entry), entry) for entry in listed}


def _payload(view: memoryview, entry: zipfile.ZipInfo) -> memoryview:
    """Returns the bytes of one stored entry, where its own header says that they are."""
    if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size or entry.flag_bits & 1:
        raise ValueError(f"{entry.filename} is compressed or encrypted; a checkpoint's entries are stored as they are")
    signature, name_bytes, extra_bytes = _LOCAL_HEADER.unpack_from(view, entry.header_offset)
    name_start = entry.header_offset + _LOCAL_HEADER.size
    start = name_start + name_bytes + extra_bytes
    if signature != _LOCAL_SIGNATURE or view[name_start : name_start + name_bytes] != entry.filename.encode():
        raise ValueError(f"the header of {entry.filename} is not where the directory says")
    if start + entry.file_size > len(view):
        raise ValueError(f"{entry.filename} is cut off: {entry.file_size} bytes do not fit into the file")
    return view[start : start + entry.file_size]


def _manifest(content: memoryview, entry: zipfile.ZipInfo) -> Mapping[str, Mapping[str, Any]]:
    """Returns what the manifest says of each entry; the zip's own CRC-32 guards the manifest itself."""
    if len(content) > _MANIFEST_LIMIT_BYTES or zlib.crc32(content) != entry.CRC:
        raise ValueError("its checksum is wrong")
    manifest = json.loads(bytes(content))
    if manifest["format"] != FORMAT:
        raise ValueError(f"the format is {manifest['format']!r}, and must be {FORMAT!r}")
    if manifest["version"] != FORMAT_VERSION:
        raise CheckpointError(
            f"it is written in version {manifest['version']} of the format, and this cyxtrain reads version "
            f"{FORMAT_VERSION}: use the cyxtrain that wrote it"
        )
    if set(manifest["entries"]) != set(_CONTENT):
        raise ValueError(f"it lists {sorted(manifest['entries'])}, and must list {sorted(_CONTENT)}")
    entries: Mapping[str, Mapping[str, Any]] = manifest["entries"]
    return entries


@contextlib.contextmanager
def _blaming(name: str, entry: str) -> Iterator[None]:
    """Turns whatever a damaged or hostile file raises into an error that names the file and the entry."""
    try:
        yield
    except MemoryError:
        raise  # the machine's fault, not the file's
    except CheckpointError as error:
        raise CheckpointError(f"Cannot use checkpoint {name}: {entry}: {error}.") from error
    except Exception as error:
        raise CheckpointError(
            f"Checkpoint {name} is damaged, or none: {entry}: {error or type(error).__name__}. Use an earlier one."
        ) from error


class _ViewFile(io.RawIOBase):
    """Bytes in memory as a file for `zipfile`; a read never allocates more than is there, whatever was asked for."""

    def __init__(self, view: memoryview) -> None:
        super().__init__()
        self._view = view
        self._position = 0

    def read(self, size: int | None = -1) -> bytes:
        end = len(self._view) if size is None or size < 0 else min(self._position + size, len(self._view))
        content = bytes(self._view[self._position : end])
        self._position += len(content)
        return content

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: len(self._view)}[whence]
        if not 0 <= base + offset <= len(self._view):
            raise OSError("it points outside of the file")
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True
