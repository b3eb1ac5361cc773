"""Send errors from a worker to the notebook: with their class, rank and traceback."""

from __future__ import annotations

import contextlib
import linecache
import os
import re
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cyxtrain.errors import BLAMING_ANOTHER, CyxtrainError, DistributedTrainingError, prepare_to_raise
from cyxtrain.notebook.sharing import as_bytes, from_bytes, returning

# Frames of these files before the user's code are left out of tracebacks.
_LIBRARIES = (f"{Path(__file__).parents[1]}{os.sep}", f"{Path(torch.__file__).parent}{os.sep}", contextlib.__file__)


@dataclass(frozen=True)
class Failed:
    """An error of one rank."""

    error: bytes | None
    """Pickled (class, arguments, attributes); None if they cannot be pickled."""
    name: str
    message: str
    text: str
    """The traceback of the user's code."""
    is_own: bool
    """Whether this rank caused it, not another one."""
    about: int | None
    """The rank that it names."""

    @classmethod
    def of(cls, error: BaseException, known: Mapping[str, Any] | None = None) -> Failed:
        """Return an error in a form that can be sent; `known` is what the receiver has."""
        return cls(
            error=_pickled(error, known or {}),
            name=type(error).__name__,
            message=str(error),
            text=_traceback_of(error),
            is_own=not isinstance(error, BLAMING_ANOTHER),
            about=error.rank if isinstance(error, CyxtrainError) else None,
        )


def _pickled(error: BaseException, known: Mapping[str, Any]) -> bytes | None:
    """Pickle an error, without its attributes if they cannot be pickled; return None if nothing can."""
    for attributes in (vars(error), {}):
        with contextlib.suppress(Exception):
            return as_bytes((type(error), error.args, attributes), returning(known))
    return None


def _traceback_of(error: BaseException) -> str:
    """Return the traceback of an error and of its causes, without frames before the user's code.

    An error of this package that no user code led to needs none: its message says everything.
    """
    links: list[str] = []
    link: BaseException | None = error
    while link is not None:
        place = link.__traceback__
        while place is not None and place.tb_frame.f_code.co_filename.startswith(_LIBRARIES):
            place = place.tb_next
        if place is not None:
            links.append("".join(traceback.format_exception(type(link), link, place, chain=False)))
        cause = link.__cause__
        if cause is None and not link.__suppress_context__:
            cause = link.__context__
        link = cause
    if not links and not isinstance(error, CyxtrainError):
        return "".join(traceback.format_exception(error))
    return "\nwhich led to:\n".join(reversed(links))


def raised(failed: Failed, rank: int, num_ranks: int, known: Mapping[str, Any] | None = None) -> BaseException:
    """Return a worker's error as an exception of the same class, with its traceback as the cause."""
    try:
        kind, arguments, attributes = from_bytes(failed.error or b"", known)
        # A class's __init__ may take other arguments than it passes to Exception's.
        error: BaseException = kind(*arguments) if kind.__module__ == "builtins" else kind.__new__(kind, *arguments)
        vars(error).update(attributes)
        prepare_to_raise()
    except Exception:  # this process cannot rebuild it
        error = DistributedTrainingError(f"rank {rank} has failed: {failed.name}: {failed.message}", rank=rank)
    where = f"on rank {rank} of {num_ranks}"
    if sys.version_info >= (3, 11):
        error.add_note(f"({where}, in a worker process)")
    if failed.text:
        error.__cause__ = WorkerTraceback(f"{where}:\n{_with_sources(failed.text)}")
    return error


class WorkerTraceback(Exception):  # noqa: N818 - a cause that only carries text
    """Where in a worker an error was raised."""

    def __str__(self) -> str:
        return f'\n"""\n{super().__str__()}"""'


def _with_sources(text: str) -> str:
    """Return a traceback with the source lines of notebook cells, which a worker does not have."""
    lines = text.splitlines()
    found = []
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        found.append(line)
        place = re.fullmatch(r'  File "(.+)", line (\d+), in .+', line)
        if place and not following.startswith("    "):
            source = linecache.getline(place[1], int(place[2])).strip()
            if source:
                found.append(f"    {source}")
    return "\n".join(found) + "\n"
