"""Read settings from YAML: bases, overrides, variables. OmegaConf parses, merges and resolves."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from cyxtrain.environment.regular_files import local_path, read_text
from cyxtrain.errors import ConfigError, brief, shortened
from cyxtrain.experiment.by_name import NAMED, Overrides, Values, check_section, with_names, words_of

_BASE = "_base_"
_LONGEST_BYTES = 1 << 24
_DEEPEST = 32
_LONGEST_NUMBER = 70
"""Characters of an integer; in base 2, 64 bits need about as many."""
_WHOLE_NUMBER = re.compile(r"[-+]?(0x[0-9a-fA-F_]+|0b[01_]+|[0-9_]+(:[0-5]?[0-9])*)")
_INTEGER = "tag:yaml.org,2002:int"
_PARSER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the fast one is not always built
_VARIABLE = re.compile(r"(?<!\\)\$\{([A-Z_][A-Z0-9_]*)(?::([^{}]*))?\}")
_SECRET = re.compile(".*(SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL).*|(.*_)?(API|ACCESS|PRIVATE)?(KEY|TOKEN)S?")
_REFERENCE = re.compile(r"(?<!\\)(\\\\)*\$\{(([^{}$:]{1,200})\})?")
_MOST_REFERENCES = 256
"""In one value; OmegaConf's parser is slow."""
_COST_OF_VALUE = 256
"""What a value counts besides its characters: memory, and the time to replace a reference to it."""
_PLAIN_NUMBER = re.compile(r"[-+]?(0|[1-9]\d*)?(\.\d*)?([eE][-+]?\d+)?")

_Answer = TypeVar("_Answer")


def read_file(
    path: str | os.PathLike[str],
    readers: tuple[Path, ...] = (),
    known: dict[Path, Values] | None = None,
    asked: str = "",
) -> Values:
    """Return the merged settings of a YAML file and its bases, with unresolved variables.

    `readers` are the files of which it is a base, the first one first; `known` holds the settings of files that have
    been read, and gets this one's; `asked` names the file that refers to it, for errors.
    """
    file = Path(local_path(f"{asked}the path of a YAML file", path))
    known = {} if known is None else known
    values = _parsed(file, asked)
    here = Path(os.path.realpath(file))
    chain = (*readers, here)
    if here in readers or len(chain) > _DEEPEST:
        way = brief(" -> ".join(each.name for each in chain))
        what = "is circular" if here in readers else f"is more than {_DEEPEST} files deep"
        raise ConfigError(f"{file}: {_BASE} {what}: {way}.")
    if here in known:
        return known[here]
    bases = values.pop(_BASE, [])
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise ConfigError(f"{file}: {_BASE} must be a file, or a list of files, got {brief(bases)}.")
    for section in values:
        check_section(str(file), section, _BASE)
    found: Values = {}
    for base in bases:
        path = file.parent / local_path(f"{file}: {_BASE}", base)
        found = _over(str(file), found, read_file(path, chain, known, f"{file}: {_BASE}: "))
    known[here] = _over(str(file), found, with_names(values))
    return known[here]


def merged(values: Values, overrides: Overrides) -> Values:
    """Return settings with overrides such as "training.epochs=3"; later ones take precedence."""
    given: Values = {}
    for override in words_of(overrides):
        name, equals, _ = override.partition("=")
        if not equals or not all(name.split(".")) or name != name.strip():
            raise ConfigError(f"an override is name=value, such as training.epochs=3; got {brief([override])[1:-1]}.")
        if re.search(r"\[|\.\d+(\.|$)", name):
            raise ConfigError(f"the override {brief(override)}: replace the whole list, such as model.hidden=[64, 64].")
        check_section("the config", name.split(".")[0])
        source = f"the override {brief(override)}"
        given = _over(source, given, with_names(_parsed_override(source, override)), by_name=False)
    return _over("the overrides", values, given)


def resolved(values: Values, variables: Mapping[str, str], source: str) -> Values:
    """Return settings with variables of the environment and references to other settings replaced."""
    if sum(len(variables.get(name, "")) for name, _ in _VARIABLE.findall(repr(values))) > _LONGEST_BYTES:
        raise ConfigError(f"{source}: the settings are too large: they repeat variables of the environment too often.")
    found = _replaced(values, variables, source, "")
    _library(source, lambda: _check_references(found, source))
    made = _library(source, lambda: OmegaConf.create(found))
    return _library(source, lambda: _container(made, resolve=True))


