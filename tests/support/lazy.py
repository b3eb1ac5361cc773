"""What a test module names and only its tests need: nothing of it is imported or made while tests are collected."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import pytest


class LazyModule:
    """A module that is imported before the first test of the file that names it; without an optional one, they skip."""

    def __init__(self, name: str, *, optional: bool = False) -> None:
        self._name = name
        self._optional = optional

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest looks for several in all that a test module names
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)


def import_lazy_modules(names: Mapping[str, Any]) -> None:
    """Import the lazy modules that a file names."""
    for module in names.values():
        if isinstance(module, LazyModule):
            if module._optional:
                pytest.importorskip(module._name)
            else:
                importlib.import_module(module._name)


@dataclasses.dataclass
class LazyParameter:
    """A parameter of a test that `make` returns when the test runs."""

    make: Callable[[], Any]


def resolve(parameter: Any) -> Any:
    """Return a parameter of a test, or what a lazy one makes."""
    return parameter.make() if isinstance(parameter, LazyParameter) else parameter
