"""Things by name: the package's own, PyTorch's by their class, a user's as "module:name"; with settings, strictly."""

from __future__ import annotations

import importlib
import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cyxtrain.config.settings import check_arguments, unknown_name
from cyxtrain.errors import ConfigError

Maker = Callable[..., Any]


def is_path(name: object) -> bool:
    """Returns whether a name is that of a user's own: "module:name"."""
    return isinstance(name, str) and ":" in name


def section_of(values: Mapping[str, Any], section: str, default: str | None = None) -> tuple[str, dict[str, Any]]:
    """Returns (name, settings) of a section.

    Args:
        values: Of the experiment.
        section: Which.
        default: Its name where it says none.

    Raises:
        ConfigError: It has no name.
    """
    return named(values.get(section), f"the section '{section}'", f"{section}: {{name: ...}}", default)


def named(found: Any, owner: str, form: str, default: str | None = None) -> tuple[str, dict[str, Any]]:
    """Returns (name, settings) of something that is a name, or settings with a name.

    Args:
        found: What there is.
        owner: How errors call it.
        form: How it should look.
        default: Its name where it says none.

    Raises:
        ConfigError: It has no name.
    """
    settings = {"name": found} if isinstance(found, str) else {} if found is None and default else found
    name = settings.get("name", default) if isinstance(settings, Mapping) else None
    if not isinstance(name, str):
        raise ConfigError(f"{owner} needs a name, such as '{form}', got {found!r}.")
    return name, {key: value for key, value in settings.items() if key != "name"}


@dataclass(frozen=True)
class Names:
    """Finds what has a name.

    Attributes:
        own_code: Whether names may be a user's own, "module:name", which runs that module.
    """

    own_code: bool

    def find(
        self,
        what: str,
        name: str,
        known: Mapping[str, Maker],
        module: types.ModuleType | None = None,
        kind: type = object,
    ) -> Maker:
        """Returns the class or function of a name.

        Args:
            what: What it is, for messages: "optimizer".
            name: One of `known`, in lower or upper case; a class of `module`; or "module:name".
            known: By name.
            module: Whose classes are known by theirs.
            kind: What those classes derive from.

        Raises:
            ConfigError: There is none, with the nearest name; or a module cannot be imported.
        """
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
        """Returns what "module:name" is.

        Raises:
            ConfigError: There is no such module, or it has no such name; or no code may be run.
        """
        module, _, name = path.partition(":")
        if not module or not name:
            raise ConfigError(f"the {what} '{path}': a name of your own is \"module:name\".")
        found: Any = self.module(f"the {what} '{path}'", module)
        for part in name.split("."):
            found = getattr(found, part, None)
        if not callable(found):
            raise ConfigError(f"the {what} '{path}': {module} has no class or function {name!r}.")
        made: Maker = found
        return made

    def module(self, owner: str, name: str) -> types.ModuleType:
        """Imports a module.

        Args:
            owner: What names it, for messages.
            name: Of the module.

        Raises:
            ConfigError: There is none; or no code may be run.
        """
        if not self.own_code:
            raise ConfigError(
                f"{owner} is code that is not cyxtrain's, and a checkpoint runs none: give the file of its settings by "
                "--config."
            )
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"{owner}: there is no module {error.name!r}. Modules are looked for in the folder in which the "
                f"command is called (now {Path.cwd()}), and among those that are installed."
            ) from error


def make(owner: str, maker: Maker, given: Mapping[str, Any], *first: Any) -> Any:
    """Returns what a class or function makes of its settings.

    Args:
        owner: How errors call it: "the optimizer 'adam'".
        maker: The class or function.
        given: Settings by name.
        *first: Its first arguments, which are no settings.

    Raises:
        ConfigError: A setting that it does not have, or that it refuses; or one is missing.
    """
    check_arguments(owner, maker, given, len(first))
    try:
        return maker(*first, **given)
    except ConfigError:
        raise
    except (TypeError, ValueError, RuntimeError, OSError) as error:
        raise ConfigError(f"{owner} cannot be made of {dict(given)}: {error}") from error
