"""Errors on their way from a worker to whoever called: as themselves, with their rank and where they came about."""

from __future__ import annotations

import contextlib
import linecache
import os
import re
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

from cyxtrain.errors import BLAMING_ANOTHER, CyxtrainError, DistributedTrainingError
from cyxtrain.notebook.sharing import as_bytes, from_bytes, returning

_LIBRARIES = (f"{Path(__file__).parents[1]}{os.sep}", f"{Path(torch.__file__).parent}{os.sep}", contextlib.__file__)
"""What leads to the user's code, in a traceback."""


@dataclass(frozen=True)
class Failed:
    """An error of one rank.

    Attributes:
        error: (class, arguments, attributes) of the exception, pickled; None: they cannot be.
        name: Of its class.
        message: What it says.
        text: Its traceback, as far as it is of the user's code.
        is_own: Whether it came about here, not because of another rank.
        about: The rank that it says it is about, or None.
    """

    error: bytes | None
    name: str
    message: str
    text: str
    is_own: bool
    about: int | None

    @classmethod
    def of(cls, error: BaseException) -> Failed:
        """Returns what travels of an error."""
        pickled = None
        for attributes in (vars(error), {}):
            try:
                pickled = pickled or as_bytes((type(error), error.args, attributes), returning({}))
            except Exception:
                continue
        about = error.rank if isinstance(error, CyxtrainError) else None
        return cls(
            pickled, type(error).__name__, str(error), _told(error), not isinstance(error, BLAMING_ANOTHER), about
        )


def _told(error: BaseException) -> str:
    """Returns the traceback of an error and of those that led to it, without what is not the user's code.

    An error of ours that no code of the user's led to says all that there is to say.
    """
    links: list[str] = []
    link: BaseException | None = error
    while link is not None:
        place = _from_users_code(link.__traceback__)
        if place is not None:
            links.append("".join(traceback.format_exception(type(link), link, place, chain=False)))
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    if not links and not isinstance(error, CyxtrainError):
        return "".join(traceback.format_exception(error))
    return "\nwhich led to:\n".join(reversed(links))


def _from_users_code(found: TracebackType | None) -> TracebackType | None:
    """Returns a traceback from the first frame on that is not in this package or in PyTorch; None: all are."""
    while found is not None and found.tb_frame.f_code.co_filename.startswith(_LIBRARIES):
        found = found.tb_next
    return found


def raised(failed: Failed, rank: int, num_ranks: int) -> BaseException:
    """Returns an error of a worker's as itself, with the traceback that it had over there."""
    try:
        kind, arguments, attributes = from_bytes(failed.error or b"")
        # Its own __init__ may want other arguments than it passes on.
        error: BaseException = kind(*arguments) if kind.__module__ == "builtins" else kind.__new__(kind, *arguments)
        vars(error).update(attributes)
    except Exception:
        error = DistributedTrainingError(f"rank {rank} has failed: {failed.name}: {failed.message}", rank=rank)
    where = f"on rank {rank} of {num_ranks}"
    if sys.version_info >= (3, 11):
        error.add_note(f"({where}, in a worker process)")
    if failed.text:
        error.__cause__ = WorkerTraceback(f"{where}:\n{_with_sources(failed.text)}")
    return error


class WorkerTraceback(Exception):  # noqa: N818 - it is no error, but where one was
    """Where in a worker an error came about."""

    def __str__(self) -> str:
        return f'\n"""\n{super().__str__()}"""'


def _with_sources(text: str) -> str:
    """Returns a traceback with the lines of cells in it, which a worker does not have."""
    lines, found = text.splitlines(), []
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        found.append(line)
        place = re.fullmatch(r'  File "(.+)", line (\d+), in .+', line)
        if place and not following.startswith("    "):
            source = linecache.getline(place[1], int(place[2])).strip()
            found += [f"    {source}"] if source else []
    return "\n".join(found) + "\n"
