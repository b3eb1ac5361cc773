"""From YAML files to settings: bases, overrides, variables. OmegaConf reads, merges and resolves."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from cyxtrain.errors import ConfigError
from cyxtrain.settings import unknown_name

SECTIONS = (
    "model",
    "data",
    "loss_fn",
    "optimizer",
    "scheduler",
    "metrics",
    "callbacks",
    "training",
    "distributed",
)
_NAMED = ("model", "data", "loss_fn", "optimizer", "scheduler")
"""Sections of one thing that has a name, and settings of its own."""
_BASE = "_base_"
_VARIABLE = re.compile(r"\$\{([A-Z_][A-Z0-9_]*)(?::([^{}]*))?\}")

Values = dict[str, Any]
_Answer = TypeVar("_Answer")


def read_file(path: str | os.PathLike[str], readers: tuple[Path, ...] = ()) -> Values:
    """Returns what a YAML file and its bases say, merged; variables are as they are written.

    Args:
        path: Of the file.
        readers: The files of which this one is a base, the first one first.

    Raises:
        ConfigError: There is no such file, it is no YAML, or files are each other's base.
    """
    file = Path(path)
    here = file.resolve()
    chain = (*readers, here)
    if here in readers:
        raise ConfigError(f"{path}: {_BASE} goes in a circle: {' -> '.join(each.name for each in chain)}.")
    values = _parsed(file)
    bases = values.pop(_BASE, [])
    for section in values:
        if section not in SECTIONS:
            raise unknown_name(str(path), section, [*SECTIONS, _BASE], "section")
    found: Values = {}
    for base in [bases] if isinstance(bases, str) else bases:
        found = _over(found, read_file(file.parent / base, chain))
    return _over(found, with_names(values))


def merged(values: Values, overrides: Sequence[str]) -> Values:
    """Returns settings over which others rule.

    Args:
        values: The settings.
        overrides: Such as "training.epochs=3"; the later rule over the earlier ones.

    Raises:
        ConfigError: One is no such thing, or of a section that does not exist.
    """
    for override in overrides:
        name, equals, _ = override.partition("=")
        if not equals or not name.strip() or name != name.strip():
            raise ConfigError(f"an override is name=value, such as training.epochs=3; got {override!r}.")
        section = name.split(".")[0]
        if section not in SECTIONS:
            raise unknown_name("the config", section, list(SECTIONS), "section")
        values = _over(values, with_names(_override(override)))
    return values


def _override(override: str) -> Values:
    return _library(f"the override {override}", lambda: _container(OmegaConf.from_dotlist([override])))


def with_names(values: Values) -> Values:
    """Returns settings in which a section that is only a name has it as its setting."""
    return {
        name: {"name": value} if name in _NAMED and isinstance(value, str) else value for name, value in values.items()
    }


def resolved(values: Values, variables: Mapping[str, str], source: str) -> Values:
    """Returns settings in which variables and other settings stand for what they are.

    Args:
        values: The settings.
        variables: The environment.
        source: What the settings are, for messages: the file.

    Raises:
        ConfigError: A variable is not set and has no default; or there is no such setting.
    """
    found = _replaced(values, variables, source, "")
    made = _library(source, lambda: OmegaConf.create(found))
    return _library(source, lambda: _container(made, resolve=True))


def to_yaml(values: Values) -> str:
    """Returns settings as a YAML file has them."""
    return OmegaConf.to_yaml(OmegaConf.create(values))


def _parsed(file: Path) -> Values:
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"there is no file {file}.{_like(file)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {file}: {error}.") from error
    values = _library(str(file), lambda: OmegaConf.create(text)) if text.strip() else OmegaConf.create()
    if not OmegaConf.is_dict(values):
        raise ConfigError(f"{file} must have sections, such as 'training:', got {OmegaConf.to_container(values)!r}.")
    return _container(values)


def _like(file: Path) -> str:
    """Returns which file of a folder may have been meant."""
    try:
        names = {each.stem: each.name for each in sorted(file.parent.iterdir()) if each.suffix in (".yaml", ".yml")}
    except OSError:
        return f" Nor is there a folder {file.parent}."
    close = difflib.get_close_matches(file.stem, names, n=1, cutoff=0.6)
    if close:
        return f" Did you mean {file.parent / names[close[0]]}?"
    return f" In {file.parent} there are: {', '.join(names.values())}." if names else ""


def _over(base: Values, own: Values) -> Values:
    """Returns settings over which others rule: a section of another name rules whole."""
    kept = {
        name: value
        for name, value in base.items()
        if name not in _NAMED or _name_of(own.get(name)) in (None, _name_of(value))
    }
    return _container(OmegaConf.merge(kept, own))


def _name_of(section: Any) -> Any:
    return section.get("name") if isinstance(section, Mapping) else None


def _replaced(value: Any, variables: Mapping[str, str], source: str, name: str) -> Any:
    """Returns a value in which variables of the environment have been replaced by what they are."""
    if isinstance(value, Mapping):
        return {key: _replaced(each, variables, source, f"{name}.{key}".lstrip(".")) for key, each in value.items()}
    if isinstance(value, list):
        return [_replaced(each, variables, source, f"{name}[{index}]") for index, each in enumerate(value)]
    if not isinstance(value, str):
        return value

    def replacement(match: re.Match[str]) -> str:
        variable, default = match.groups()
        text = variables.get(variable) or default
        if text is None:
            raise ConfigError(
                f"{source}: {name} is {value}, and the environment has no {variable}: set it, or write a default, as "
                f"in ${{{variable}:...}}."
            )
        return text

    text = _VARIABLE.sub(replacement, value)
    # What is all of the value is YAML, as if it stood there: a number is a number.
    return _scalar(text) if _VARIABLE.fullmatch(value) else text


def _scalar(text: str) -> Any:
    try:
        return _container(OmegaConf.from_dotlist([f"value={text}"]))["value"]
    except (yaml.YAMLError, OmegaConfBaseException):
        return text


def _container(values: Any, *, resolve: bool = False) -> Values:
    found = OmegaConf.to_container(values, resolve=resolve)
    assert isinstance(found, dict)
    return {str(name): value for name, value in found.items()}


def _library(source: str, call: Callable[[], _Answer]) -> _Answer:
    """Returns what a call of the library gives; its errors in one line that says where."""
    try:
        return call()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = "" if mark is None else f", line {mark.line + 1}"
        raise ConfigError(f"{source}{line}: no YAML: {error.problem or error.context}.") from error
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{source}: {str(error).splitlines()[0]}.") from error
