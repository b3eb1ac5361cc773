"""Which cases of a test are nightly: `by_night` marks a value, `nightly_where` combinations; and what they need."""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest

Test = TypeVar("Test", bound=Callable[..., Any])
needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", "cl"))), reason="there is no C++ compiler"
)


def by_night(*values: object, id: str | None = None) -> Any:
    """Return the values of a test's parameters, marked as nightly."""
    return pytest.param(*values, id=id, marks=pytest.mark.nightly)


def nightly_where(is_nightly: Callable[..., bool]) -> Callable[[Test], Test]:
    """Mark those cases of a test as nightly for which a function of some of its parameters, by name, returns true."""

    def decorate(test: Test) -> Test:
        vars(test)["is_nightly"] = is_nightly
        return test

    return decorate


def mark_nightly_cases(cases: Sequence[pytest.Function]) -> None:
    """Do what `nightly_where` asks for all cases of one test.

    Raises:
        pytest.Collector.CollectError: It would mark no case, or leave none for the day.
    """
    is_nightly = getattr(cases[0].function, "is_nightly", None)
    if is_nightly is None:
        return
    daily = [case for case in cases if case.get_closest_marker("nightly") is None]
    marked = [case for case in daily if is_nightly(**_arguments_of(is_nightly, case))]
    if not 0 < len(marked) < len(daily):
        raise pytest.Collector.CollectError(
            f"nightly_where marks {len(marked)} of {len(daily)} daily cases of {cases[0].originalname}"
        )
    for case in marked:
        case.add_marker(pytest.mark.nightly)


def _arguments_of(function: Callable[..., Any], case: pytest.Function) -> dict[str, Any]:
    return {name: case.callspec.params[name] for name in inspect.signature(function).parameters}
