"""The section `data`: what an experiment is trained, validated and tested on."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cyxtrain.data.kinds import gives_batches
from cyxtrain.datasets import load_digits
from cyxtrain.errors import ConfigError
from cyxtrain.experiment.naming import Names, make, section_of
from cyxtrain.settings import unknown_name

_PARTS = ("train", "validation", "test")


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
        file = np.load(path)  # without pickles: it runs no code
        if isinstance(file, np.ndarray):
            raise ValueError("it holds a single one, without a name")
        with file:
            arrays = {name: file[name] for name in file.files}
    except FileNotFoundError:
        raise ConfigError(f"data.path: there is no file {path} (now in {Path.cwd()}).") from None
    except (OSError, EOFError, ValueError, zipfile.BadZipFile) as error:
        raise ConfigError(f"data.path: {path} is no file of arrays that np.savez has written: {error}.") from error
    known = [f"{kind}_{part}" for part in ("train", "val", "test") for kind in "xy"]
    for name in arrays:
        if name not in known:
            raise unknown_name(path, name, known, "array")
    if "x_train" not in arrays:
        raise ConfigError(f"data.path: {path} has no x_train.")
    parts = {"train": "train", "validation": "val", "test": "test"}
    return {
        part: tuple(arrays[name] for name in (f"x_{short}", f"y_{short}") if name in arrays)
        for part, short in parts.items()
    }


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
