"""Read settings from YAML: bases, overrides, variables. OmegaConf parses, merges and resolves."""

from __future__ import annotations

import contextlib
import difflib
import os
import posixpath
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from cyxtrain.checkpoint.remote_files import read_text_of
from cyxtrain.config.settings import is_number
from cyxtrain.environment.regular_files import path_or_url, url_of
from cyxtrain.errors import ConfigError, brief, shortened
from cyxtrain.experiment.by_name import NAMED, Overrides, Values, check_section, override_strings, with_names

_BASE = "_base_"
_LONGEST_BYTES = 1 << 24
_DEEPEST = 32
# Characters of an integer; in base 2, 64 bits need about as many.
_LONGEST_NUMBER = 70
_WHOLE_NUMBER = re.compile(r"[-+]?(0x[0-9a-fA-F_]+|0b[01_]+|[0-9_]+(:[0-5]?[0-9])*)")
_INTEGER = "tag:yaml.org,2002:int"
_PARSER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the fast one is not always built
_VARIABLE = re.compile(r"(?<!\\)\$\{([A-Z_][A-Z0-9_]*)(?::([^{}]*))?\}")
_SECRET = re.compile(".*(SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL).*|(.*_)?(API|ACCESS|PRIVATE)?(KEY|TOKEN)S?")
_REFERENCE = re.compile(r"(?<!\\)(\\\\)*\$\{(([^{}$:]{1,200})\})?")
# In one value; OmegaConf's parser is slow.
_MOST_REFERENCES = 256
# Characters that each value counts in addition to its own: for memory, and the time to replace references.
_COST_OF_VALUE = 256
_PLAIN_NUMBER = re.compile(r"[-+]?(0|[1-9]\d*)?(\.\d*)?([eE][-+]?\d+)?")


def read_file(
    path: str | os.PathLike[str],
    readers: tuple[str, ...] = (),
    known: dict[str, Values] | None = None,
    prefix: str = "",
) -> Values:
    """Return the merged settings of a YAML file, which may be a URL, and its bases, with unresolved variables.

    `readers` are the files that inherit from it, the first one first; `known` holds the settings of files that have
    been read, and receives this one's; `prefix` begins its error messages.
    """
    file = path_or_url(f"{prefix}the path of a YAML file", path)
    if not url_of(file):
        file = str(Path(file))  # for messages: without "./"
    if known is None:
        known = {}
    values = _parsed(file, prefix)
    here = url_of(file) or os.path.realpath(file)
    chain = (*readers, here)
    if here in readers or len(chain) > _DEEPEST:
        problem = "is circular" if here in readers else f"is more than {_DEEPEST} files deep"
        names = brief(" -> ".join(map(os.path.basename, chain)))
        raise ConfigError(f"{file}: {_BASE} {problem}: {names}.")
    if here in known:
        return known[here]
    bases = _pop_bases(values, file)
    for section in values:
        check_section(file, section, _BASE)
    inherited: Values = {}
    for base in bases:
        path = _beside(file, path_or_url(f"{file}: {_BASE}", base))
        inherited = _over(file, inherited, read_file(path, chain, known, f"{file}: {_BASE}: "))
    known[here] = _over(file, inherited, with_names(values))
    return known[here]


def _beside(file: str, base: str) -> str:
    """Return the path or URL of a base, which is relative to the file that names it."""
    if url_of(base) or os.path.isabs(base):
        return base
    if not url_of(file):
        return os.path.join(os.path.dirname(file), base)
    scheme, separator, place = file.partition("://")
    # Stores do not resolve "..".
    return scheme + separator + posixpath.normpath(posixpath.join(posixpath.dirname(place), base))


def _pop_bases(values: Values, file: str) -> list[str]:
    """Remove the names of a file's bases from its settings, and return them."""
    bases = values.pop(_BASE, [])
    if isinstance(bases, str):
        return [bases]
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise ConfigError(f"{file}: {_BASE} must be a file, or a list of files, got {brief(bases)}.")
    return bases


def merged(values: Values, overrides: Overrides) -> Values:
    """Return settings with overrides such as "training.epochs=3"; later ones take precedence."""
    given: Values = {}
    for override in override_strings(overrides):
        name, equals, _ = override.partition("=")
        if not equals or not all(name.split(".")) or name != name.strip():
            raise ConfigError(f"an override is name=value, such as training.epochs=3; got {_quoted(override)}.")
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
    with _short_errors(source):
        _check_references(found, source)
        return _container(OmegaConf.create(found), resolve=True)


