"""Settings as dataclasses with documented fields, and checks of their values.

A name that does not exist is refused at once, with the name that was meant (`other_names.py`), or the nearest one.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import difflib
import functools
import inspect
import itertools
import math
import textwrap
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from typing_extensions import TypeIs, dataclass_transform

from cyxtrain.config.other_names import meanings
from cyxtrain.errors import ConfigError

_Settings = TypeVar("_Settings")
_Function = TypeVar("_Function", bound=Callable[..., Any])
Rules = Mapping[str, tuple[str, Callable[[Any], bool]]]

_FIELDS: dict[str, list[str]] = {
    "DistributedTrainer": [
        *("loss_fn", "optimizer", "optimizers", "loss_weights", "metrics"),
        *("scheduler", "schedulers", "scheduler_interval", "ddp_config", "device"),
        *("train_step", "test_step", "predict_step"),
    ],
    "fit": [
        *("validation_data", "validation_groups", "group_by_length", "sample_weight"),
        *("class_weight", "callbacks", "initial_epoch", "resume"),
    ],
}
"""The arguments of the trainer and of `fit`, and the fields of every class of settings."""
_PLACES = {
    "DistributedTrainer": "DistributedTrainer({}=...)",
    "fit": "fit({}=...)",
    "DDPConfig": "DistributedTrainer(ddp_config=cx.DDPConfig({}=...))",
    "AMPConfig": "fit(amp=cx.AMPConfig({}=...))",
    "DistributedConfig": "cx.init(cx.DistributedConfig({}=...))",
    "DistributedTrainingConfig": "fit({}=...)",
}
"""How a user sets them."""


def unknown_name(owner: str, name: str, known: list[str], what: str = "field") -> ConfigError:
    """Return the error for a name that does not exist, with what was meant."""
    places = _other_places(owner)
    kind = "argument" if owner in _FIELDS else what
    is_meant = any(meant in known for meant, _ in meanings(name, kind, known))
    if name in places and name not in known and not is_meant:
        return ConfigError(f"{owner} has no {what} '{name}': it belongs to {places[name]}.")
    if kind != "argument":
        places = {}
    return ConfigError(f"{owner} has no {what} '{name}'. {nearest(name, known, kind, places)}")


def _other_places(owner: str) -> dict[str, str]:
    """Return how a user sets each argument of the other calls; the first of `_PLACES` takes precedence."""
    places: dict[str, str] = {}
    for other, form in _PLACES.items():
        if other != owner:
            for field in _FIELDS[other]:
                places.setdefault(field, form.format(field))
    return places


def check_attribute(name: str, has: list[str]) -> None:
    """Refuse an attribute of the trainer that nothing would use: a setting, or another library's name."""
    known = [each for each in has if not each.startswith("_")]
    is_setting = any(name in fields for fields in _FIELDS.values())
    if name not in known and (is_setting or any(meanings(name, "attribute", known))):
        raise unknown_name("the trainer", name, known, "attribute")


def nearest(name: str, known: list[str], what: str = "setting", places: Mapping[str, str] = {}) -> str:
    """Return a sentence with the meaning of a name, the known name of similar spelling, or all names.

    `what` is their kind, as for `meanings`; `places` tells how to set arguments of other calls.
    """
    if not known:
        return "It has none."
    found = [*meanings(name, what, known)]
    for meant, remark in found:
        if meant in known:
            return f"Did you mean '{meant}'? {remark}".rstrip()
    for meant, remark in found:
        if not meant:
            return remark
        if meant in places:
            return f"Did you mean {places[meant]}? {remark}".rstrip()
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"Did you mean '{close[0]}'?" if close else f"Known: {', '.join(sorted(known))}."


