"""Things by name: the package's own, PyTorch's by their class, a user's as "module:name"; with settings, strictly."""

from __future__ import annotations

import importlib
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

from cyxtrain.errors import ConfigError
from cyxtrain.settings import check_arguments, unknown_name

Maker = Callable[..., Any]


def is_path(name: object) -> bool:
    """Returns whether a name is that of a user's own: "module:name"."""
    return isinstance(name, str) and ":" in name


def section_of(values: Mapping[str, Any], section: str) -> tuple[str, dict[str, Any]]:
    """Returns (name, settings) of a section.

    Raises:
        ConfigError: It has no name.
    """
    found = values.get(section)
    found = {"name": found} if isinstance(found, str) else found
    if not isinstance(found, Mapping) or not isinstance(found.get("name"), str):
        raise ConfigError(f"the section '{section}' needs a name, such as '{section}: {{name: ...}}', got {found!r}.")
    return found["name"], {key: value for key, value in found.items() if key != "name"}


def find(
    what: str,
    name: str,
    known: Mapping[str, Maker],
    module: types.ModuleType | None = None,
    kind: type = object,
) -> Maker:
    """Returns the class or function of a name.

    Args:
        what: What it is, for messages: "optimizer".
        name: One of `known`, a class of `module`, or "module:name".
        known: By name.
        module: Whose classes are known by theirs.
        kind: What those classes derive from.

    Raises:
        ConfigError: There is none, with the nearest name; or a module cannot be imported.
    """
    if name in known:
        return known[name]
    if is_path(name):
        return _imported(what, name)
    classes = {
        key: each
        for key, each in ({} if module is None else vars(module)).items()
        if inspect.isclass(each) and issubclass(each, kind) and each is not kind and not key.startswith("_")
    }
    if name in classes:
        return classes[name]
    raise unknown_name("cyxtrain", name, [*known, *classes], what)


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
    except (TypeError, ValueError, OSError) as error:
        raise ConfigError(f"{owner} cannot be made of {dict(given)}: {error}") from error


def _imported(what: str, path: str) -> Maker:
    """Returns what "module:name" is."""
    module, _, name = path.partition(":")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the {what} '{path}': there is no module {error.name!r}. Modules are looked for in the folder in which "
            "the command is called, and among those that are installed."
        ) from error
    for part in name.split("."):
        found = getattr(found, part, None)  # type: ignore[assignment]
    if not callable(found):
        raise ConfigError(f"the {what} '{path}': {module} has no class or function {name!r}.")
    return found
