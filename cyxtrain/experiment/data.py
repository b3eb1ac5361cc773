"""The section `data`: training, validation and test data of an experiment."""

from __future__ import annotations

import io
import math
import os
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cyxtrain.config.settings import make, unknown_name
from cyxtrain.data.sources.open import yields_batches
from cyxtrain.datasets import load_digits
from cyxtrain.environment.regular_files import at_a_glance, local_path, memory_bytes, open_regular
from cyxtrain.errors import ConfigError, brief
from cyxtrain.experiment.by_name import Resolver, split_section

_PARTS = ("train", "validation", "test")
_ARRAYS = [f"{kind}_{part}" for part in ("train", "val", "test") for kind in "xy"]
# The largest ratio of zlib's compression.
_MOST_DEFLATED = 1032
# Of the zip's directory and an array's header.
_MOST_RECORDS_BYTES = 1 << 20


@dataclass(frozen=True)
class Data:
    """Each part as arguments of `fit` and `evaluate`: (X, y), (X,) or (loader,); () without data."""

    train: tuple[Any, ...]
    validation: tuple[Any, ...] = ()
    test: tuple[Any, ...] = ()


def digits(targets: bool = True) -> dict[str, Any]:
    """Return the handwritten digits of `cyxtrain.datasets`, with or without targets."""
    train, test = load_digits()
    if targets:
        return {"train": train, "test": test}
    return {"train": train[:1], "test": test[:1]}


def npz(path: str) -> dict[str, Any]:
    """Return the arrays of an .npz file, by Keras's names: x_train, y_train, x_val, y_val, x_test, y_test."""
    try:
        with open_regular(local_path("data.path", path)) as file:
            arrays = _read_arrays(file, str(path))
    except FileNotFoundError:
        raise ConfigError(f"data.path: there is no file {brief(str(path))} (now in {Path.cwd()}).") from None
    except ConfigError:
        raise
    except Exception as error:  # zip and NumPy raise many types for corrupt files
        reason = getattr(error, "strerror", None) or str(error)
        reason = brief(reason) or type(error).__name__
        raise ConfigError(f"data.path: {brief(str(path))} is not a valid .npz file of np.savez: {reason}.") from error
    if "x_train" not in arrays:
        raise ConfigError(f"data.path: {brief(str(path))} has no x_train.")
    parts = {}
    for part, short in (("train", "train"), ("validation", "val"), ("test", "test")):
        parts[part] = tuple(arrays[name] for name in (f"x_{short}", f"y_{short}") if name in arrays)
    return parts


def _read_arrays(file: io.BufferedReader, path: str) -> dict[str, Any]:
    """Return the arrays of an open file, by name, after checking their headers against their bytes."""
    if not zipfile.is_zipfile(file):
        file.seek(0)
        if file.read(len(np.lib.format.MAGIC_PREFIX)) == np.lib.format.MAGIC_PREFIX:
            raise ValueError("it holds a single array without a name")
        raise ValueError("it is not a zip file")
    with zipfile.ZipFile(at_a_glance(file, _MOST_RECORDS_BYTES)) as archive:
        entries = archive.infolist()
        names = [entry.filename.removesuffix(".npy") for entry in entries]
        for name in names:
            if name not in _ARRAYS:
                raise unknown_name(path, brief(name), _ARRAYS, "array")
        # NumPy would allocate what a header announces before it reads the content.
        file_bytes = os.fstat(file.fileno()).st_size
        content_bytes = sum(_content_bytes(archive, entry, file_bytes) for entry in entries)
        allowed_bytes = memory_bytes()
        if content_bytes > allowed_bytes:
            raise ValueError(f"its arrays have more bytes than this machine's memory, {allowed_bytes:,}")
    file.seek(0)
    with np.load(file) as arrays:  # allow_pickle is False by default: it runs no code
        return {name: arrays[name] for name in names}


def _content_bytes(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, file_bytes: int) -> int:
    """Return an array's bytes; raise a ValueError if its header, its bytes and the file do not match."""
    ratio = {zipfile.ZIP_STORED: 1, zipfile.ZIP_DEFLATED: _MOST_DEFLATED}.get(entry.compress_type, 0)
    if entry.compress_size > file_bytes or entry.file_size > entry.compress_size * ratio:
        raise ValueError(f"{entry.filename} has {entry.file_size:,} bytes that the file cannot hold")
    with archive.open(entry) as content:
        read_header = np.lib.format.read_array_header_2_0
        if np.lib.format.read_magic(content) == (1, 0):
            read_header = np.lib.format.read_array_header_1_0
        shape, _, dtype = read_header(content)
        left_bytes = entry.file_size - content.tell()
    array_bytes = math.prod(shape) * dtype.itemsize
    if dtype.hasobject:
        raise ValueError(f"{entry.filename} holds Python objects; only arrays of numbers are read")
    if min(shape, default=0) < 0 or array_bytes != left_bytes:
        raise ValueError(
            f"the header of {entry.filename} says {dtype} of shape {brief(shape)}, {array_bytes:,} bytes, but it has "
            f"{left_bytes:,}"
        )
    return array_bytes


KNOWN: dict[str, Callable[..., Any]] = {"digits": digits, "npz": npz}


def open_data(values: Mapping[str, Any], resolver: Resolver) -> Data:
    """Return the data of an experiment.

    `data.name` is "digits", "npz", or "module:function", a function that takes the other settings. It returns (train,
    test), or a dictionary with "train" and optionally "validation" and "test"; each is (X, y), or a single argument of
    `fit`, such as a DataLoader.
    """
    name, settings = split_section(values, "data")
    owner = f"the data '{name}'"
    found = make(owner, resolver.find("data set", name, KNOWN), settings)
    if isinstance(found, tuple) and any(isinstance(part, (np.ndarray, torch.Tensor)) for part in found):
        raise ConfigError(f"{owner} returned (X, y): return ((X, y), (X_test, y_test)) or ((X, y), None).")
    if isinstance(found, tuple) and len(found) == 2:
        found = dict(zip(("train", "test"), found, strict=True))
    if not isinstance(found, Mapping) or "train" not in found:
        raise ConfigError(
            f"{owner} must return (train, test), or a dictionary with 'train', 'validation' and 'test', got "
            f"{type(found).__name__}."
        )
    for part in found:
        if part not in _PARTS:
            raise unknown_name(owner, str(part), list(_PARTS), "part")
    return Data(**{part: _arguments(each) for part, each in found.items()})


def as_validation(part: tuple[Any, ...]) -> Any:
    """Return a part as an argument of `fit` for validation."""
    if len(part) != 1:
        return part
    (inputs,) = part
    if yields_batches(inputs) or isinstance(inputs, Mapping):
        return inputs
    return inputs, None


def _arguments(part: Any) -> tuple[Any, ...]:
    if part is None:
        return ()
    return tuple(part) if isinstance(part, (tuple, list)) else (part,)