def _check_references(values: Values, source: str) -> None:
    """Raise a ConfigError if references to settings are not of our form, or make the settings too large."""
    sizes: dict[tuple[Any, ...], int] = {}

    def size(path: tuple[Any, ...]) -> int:
        """Return the characters of a value after the references in it are replaced, and some for the value itself."""
        if path not in sizes:
            sizes[path] = 0  # for a reference to itself, which OmegaConf reports
            value = _value_at(values, path)
            characters = isinstance(value, str) and len(value)
            sizes[path] = _COST_OF_VALUE + characters + sum(map(size, _parts_of(value, path, source)))
        if sizes[path] > _LONGEST_BYTES:
            raise ConfigError(f"{source}: the settings are too large: references such as ${{a.b}} repeat too much.")
        return sizes[path]

    size(())


def _parts_of(value: Any, path: tuple[Any, ...], source: str) -> Iterator[tuple[Any, ...]]:
    """Yield the places of the values in a section or list, or of those to which a text refers."""
    if isinstance(value, Mapping):
        yield from ((*path, name) for name in value)
    if isinstance(value, list):
        yield from ((*path, number) for number in range(len(value)))
    if not isinstance(value, str):
        return
    for _, found, name in _REFERENCE.findall(value):
        if not found:
            raise ConfigError(
                f"{source}: {brief('.'.join(map(str, path)))} is {brief(value)}. Environment variables are in "
                "capitals, such as ${DATA_DIR:./data}; settings have dots, such as ${training.seed}."
            )
        own = name.lstrip(".")
        yield (*path[: len(own) - len(name)], *filter(None, re.split(r"[.\[\]]", own)))


def _value_at(value: Any, path: tuple[Any, ...]) -> Any:
    with contextlib.suppress(LookupError, TypeError, ValueError):
        for name in path:
            index = name
            if isinstance(value, list):
                index = int(name)
            value = value[index]
        return value
    return None


def literal(value: Any) -> Any:
    """Return settings that `resolved` does not change: "${" is escaped."""
    if isinstance(value, Mapping):
        return {name: literal(each) for name, each in value.items()}
    if isinstance(value, list):
        return [literal(each) for each in value]
    # OmegaConf reads a backslash before "${" as an escape, and two as a backslash.
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def to_yaml(values: Values) -> str:
    """Return settings as YAML."""
    return OmegaConf.to_yaml(OmegaConf.create(literal(values)))


def _parsed(file: Path, asked: str) -> Values:
    try:
        text = read_text(file, _LONGEST_BYTES)
    except FileNotFoundError:
        raise ConfigError(f"{asked}{_no_file(file)}") from None
    except OSError as error:
        raise ConfigError(f"{asked}cannot read {brief(str(file))}: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{asked}cannot read {file}: {error}.") from error
    try:
        _library(str(file), lambda: _check_text(str(file), text), text)
        values: Any = _library(str(file), lambda: OmegaConf.create(text), text) if text.strip() else OmegaConf.create()
    except AssertionError:  # a number, say
        values = text.strip()
    if not OmegaConf.is_dict(values):
        shown = OmegaConf.to_container(values) if OmegaConf.is_config(values) else str(values)[:_DEEPEST]
        raise ConfigError(f"{file} must have sections, such as 'training:', got {brief([shown])[1:-1]}.")
    return _container(values)


def _parsed_override(source: str, override: str) -> Values:
    _library(source, lambda: _check_text(source, override.partition("=")[2]), override)
    return _library(source, lambda: _container(OmegaConf.from_dotlist([override])), override)


def _check_text(source: str, text: str) -> None:
    """Raise a ConfigError for YAML that is nested too deep for its parser, too large, and for very long integers."""
    total = 0
    sizes: dict[str | None, int] = {}
    opened: list[tuple[str | None, int]] = []
    for event in yaml.parse(text, _PARSER):
        line = source if event.start_mark is None else f"{source}, line {event.start_mark.line + 1}"
        if isinstance(event, yaml.CollectionStartEvent):
            opened.append((event.anchor, total))
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = opened.pop()
            sizes[anchor] = total - before
        elif isinstance(event, yaml.AliasEvent):
            total += sizes.get(event.anchor, 0)
        elif isinstance(event, yaml.ScalarEvent):
            sizes[event.anchor] = _COST_OF_VALUE * (1 + 4 * event.value.count("${")) + len(event.value)
            if event.value.count("${") > _MOST_REFERENCES:
                raise ConfigError(f"{line}: a value has more than {_MOST_REFERENCES} references such as ${{a.b}}.")
            total += sizes[event.anchor]
        if len(opened) > _DEEPEST:
            raise ConfigError(f"{line}: settings are nested more than {_DEEPEST} deep.")
        if total > _LONGEST_BYTES:
            raise ConfigError(f"{line}: there are too many settings, or aliases (*) repeat them too often.")
        if not isinstance(event, yaml.ScalarEvent) or len(event.value) <= _LONGEST_NUMBER:
            continue
        if event.tag == _INTEGER or (event.implicit[0] and _WHOLE_NUMBER.fullmatch(event.value)):
            raise ConfigError(f"{line}: the number {brief(event.value, 20)} has {len(event.value):,} digits.")


