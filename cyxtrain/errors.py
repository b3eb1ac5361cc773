"""Every error that this package raises, as one tree.

    RuntimeError
      CyxtrainError                 catches them all
        NotInitializedError         a function was called before init()
        ConfigError                 a setting or an input is wrong (a ValueError too)
        BackendUnavailableError     the requested backend is not available
        RendezvousError             the ranks did not find each other
        PeerLostError               another rank has ended, or the connection to it is broken
        PeerSilentError             another rank is connected and silent
        CollectiveTimeoutError      a collective did not finish within its deadline
        CollectiveMismatchError     ranks called different collectives, or the same one on different tensors
        DamagedFrameError           data was corrupted in transit (found by checksums, if they are on)
        CheckpointError             a checkpoint cannot be written or read, or is corrupt
        DistributedTrainingError    training ended because of an error on some rank
          NonFiniteError            a loss or a gradient is NaN or infinite
          ReplicasDifferError       ranks hold different parameters

Each message says what happened, where ("rank 3", before any address) and what to do. Errors are sent between ranks as
JSON facts, never as pickled objects. Below the tree: that conversion, `warn`, which attributes a warning to the line of
the user's program, and helpers for messages.
"""

from __future__ import annotations

import errno
import inspect
import re
import traceback
import unicodedata
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

# Together they fit into one message between ranks.
_MESSAGE_CHARACTERS = 300
_TRACEBACK_CHARACTERS = 1500
_SHOWN_NAMES = 5
_SHOWN_CHARACTERS = 200
_REMEDIES: dict[Any, str] = {
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    # Sockets have their own number on Windows.
    getattr(errno, "WSAEMFILE", errno.EMFILE): "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "all processes of this machine together have too many files open",
    errno.ENOMEM: "free memory on this machine",
    errno.ENOBUFS: "free memory on this machine",
}
_ON_ALL_RANKS = "_cyxtrain_on_all_ranks"
_before_raising: list[Callable[[], None]] = []
"""Called for each error of this package and each error on all ranks."""
_Error = TypeVar("_Error", bound=BaseException)


class CyxtrainError(RuntimeError):
    """Base of all errors of this package.

    Attributes:
        rank: The rank that the error is about, not the one that raises it; or None.
        during: The operation, such as "all_reduce #12 (SUM, float32 [10, 4])", or None.
    """

    def __init__(self, message: str, *, rank: int | None = None, during: str | None = None) -> None:
        super().__init__(printable(message))
        self.rank = rank
        self.during = during
        prepare_to_raise()

    def to_facts(self) -> dict[str, Any]:
        """Return the error as JSON types, to send to other ranks."""
        return {"type": type(self).__name__, "message": str(self), "rank": self.rank, "during": self.during}

    def again(self) -> CyxtrainError:
        """Return a copy without traceback, to raise the first error of a group again."""
        return error_from_facts(self.to_facts())


class NotInitializedError(CyxtrainError):
    """A function was called before `cyxtrain.init()`."""


class ConfigError(CyxtrainError, ValueError):
    """A setting, an argument or the data is wrong; nothing has started."""


class BackendUnavailableError(CyxtrainError):
    """The requested backend cannot run here; nothing falls back silently."""


class RendezvousError(CyxtrainError):
    """The ranks did not find each other before the deadline, or are incompatible."""


class PeerLostError(CyxtrainError):
    """Another rank has ended, or the connection to it is broken."""


class PeerSilentError(CyxtrainError):
    """Another rank is connected and does not answer."""


class CollectiveTimeoutError(CyxtrainError):
    """A collective did not finish within `collective_timeout_ms`."""


class CollectiveMismatchError(CyxtrainError):
    """Ranks called different collectives, or the same one with tensors that do not fit."""


class DamagedFrameError(CyxtrainError):
    """Data was corrupted in transit; checksums found it before it was used."""


class CheckpointError(CyxtrainError):
    """A checkpoint cannot be written or read, or is corrupt."""


@dataclass(frozen=True)
class Failure:
    """An error on one rank that ended training on all.

    Attributes:
        rank: The rank that failed.
        type: Name of the error's class.
        message: The error's message.
        traceback: Its last lines.
    """

    rank: int
    type: str
    message: str
    traceback: str

    @classmethod
    def of(cls, error: BaseException, rank: int) -> Failure:
        """Return the facts of an error, short enough to send."""
        text = "".join(traceback.format_exception(error))
        if len(text) > _TRACEBACK_CHARACTERS:  # whole frames only
            text = text[-_TRACEBACK_CHARACTERS:]
            text = "  ...\n" + text[max(text.find("  File "), 0) :]
        return cls(rank, type(error).__name__, str(error)[:_MESSAGE_CHARACTERS], text)


