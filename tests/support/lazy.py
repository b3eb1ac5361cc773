"""What a test module names and only its tests need: nothing of it is imported or made while tests are collected."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any


class LazyModule:
    """A module that is imported when one of its public names is first used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest looks for several in all that a test module names
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)


@dataclasses.dataclass
class LazyParameter:
    """A parameter of a test that `make` returns when the test runs."""

    make: Callable[[], Any]


def resolve(parameter: Any) -> Any:
    """Return a parameter of a test, or what a lazy one makes."""
    return parameter.make() if isinstance(parameter, LazyParameter) else parameter
