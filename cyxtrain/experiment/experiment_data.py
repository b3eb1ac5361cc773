"""The section `data`: what an experiment is trained, validated and tested on."""

from __future__ import annotations

import io
import math
import os
import sys
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cyxtrain.config.settings import unknown_name
from cyxtrain.data.sources.open import gives_batches
from cyxtrain.datasets import load_digits
from cyxtrain.environment.regular_files import at_a_glance, memory_bytes, open_regular
from cyxtrain.errors import ConfigError, brief
from cyxtrain.experiment.by_name import Names, make, section_of

_PARTS = ("train", "validation", "test")
_ARRAYS = [f"{kind}_{part}" for part in ("train", "val", "test") for kind in "xy"]
_MOST_DEFLATED = 1032
"""Bytes that one byte of zlib's can become."""
_MOST_RECORDS_BYTES = 1 << 20
"""Of the zip and at the head of an array, before it is known how many arrays there are."""


@dataclass(frozen=True)
class Data:
    """What an experiment is about: each part as `fit` and `evaluate` take it, (X, y), (X,) or (loader,); () is none."""

    train: tuple[Any, ...]
    validation: tuple[Any, ...] = ()
    test: tuple[Any, ...] = ()


def digits(targets: bool = True) -> dict[str, Any]:
    """Returns the handwritten digits of `cyxtrain.datasets`.

    Args:
        targets: Whether with the digit that each picture shows; False: for a model that needs none.
    """
    train, test = load_digits()
    return {"train": train if targets else train[:1], "test": test if targets else test[:1]}


def npz(path: str) -> dict[str, Any]:
    """Returns the arrays of a file of NumPy's, under Keras's names: x_train, y_train, x_val, y_val, x_test, y_test.

    Args:
        path: Of the file; only x_train must be in it.

    Raises:
        ConfigError: There is none, it is something else, or holds other arrays.
    """
    try:
        with open_regular(path) as file:
            arrays = _read_arrays(file, str(path))
    except FileNotFoundError:
        raise ConfigError(f"data.path: there is no file {brief(str(path))} (now in {Path.cwd()}).") from None
    except ConfigError:
        raise
    except Exception as error:  # whatever a file of other bytes makes zip and NumPy raise
        reason = brief(str((error.strerror if isinstance(error, OSError) else None) or error)) or type(error).__name__
        raise ConfigError(
            f"data.path: {brief(str(path))} is no file of arrays that np.savez has written: {reason}."
        ) from error
    if "x_train" not in arrays:
        raise ConfigError(f"data.path: {brief(str(path))} has no x_train.")
    parts = {"train": "train", "validation": "val", "test": "test"}
    return {
        part: tuple(arrays[name] for name in (f"x_{short}", f"y_{short}") if name in arrays)
        for part, short in parts.items()
    }


def _read_arrays(file: io.BufferedReader, path: str) -> dict[str, Any]:
    """Returns the arrays of an open file, by name, after comparing what each says of itself with the bytes there."""
    if not zipfile.is_zipfile(file):
        file.seek(0)
        is_one = file.read(len(np.lib.format.MAGIC_PREFIX)) == np.lib.format.MAGIC_PREFIX
        raise ValueError("it holds a single one, without a name" if is_one else "it is no zip")
    with zipfile.ZipFile(at_a_glance(file, _MOST_RECORDS_BYTES)) as archive:
        entries = archive.infolist()
        names = [entry.filename.removesuffix(".npy") for entry in entries]
        for name in names:
            if name not in _ARRAYS:
                raise unknown_name(path, brief(name), _ARRAYS, "array")
        size_bytes = os.fstat(file.fileno()).st_size
        most = memory_bytes() or sys.maxsize
        if sum(_content_bytes(archive, entry, size_bytes) for entry in entries) > most:
            raise ValueError(f"its arrays have more bytes than this machine's memory, {most:,}")
    file.seek(0)
    with np.load(file) as arrays:  # without pickles: it runs no code
        return {name: arrays[name] for name in names}


def _content_bytes(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, file_bytes: int) -> int:
    """Returns how many bytes an array has.

    Raises:
        ValueError: Its shape and type are not those of its bytes, or these do not fit into the file.
    """
    ratio = {zipfile.ZIP_STORED: 1, zipfile.ZIP_DEFLATED: _MOST_DEFLATED}.get(entry.compress_type, 0)
    if entry.compress_size > file_bytes or entry.file_size > entry.compress_size * ratio:
        raise ValueError(f"{entry.filename} has {entry.file_size:,} bytes that the file cannot hold")
    with archive.open(entry) as content:
        version = np.lib.format.read_magic(content)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(content)
        own_bytes = math.prod(shape) * dtype.itemsize
        if dtype.hasobject:
            raise ValueError(f"{entry.filename} holds Python objects, and arrays of numbers are read alone")
        if min(shape, default=0) < 0 or own_bytes != entry.file_size - content.tell():
            raise ValueError(
                f"{entry.filename} says that it is {dtype} of shape {brief(shape)}, {own_bytes:,} bytes, and has "
                f"{entry.file_size - content.tell():,}"
            )
    return own_bytes


KNOWN: dict[str, Callable[..., Any]] = {"digits": digits, "npz": npz}


def open_data(values: Mapping[str, Any], names: Names) -> Data:
    """Returns the data of an experiment.

    Args:
        names: Finds functions of a user's own.
        values: Of the experiment. `data.name` is "digits", "npz", or "module:function": a function whose arguments are
            the other settings. It returns (train, test), or a dictionary with "train" and, where there are such,
            "validation" and "test"; each is (X, y), or what `fit` takes alone, such as a DataLoader.

    Raises:
        ConfigError: There are no such data.
    """
    name, settings = section_of(values, "data")
    owner = f"the data '{name}'"
    found = make(owner, names.find("data set", name, KNOWN), settings)
    if isinstance(found, tuple) and any(isinstance(part, (np.ndarray, torch.Tensor)) for part in found):
        raise ConfigError(f"{owner} gives arrays, (X, y): it must be ((X, y), (X_test, y_test)), or ((X, y), None).")
    if isinstance(found, tuple) and len(found) == 2:
        found = dict(zip(("train", "test"), found, strict=True))
    if not isinstance(found, Mapping) or "train" not in found:
        raise ConfigError(
            f"{owner} must be (train, test), or a dictionary with 'train', 'validation' and 'test', got "
            f"{type(found).__name__}."
        )
    for part in found:
        if part not in _PARTS:
            raise unknown_name(owner, str(part), list(_PARTS), "part")
    return Data(**{part: _arguments(each) for part, each in found.items()})


def as_validation(part: tuple[Any, ...]) -> Any:
    """Returns a part as `fit` takes it for validation."""
    if len(part) == 1:
        return part[0] if gives_batches(part[0]) else (part[0], None)
    return part


def _arguments(part: Any) -> tuple[Any, ...]:
    """Returns a part as arguments of `fit`."""
    if part is None:
        return ()
    return tuple(part) if isinstance(part, (tuple, list)) else (part,)