class _DocumentedFields:
    """A docstring with the docstrings of the fields, for `help`; assembled when it is read."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __get__(self, _: object, owner: type) -> str:
        body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
        assert isinstance(body, ast.ClassDef)
        lines = [self._text, "", "Fields:"]
        for field, under in itertools.pairwise(body.body):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(under, ast.Expr)
                and isinstance(under.value, ast.Constant)
            ):
                lines.append(f"    {ast.unparse(field)}")
                lines += [f"        {line.strip()}" for line in str(under.value.value).splitlines()]
        return "\n".join(lines)


@dataclass_transform()
def settings(cls: type[_Settings]) -> type[_Settings]:
    """Make a dataclass that refuses unknown names with the nearest one."""
    made: Any = dataclass(cls)
    known = [field.name for field in dataclasses.fields(made)]
    _FIELDS[cls.__name__] = known

    def assign(self: Any, name: str, value: Any) -> None:
        if name not in known:
            raise unknown_name(cls.__name__, name, known)
        if isinstance(value, np.generic):  # JSON knows only Python's numbers
            value = value.item()
        object.__setattr__(self, name, value)

    made.__init__ = names_checked(made.__init__, "field")
    made.__setattr__ = assign
    made.__doc__ = _DocumentedFields(made.__doc__)
    return cls


def check_arguments(owner: str, function: Callable[..., Any], given: Mapping[str, Any], taken: int = 0) -> None:
    """Refuse settings that a class or a function does not take, or too few of them."""
    try:
        parameters = list(inspect.signature(function).parameters.values())[taken:]
    except ValueError:  # some functions of C have no signature
        return
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return  # it takes any name
    named = {each.name: each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
    for name in given:
        if name not in named:
            raise unknown_name(owner, name, list(named), "setting")
    missing = [name for name, each in named.items() if each.default is each.empty and name not in given]
    require(not missing, f"{owner} needs {' and '.join(missing)}.")


def _default(function: Callable[..., Any], name: str) -> Any:
    with contextlib.suppress(ValueError, KeyError):  # a builtin has no signature; or it has no such parameter
        return inspect.signature(function).parameters[name].default
    return None


def make(owner: str, maker: Callable[..., Any], given: Mapping[str, Any], *first: Any) -> Any:
    """Call a class or function with settings, after the arguments `first`; errors name the `owner`."""
    check_arguments(owner, maker, given, len(first))
    try:
        return maker(*first, **given)
    except ConfigError:
        raise
    except (TypeError, ValueError, RuntimeError, AttributeError, KeyError, OSError) as error:
        for name, value in given.items():
            is_wrong = isinstance(value, str) and is_number(_default(maker, name))
            require(not is_wrong, f"{owner}: {name} must be a number, got {value!r} (a string).")
        with_settings = f" with {dict(given)}" if given else ""
        raise ConfigError(f"{owner} cannot be created{with_settings}: {error}") from error


def takes(function: Callable[..., Any], count: int) -> bool:
    """Return whether a function takes so many positional arguments; True for C without a signature."""
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    except ValueError:
        return True
    return True


def names_checked(target: _Function, what: str = "argument") -> _Function:
    """Let a function, or a class's public methods, refuse unknown arguments and too many, with a hint."""
    if isinstance(target, type):
        _check_names_in_methods(target)
        return target
    parameters = [*inspect.signature(target).parameters.values()]
    kinds = {each.kind for each in parameters}
    if inspect.Parameter.VAR_KEYWORD in kinds:
        return target
    num_bound = 1 if parameters and parameters[0].name in ("self", "cls") else 0
    parameters = parameters[num_bound:]
    known = [each.name for each in parameters]
    by_position = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    most = math.inf if inspect.Parameter.VAR_POSITIONAL in kinds else len(by_position)
    owner = target.__qualname__.removesuffix(".__init__").rpartition(".")[2]

    @functools.wraps(target)
    def call(*arguments: Any, **named: Any) -> Any:
        __tracebackhide__ = True  # pytest does not show this frame
        count = len(arguments) - num_bound
        if count > most:
            raise _too_many(owner, count, by_position, known)
        for name in named:
            if name not in known:
                raise unknown_name(owner, name, known, what)
        return target(*arguments, **named)

    return call  # type: ignore[return-value]


