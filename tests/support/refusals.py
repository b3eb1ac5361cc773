"""What calls are refused with and what they warn of: tables of calls, and the texts of errors and warnings."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fitting import one_process

import cyxtrain as cx


def refuses(*cases: tuple[Callable[[], object], str], error: type[Exception] = cx.ConfigError) -> Callable[..., None]:
    """Return a test that makes calls in a world of one process, each of which is refused.

    Args:
        *cases: A call, and a regular expression for its error's message.
        error: The class of the errors.
    """

    @pytest.mark.parametrize(("call", "words"), cases, ids=[words for _, words in cases])
    def test(call: Callable[[], object], words: str) -> None:
        with one_process(), pytest.raises(error, match=words):
            call()

    return test


def refusal(
    call: Callable[..., object], *arguments: Any, error: type[Exception] = cx.ConfigError, **keywords: Any
) -> str:
    """Return the message of the error that a call must raise."""
    with pytest.raises(error) as caught:
        call(*arguments, **keywords)
    return str(caught.value)


def ending(call: Callable[..., object], *arguments: Any, **keywords: Any) -> str:
    """Return the class and the message of the error that a call raises, or "returned" and its result."""
    try:
        return f"returned {call(*arguments, **keywords)}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def warning_texts() -> Iterator[list[str]]:
    """Record the texts of the warnings in a block; the list is filled at its end, also by an error."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield texts
        finally:
            texts += [str(each.message) for each in caught]
