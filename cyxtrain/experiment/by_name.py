"""Create objects by name: this package's names, PyTorch's classes, or "module:name" of your own."""

from __future__ import annotations

import importlib
import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cyxtrain.config.settings import unknown_name
from cyxtrain.errors import ConfigError

Maker = Callable[..., Any]


def is_path(name: object) -> bool:
    """Return whether a name is "module:name"."""
    return isinstance(name, str) and ":" in name


def section_of(values: Mapping[str, Any], section: str, default: str | None = None) -> tuple[str, dict[str, Any]]:
    """Return (name, settings) of a section; raise a ConfigError if it has no name and there is no default."""
    return named(values.get(section), f"the section '{section}'", f"{section}: {{name: ...}}", default)


def named(found: Any, owner: str, form: str, default: str | None = None) -> tuple[str, dict[str, Any]]:
    """Return (name, settings) of a name, or of settings with a name; raise ConfigError if there is none."""
    settings = {"name": found} if isinstance(found, str) else {} if found is None and default else found
    name = settings.get("name", default) if isinstance(settings, Mapping) else None
    if not isinstance(name, str):
        raise ConfigError(f"{owner} needs a name, such as '{form}', got {found!r}.")
    return name, {key: value for key, value in settings.items() if key != "name"}


@dataclass(frozen=True)
class Names:
    """Finds classes and functions by name."""

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
        """Return the class or function: one of `known`, in any case; a `kind` in `module`; or "module:name"."""
        if name.lower() in known:
            return known[name.lower()]
        if is_path(name):
            return self.imported(what, name)
        classes = {
            key: each
            for key, each in ({} if module is None else vars(module)).items()
            if inspect.isclass(each) and issubclass(each, kind) and each is not kind and not key.startswith("_")
        }
        if name in classes:
            return classes[name]
        raise unknown_name("cyxtrain", name, [*known, *classes], what)

    def imported(self, what: str, path: str) -> Maker:
        """Return the class or function "module:name"; raise a ConfigError if there is none or code is not allowed."""
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
        """Import a module; raise a ConfigError if there is none, or if code is not allowed."""
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