def _check_names_in_methods(cls: type) -> None:
    for name, method in [*vars(cls).items()]:
        if name.startswith("_") and name != "__init__":
            continue
        if isinstance(method, classmethod):
            setattr(cls, name, classmethod(names_checked(method.__func__)))
        elif inspect.isfunction(method):
            setattr(cls, name, names_checked(method))


def _too_many(owner: str, count: int, by_position: list[str], known: list[str]) -> ConfigError:
    hint = ""
    if by_position == ["X"]:  # predict, given targets as for fit
        hint = f" y: {nearest('y', known, 'argument')}"
    return ConfigError(
        f"{owner} takes {', '.join(by_position) or 'nothing'} by position, and got {count} arguments: name the others."
        f"{hint}"
    )


def require(condition: bool, message: str) -> None:
    """Raise `ConfigError(message)` unless the condition holds."""
    if not condition:
        raise ConfigError(message)


def require_constructed(is_constructed: bool, instance: object, base: str) -> None:
    """Refuse an object of a user's class whose __init__ has not called the __init__ of our class `base`."""
    name = type(instance).__name__
    require(
        is_constructed,
        f"{name} has an __init__ that does not call {base}'s, which sets what {base} needs: call super().__init__(...) "
        f"first in {name}.__init__, with the arguments of {base}.",
    )


def require_integer(owner: str, name: str, value: object, minimum: int) -> None:
    """Refuse a value that is not a whole number of at least `minimum`, such as True and 2.0."""
    right = isinstance(value, int) and not isinstance(value, bool) and value >= minimum
    require(right, f"{owner}.{name} must be a whole number of at least {minimum}, got {value!r}.")


def is_number(value: object) -> TypeIs[int | float]:
    """Return whether a value is a number; True is not one."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def require_boolean(owner: str, name: str, value: object) -> None:
    """Refuse a value that is not True or False."""
    require(isinstance(value, bool), f"{owner}.{name} must be True or False, got {value!r}.")


def check_fields(
    given: Any, rules: Rules, *, positive: Collection[str] = (), theirs: Mapping[str, Mapping[str, str]] = {}
) -> None:
    """Refuse invalid values of settings, whose annotations are strings; None only if the type has it.

    Args:
        given: The settings.
        rules: By field, what it must be: for the error, and as a condition. Others are checked by type: bool, int and
            Literal.
        positive: The whole numbers that must be at least 1; others may be 0.
        theirs: By field, what other libraries call its values.
    """
    owner = type(given).__name__
    for field in dataclasses.fields(given):
        name = field.name
        value = getattr(given, name)
        kind = field.type.removesuffix(" | None")
        is_optional = kind != field.type
        if value is None and is_optional:
            continue
        if name in rules:
            must_be, holds = rules[name]
            require(holds(value), f"{owner}.{name} must be {must_be}, got {value!r}.")
        elif kind == "bool":
            require_boolean(owner, name, value)
        elif kind == "int":
            minimum = 1 if name in positive else 0
            require_integer(owner, name, value, minimum)
        elif kind.startswith("Literal"):
            choices = (*ast.literal_eval(kind.removeprefix("Literal")),)
            if is_optional:
                choices = (None, *choices)
            require_choice(owner, name, value, choices, theirs.get(name))


def require_choice(
    owner: str, name: str, value: object, choices: tuple[object, ...], theirs: Mapping[str, str] | None = None
) -> None:
    """Refuse a value that is none of the choices, with the choice that another library's name means."""
    meant = (theirs or {}).get(str(value).lower().removeprefix("torch."))
    hint = f" Did you mean {meant!r}?" if meant else ""
    require(value in choices, f"{owner}.{name} must be one of {choices}, got {value!r}.{hint}")