class DistributedTrainingError(CyxtrainError):
    """Training ended because of an error on some rank.

    Attributes:
        failures: What failed on which rank, the first one first; empty if no code of the user failed.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        during: str | None = None,
        failures: Sequence[Failure] = (),
    ) -> None:
        super().__init__(message, rank=rank, during=during)
        self.failures = tuple(failures)

    def to_facts(self) -> dict[str, Any]:
        """Return the error as JSON types, with its failures."""
        return super().to_facts() | {"failures": [asdict(failure) for failure in self.failures]}

    @classmethod
    def because_of(cls, error: BaseException, rank: int) -> DistributedTrainingError:
        """Return the error that the other ranks raise if one has failed, with its traceback."""
        failure = Failure.of(error, rank)
        message = f"rank {rank} has failed: {failure.type}: {failure.message}\non rank {rank}:\n{failure.traceback}"
        return cls(message, rank=rank, failures=[failure])


class NonFiniteError(DistributedTrainingError):
    """A loss or a gradient is NaN or infinite; all ranks raise it at the same step, before any change."""


class ReplicasDifferError(DistributedTrainingError):
    """Ranks hold different parameters; every rank raises it."""


BLAMING_ANOTHER: tuple[type[CyxtrainError], ...] = (
    PeerLostError,
    PeerSilentError,
    RendezvousError,
    CollectiveTimeoutError,
    CollectiveMismatchError,
    DistributedTrainingError,
)
"""Errors that a rank raises because of another one, which has the cause."""


_BY_NAME: dict[str, type[CyxtrainError]] = {
    name: kind for name, kind in globals().items() if isinstance(kind, type) and issubclass(kind, CyxtrainError)
}
"""The types above; an unknown one becomes a CyxtrainError with its message."""


def error_from_facts(facts: dict[str, Any]) -> CyxtrainError:
    """Return the error that `to_facts` described; unknown types become `CyxtrainError`."""
    kind = _BY_NAME.get(str(facts.get("type")), CyxtrainError)
    message = printable(str(facts.get("message", "an error without a message")))
    # The sender is not trusted: a value of another type counts as missing.
    rank = facts.get("rank")
    if not isinstance(rank, int):
        rank = None
    during = facts.get("during")
    if not isinstance(during, str):
        during = None
    error = kind(message, rank=rank, during=during)
    if isinstance(error, DistributedTrainingError):
        error.failures = tuple(_failures(facts.get("failures")))
    return error


def _failures(values: object) -> Iterator[Failure]:
    """Yield the valid failures; the sender is not trusted."""
    kinds = {"rank": int, "type": str, "message": str, "traceback": str}
    if not isinstance(values, list):
        return
    for value in values:
        if isinstance(value, dict) and all(type(value.get(name)) is kind for name, kind in kinds.items()):
            yield Failure(
                rank=value["rank"],
                type=printable(value["type"]),
                message=printable(value["message"]),
                traceback=printable(value["traceback"]),
            )


def printable(text: str) -> str:
    """Replace control and format characters, which a terminal would obey, by "?"."""
    return "".join(c if c in "\n\t" or unicodedata.category(c)[0] != "C" else "?" for c in text)


def reported(message: object, rank: int) -> str:
    """Return an error's message with the rank that reported it first."""
    text = str(message)
    if "(reported by rank " in text:
        return text
    gap = "" if text.endswith("\n") else " "  # after a traceback
    return f"{text}{gap}(reported by rank {rank})"


def on_all_ranks(error: _Error) -> _Error:
    """Mark and return an error that every rank raises at this point: it need not be reported."""
    error.__dict__[_ON_ALL_RANKS] = True
    prepare_to_raise()
    return error


def is_on_all_ranks(error: BaseException) -> bool:
    """Return whether every rank raises this error."""
    return _ON_ALL_RANKS in error.__dict__


_warns_together: list[Callable[[], bool]] = []


def before_raising(function: Callable[[], None]) -> None:
    """Set the function to call before an error of this package, or one on all ranks, is raised."""
    _before_raising[:] = [function]


def prepare_to_raise() -> None:
    """Call the function that `before_raising` has set, which shortens what Python prints of an error."""
    for function in _before_raising:
        function()


def warn_together_if(function: Callable[[], bool]) -> None:
    """Set the function that returns whether this process is the one that warns for all ranks."""
    _warns_together[:] = [function]


def warn_together(message: str) -> None:
    """Warn about what every rank sees, on rank 0 only."""
    if all(function() for function in _warns_together):
        warn(message)


def warn(message: str) -> None:
    """Warn, attributed to the line of the program that called this package."""
    frame = inspect.currentframe()
    depth = 0
    level = 1
    while frame is not None:
        depth += 1
        # The line to name is the one that called the outermost function of this package.
        if str(frame.f_globals.get("__name__")).partition(".")[0] == __package__:
            level = depth + 1
        frame = frame.f_back
    warnings.warn(printable(message), stacklevel=min(level, depth))


def shortened(names: Iterable[str]) -> str:
    """Return the first few of many names, and how many more there are, for a message."""
    found = [*names]
    shown = ", ".join(found[:_SHOWN_NAMES])
    if len(found) > _SHOWN_NAMES:
        shown += f" and {len(found) - _SHOWN_NAMES} more"
    return shown


def brief(value: object, limit: int = _SHOWN_CHARACTERS) -> str:
    """Describe a value in one line of a message, within a limit and without unprintable characters.

    A string is shown without quotes, a function by its name and arguments, and other objects without their address.
    """
    try:
        text = _described(value)
    except Exception:  # a number of 5,000 digits, a list that is too deep
        text = f"<{type(value).__name__}>"
    # Twice the limit is enough to look at; a string that is longer still ends in "..." below.
    one_line = "".join(c if c.isprintable() else " " for c in text[: 2 * limit])
    shown = " ".join(one_line.split())
    if len(shown) > limit or len(text) // 2 > limit:
        return f"{shown[:limit]}..."
    return shown


def _described(value: object) -> str:
    if isinstance(value, str):
        return value
    if inspect.isfunction(value):
        return f"{value.__name__}({', '.join(inspect.signature(value).parameters)})"
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def counted(number: int, noun: str) -> str:
    """Return a number and what it counts, such as "1 rank", "1,200 ranks"."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def exhausted(error: BaseException) -> str:
    """Return which resource has run out and the remedy; "" for other errors."""
    remedy = _REMEDIES.get(getattr(error, "errno", None))
    if remedy is None:
        return ""
    return f"{reason_of(error)}; {remedy}"


def reason_of(error: BaseException) -> str:
    """Return an error's reason in one line: the operating system's if it has one."""
    reason = getattr(error, "strerror", None)
    if reason:
        return str(reason)
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
