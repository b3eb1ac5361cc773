"""Sections of an experiment, overrides, and objects by name: ours, PyTorch's, or "module:name" of your own."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cyxtrain.config import DistributedTrainingConfig
from cyxtrain.config.settings import unknown_name
from cyxtrain.errors import ConfigError

Maker = Callable[..., Any]
SECTIONS = (
    "imports",
    "model",
    "data",
    "loss_fn",
    "loss_weights",
    "optimizer",
    "optimizers",
    "scheduler",
    "schedulers",
    "metrics",
    "callbacks",
    "training",
    "distributed",
    "train_step",
    "test_step",
    "predict_step",
)
NAMED = ("model", "data", "loss_fn", "optimizer", "scheduler")
"""Sections of one object with a name and settings."""
_TRAINING = {field.name for field in dataclasses.fields(DistributedTrainingConfig)}

Values = dict[str, Any]
Overrides = Sequence[str] | Mapping[str, Any]


def is_path(name: object) -> bool:
    """Return whether a name is "module:name"."""
    return isinstance(name, str) and ":" in name


def split_section(values: Mapping[str, Any], section: str, default: str | None = None) -> tuple[str, dict[str, Any]]:
    """Return (name, settings) of a section; raise a ConfigError if it has no name and there is no default."""
    return split_name(values.get(section), f"the section '{section}'", f"{section}: {{name: ...}}", default)


def split_name(found: Any, owner: str, form: str, default: str | None = None) -> tuple[str, dict[str, Any]]:
    """Return (name, settings) of a name, or of settings with a name; raise ConfigError for anything else."""
    settings = found
    if isinstance(found, str):
        settings = {"name": found}
    elif found is None and default:
        settings = {}
    name = None
    if isinstance(settings, Mapping):
        name = settings.get("name", default)
    if not isinstance(name, str):
        raise ConfigError(f"{owner} needs a name, such as '{form}', got {found!r}.")
    return name, {key: value for key, value in settings.items() if key != "name"}


@dataclass(frozen=True)
class Resolver:
    """A lookup of classes and functions by name."""

    own_code: bool
    """Whether names may be "module:name", which runs that module."""

    def find(
        self,
        what: str,
        name: str,
        known: Mapping[str, Maker],
        module: types.ModuleType | None = None,
        kind: type = object,
    ) -> Maker:
        """Return a class or function: one of `known`, in any case; a `kind` in `module`; or "module:name"."""
        if name.lower() in known:
            return known[name.lower()]
        if is_path(name):
            return self.imported(what, name)
        classes = _classes_in(module, kind)
        if name in classes:
            return classes[name]
        raise unknown_name("cyxtrain", name, [*known, *classes], what)

    def imported(self, what: str, path: str) -> Maker:
        """Return the class or function "module:name"; refuse a missing one, and code that is not allowed."""
        module, _, name = path.partition(":")
        if not module or not name:
            raise ConfigError(f"the {what} '{path}': write it as \"module:name\".")
        found: Any = self.module(f"the {what} '{path}'", module)
        for part in name.split("."):
            found = getattr(found, part, None)
        if not callable(found):
            raise ConfigError(f"the {what} '{path}': {module} has no class or function {name!r}.")
        made: Maker = found
        return made

    def module(self, owner: str, name: str) -> types.ModuleType:
        """Import a module; raise a ConfigError if it is missing, or if code is not allowed."""
        if not self.own_code:
            raise ConfigError(
                f"{owner} is code from outside cyxtrain, which a checkpoint may not run: pass the experiment's file "
                "with --config."
            )
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"{owner}: there is no module {error.name!r}. It must be installed, or be in the current folder "
                f"({Path.cwd()})."
            ) from error


def _classes_in(module: types.ModuleType | None, kind: type) -> dict[str, Maker]:
    classes: dict[str, Maker] = {}
    if module is None:
        return classes
    for name, each in vars(module).items():
        is_subclass = inspect.isclass(each) and issubclass(each, kind) and each is not kind
        if is_subclass and not name.startswith("_"):
            classes[name] = each
    return classes


def override_strings(overrides: Overrides) -> list[str]:
    """Return overrides as a list of "name=value"; raise a ConfigError for a single string."""
    if isinstance(overrides, Mapping):
        return [f"{name}={json.dumps(value)}" for name, value in overrides.items()]
    if isinstance(overrides, str):
        raise ConfigError(f"overrides are a list, such as [{overrides!r}], or a dictionary; got {overrides!r}.")
    return list(overrides)


def with_names(values: Values) -> Values:
    """Return settings in which sections that are only a name become {"name": ...}."""
    found = dict(values)
    for section in NAMED:
        if isinstance(found.get(section), str):
            found[section] = {"name": found[section]}
    return found


def check_section(owner: str, section: str, *more: str) -> None:
    """Raise a ConfigError, with the nearest name, unless a section exists or is one of `more`."""
    if section in _TRAINING:
        raise ConfigError(f"{owner} has no section '{section}'. Did you mean 'training.{section}'?")
    if section not in SECTIONS:
        raise unknown_name(owner, section, [*SECTIONS, *more], "section")