def _no_file(file: Path) -> str:
    """Return an error for a missing file, with the nearest name."""
    try:
        names = {each.stem: each.name for each in sorted(file.parent.iterdir()) if each.suffix in (".yaml", ".yml")}
    except (OSError, ValueError):
        return f"there is no file {file}: the folder {file.parent} does not exist."
    close = difflib.get_close_matches(file.stem, names, n=1, cutoff=0.6)
    if close:
        return f"there is no file {file}. Did you mean {file.parent / names[close[0]]}?"
    there = f" In {file.parent} there are: {shortened(names.values())}." if names else ""
    return f"there is no file {brief(str(file))}.{there}"


def _over(source: str, base: Values, own: Values, *, by_name: bool = True) -> Values:
    """Return `base` overridden by `own`; if `by_name`, a section with another name replaces the whole section."""
    kept = {
        name: value
        for name, value in base.items()
        if not by_name or name not in NAMED or _name_of(own.get(name)) in (None, _name_of(value))
    }
    try:
        return _library(source, lambda: _container(OmegaConf.merge(kept, own)))
    except TypeError as error:
        raise ConfigError(f"{source}: settings do not match the type of what they override: {error}.") from error


def _name_of(section: Any) -> Any:
    return section.get("name") if isinstance(section, Mapping) else None


def _replaced(value: Any, variables: Mapping[str, str], source: str, name: str) -> Any:
    """Return a value with variables of the environment replaced."""
    if isinstance(value, Mapping):
        return {key: _replaced(each, variables, source, f"{name}.{key}".lstrip(".")) for key, each in value.items()}
    if isinstance(value, list):
        return [_replaced(each, variables, source, f"{name}[{index}]") for index, each in enumerate(value)]
    if not isinstance(value, str):
        return value

    def replacement(match: re.Match[str]) -> str:
        variable, default = match.groups()
        if _SECRET.fullmatch(variable):
            raise ConfigError(
                f"{source}: {brief(name)} is {brief(value)}: settings are printed and kept in checkpoints, which must "
                f"not have a secret. Read {brief(variable, 50)} in your own code, from os.environ."
            )
        text = variables.get(variable) or default
        if text is None:
            raise ConfigError(
                f"{source}: {brief(name)} is {brief(value)}, but the environment has no {brief(variable, 50)}: set it, "
                f"or write a default, as in ${{{brief(variable, 50)}:...}}."
            )
        return str(literal(text))

    text = _VARIABLE.sub(replacement, value)
    # A variable that is the whole value is parsed as YAML, so that numbers are numbers.
    return _scalar(text) if _VARIABLE.fullmatch(value) else text


def _scalar(text: str) -> Any:
    try:
        value = _parsed_override("the environment", f"value={text}")["value"]
    except ConfigError:
        return text
    # Not 0123, which YAML reads in base 8, and 1:30, in base 60.
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return text if is_number and not _PLAIN_NUMBER.fullmatch(text.strip()) else value


def _container(values: Any, *, resolve: bool = False) -> Values:
    found = OmegaConf.to_container(values, resolve=resolve)
    assert isinstance(found, dict)
    return {str(name): value for name, value in found.items()}


def _library(source: str, call: Callable[[], _Answer], text: str = "") -> _Answer:
    """Call a library, and raise a ConfigError of one line, naming `source`, for most of its errors."""
    try:
        return call()
    except (AssertionError, ConfigError, TypeError):
        raise
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = "" if mark is None else f", line {mark.line + 1}"
        problem = brief(str(error.problem or error.context))
        hint = _hint(problem, text, 0 if mark is None else mark.line)
        raise ConfigError(f"{source}{line}: this is not valid YAML: {problem}{hint}.") from error
    except OmegaConfBaseException as error:
        where = f" (in {brief(error.full_key)})" if error.full_key else ""
        raise ConfigError(f"{source}: {_first_line(error)}{where}.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: this is not valid YAML: {_first_line(error)}.") from error
    except Exception as error:  # Python's own errors for YAML's numbers and dates
        raise ConfigError(f"{source}: a value cannot be read: {_first_line(error)}.") from error


def _first_line(error: Exception) -> str:
    return brief(next(iter(str(error).splitlines()), type(error).__name__)).rstrip(".")


def _hint(problem: str, text: str, number: int) -> str:
    """Return a hint at the usual mistake in a line of YAML."""
    lines = text.splitlines()
    line = "\n".join(lines[max(number - 1, 0) : number + 1])
    if "\t" in line:
        return ": it has a tab; YAML indents with spaces"
    if "${" in line and line.count("{") > line.count("${"):
        return ': within { } write "${...}" in quotes'
    return ": check the indentation" if "mapping values" in problem or "block" in problem else ""