def _check_references(values: Values, source: str) -> None:
    """Raise a ConfigError if references to settings are not of our form, or make the settings too large."""
    sizes: dict[tuple[Any, ...], int] = {}

    def size(path: tuple[Any, ...]) -> int:
        """Return what a value costs after the references in it are replaced, in characters."""
        if path not in sizes:
            sizes[path] = 0  # for a reference to itself, which OmegaConf reports
            value = _value_at(values, path)
            total = _COST_OF_VALUE + sum(map(size, _parts_of(value, path, source)))
            if isinstance(value, str):
                total += len(value)
            sizes[path] = total
        if sizes[path] > _LONGEST_BYTES:
            raise ConfigError(f"{source}: the settings are too large: references such as ${{a.b}} repeat too much.")
        return sizes[path]

    size(())


def _parts_of(value: Any, path: tuple[Any, ...], source: str) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of the values in a section or list, or of the settings to which a string refers."""
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
        # A reference with dots before its name is relative: one dot is the section of the setting.
        num_dots = len(name) - len(name.lstrip("."))
        section = path[:-num_dots] if num_dots else ()
        yield (*section, *filter(None, re.split(r"[.\[\]]", name)))


def _value_at(value: Any, path: tuple[Any, ...]) -> Any:
    with contextlib.suppress(LookupError, TypeError, ValueError):  # there is no such setting
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
    if isinstance(value, str):
        # OmegaConf reads a backslash before "${" as an escape, and two as a backslash.
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    return value


def to_yaml(values: Values) -> str:
    """Return settings as YAML."""
    return OmegaConf.to_yaml(OmegaConf.create(literal(values)))


def _parsed(file: str, prefix: str) -> Values:
    try:
        text = read_text_of(file, _LONGEST_BYTES)
    except FileNotFoundError:
        raise ConfigError(f"{prefix}{_no_file(file)}") from None
    except OSError as error:
        raise ConfigError(f"{prefix}cannot read {brief(file)}: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{prefix}cannot read {file}: {error}.") from error
    values: Any = OmegaConf.create()
    try:
        with _short_errors(file, text):
            # Before OmegaConf, which has no limits, and repeats what aliases refer to.
            _check_yaml(file, text)
            if text.strip():
                values = OmegaConf.create(text)
    except AssertionError:  # such as a number
        values = text.strip()
    if not OmegaConf.is_dict(values):
        shown = OmegaConf.to_container(values) if OmegaConf.is_config(values) else str(values)[:_DEEPEST]
        raise ConfigError(f"{file} must have sections, such as 'training:', got {_quoted(shown)}.")
    return _container(values)


def _parsed_override(source: str, override: str) -> Values:
    with _short_errors(source, override):
        _check_yaml(source, override.partition("=")[2])
        return _container(OmegaConf.from_dotlist([override]))


class _YamlSize:
    """The depth and size of YAML while it is parsed; an alias (*) counts like the values that it repeats."""

    def __init__(self) -> None:
        self.total = 0
        self._open: list[tuple[str | None, int]] = []
        """(anchor, total before it) of each collection that has not ended."""
        self._anchored: dict[str | None, int] = {}

    @property
    def depth(self) -> int:
        return len(self._open)

    def add(self, event: yaml.Event) -> None:
        """Count an event of the parser."""
        if isinstance(event, yaml.CollectionStartEvent):
            self._open.append((event.anchor, self.total))
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = self._open.pop()
            self._anchored[anchor] = self.total - before
        elif isinstance(event, yaml.AliasEvent):
            self.total += self._anchored.get(event.anchor, 0)
        elif isinstance(event, yaml.ScalarEvent):
            # OmegaConf's parser is slow: a reference costs as much as several values.
            size = _COST_OF_VALUE * (1 + 4 * event.value.count("${")) + len(event.value)
            self._anchored[event.anchor] = size
            self.total += size


def _check_yaml(source: str, text: str) -> None:
    """Refuse YAML that is nested too deep for its parser, too large, or has a very long integer."""
    size = _YamlSize()
    for event in yaml.parse(text, _PARSER):
        size.add(event)
        problem = _problem_of(event, size)
        if problem:
            line = "" if event.start_mark is None else f", line {event.start_mark.line + 1}"
            raise ConfigError(f"{source}{line}: {problem}.")


def _problem_of(event: yaml.Event, size: _YamlSize) -> str:
    """Return why YAML is refused at an event of the parser; "": it is not."""
    if isinstance(event, yaml.ScalarEvent) and event.value.count("${") > _MOST_REFERENCES:
        return f"a value has more than {_MOST_REFERENCES} references such as ${{a.b}}"
    if size.depth > _DEEPEST:
        return f"settings are nested more than {_DEEPEST} deep"
    if size.total > _LONGEST_BYTES:
        return "there are too many settings, or aliases (*) repeat them too often"
    if isinstance(event, yaml.ScalarEvent) and len(event.value) > _LONGEST_NUMBER and _is_integer(event):
        return f"the number {brief(event.value, 20)} has {len(event.value):,} digits"
    return ""


def _is_integer(event: yaml.ScalarEvent) -> bool:
    if event.tag == _INTEGER:
        return True
    return bool(event.implicit[0] and _WHOLE_NUMBER.fullmatch(event.value))


def _quoted(value: Any) -> str:
    return brief([value])[1:-1]  # `brief` leaves out the quotes of a string


def _no_file(path: str) -> str:
    if url_of(path):
        return f"there is no file {path}. Check the URL."
    file = Path(path)
    try:
        names = {each.stem: each.name for each in sorted(file.parent.iterdir()) if each.suffix in (".yaml", ".yml")}
    except (OSError, ValueError):
        return f"there is no file {file}: the folder {file.parent} does not exist."
    close = difflib.get_close_matches(file.stem, names, n=1, cutoff=0.6)
    if close:
        return f"there is no file {file}. Did you mean {file.parent / names[close[0]]}?"
    message = f"there is no file {brief(str(file))}."
    if names:
        message += f" In {file.parent} there are: {shortened(names.values())}."
    return message


def _over(source: str, base: Values, own: Values, *, by_name: bool = True) -> Values:
    """Return `base` overridden by `own`; if `by_name`, another name in a section replaces all of it."""
    kept = base
    if by_name:
        kept = {name: value for name, value in base.items() if not _is_replaced(name, value, own)}
    try:
        with _short_errors(source):
            return _container(OmegaConf.merge(kept, own))
    except TypeError as error:
        raise ConfigError(f"{source}: settings do not match the type of what they override: {error}.") from error


def _is_replaced(section: str, value: Any, own: Values) -> bool:
    """Return whether `own` has a different name in this section, so that `value` does not belong to it."""
    name = _name_of(own.get(section))
    return section in NAMED and name is not None and name != _name_of(value)


def _name_of(section: Any) -> Any:
    return section.get("name") if isinstance(section, Mapping) else None


def _replaced(value: Any, variables: Mapping[str, str], source: str, name: str) -> Any:
    """Return a value with variables of the environment replaced."""
    if isinstance(value, Mapping):
        return {key: _replaced(each, variables, source, f"{name}.{key}".lstrip(".")) for key, each in value.items()}
    if isinstance(value, list):
        return [_replaced(each, variables, source, f"{name}[{index}]") for index, each in enumerate(value)]
    if not isinstance(value, str) or not _VARIABLE.search(value):
        return value
    setting = f"{source}: {brief(name)} is {brief(value)}"
    text = _VARIABLE.sub(lambda match: _value_of(match, variables, setting), value)
    # A variable that is the whole value is parsed as YAML, so that numbers are numbers.
    return _scalar(text) if _VARIABLE.fullmatch(value) else text


def _value_of(match: re.Match[str], variables: Mapping[str, str], setting: str) -> str:
    """Return the value of a variable, or its default; `setting`, which refers to it, begins the errors."""
    variable, default = match.groups()
    shown = brief(variable, 50)
    if _SECRET.fullmatch(variable):
        raise ConfigError(
            f"{setting}: settings are printed and kept in checkpoints, which must not have a secret. Read {shown} in "
            "your own code, from os.environ."
        )
    text = variables.get(variable) or default
    if text is None:
        raise ConfigError(
            f"{setting}, but the environment has no {shown}: set it, or write a default, as in ${{{shown}:...}}."
        )
    return str(literal(text))


def _scalar(text: str) -> Any:
    try:
        value = _parsed_override("the environment", f"value={text}")["value"]
    except ConfigError:
        return text
    # Not 0123, which YAML reads in base 8, and 1:30, in base 60.
    if is_number(value) and not _PLAIN_NUMBER.fullmatch(text.strip()):
        return text
    return value


def _container(values: Any, *, resolve: bool = False) -> Values:
    found = OmegaConf.to_container(values, resolve=resolve)
    assert isinstance(found, dict)
    return {str(name): value for name, value in found.items()}


@contextlib.contextmanager
def _short_errors(source: str, text: str = "") -> Iterator[None]:
    """Raise a ConfigError of one line, naming `source`, for most errors of the YAML libraries."""
    try:
        yield
    except (AssertionError, ConfigError, TypeError):
        raise
    except yaml.MarkedYAMLError as error:
        problem = brief(str(error.problem or error.context))
        line = ""
        number = 0
        if error.problem_mark is not None:
            number = error.problem_mark.line
            line = f", line {number + 1}"
        raise ConfigError(
            f"{source}{line}: this is not valid YAML: {problem}{_hint(problem, text, number)}."
        ) from error
    except OmegaConfBaseException as error:
        key = f" (in {brief(error.full_key)})" if error.full_key else ""
        raise ConfigError(f"{source}: {_first_line(error)}{key}.") from error
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
