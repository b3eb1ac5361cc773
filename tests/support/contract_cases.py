"""The contract of the collectives as a table: every case, what a backend lacks, and one rank's way through them all.

contract_calls.py says what a case calls, contract_values.py what must come. No pytest here: ranks import this.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from contract_calls import COLLECTIVES, MESSAGES, MOVING, REDUCING
from contract_setting import Case, Setting
from contract_values import (
    BITWISE,
    DTYPES,
    EIGHTS,
    LAYOUTS,
    LONG,
    REORDERED,
    UNSIGNED,
    WITH_GAPS,
    is_whole,
    lengths,
    reductions_of,
)

import cyxtrain as cx

IN_PLACE = (
    "all_reduce",
    "all_reduce_coalesced",
    "all_reduce in a coalescing manager",
    "reduce",
    "broadcast",
    "all_gather_into_tensor in place",
)
BY_ROWS = ("all_to_all, uneven", "all_to_all_single", "all_to_all_single, uneven")
ROOTED = ("reduce", "broadcast", "gather", "scatter", "recv from any source")
TENSORS = (*REDUCING, *MOVING, *MESSAGES)
"""The collectives that carry tensors: all but barrier."""
BARRIERS = 20
TIMEOUT_MS = 30_000


# --- the table ------------------------------------------------------------------------------------------------------


@functools.cache
def cases(world_size: int, full: bool) -> list[Case]:
    """The cases for so many ranks, or by day those that differ most, in an order that all ranks know.

    By night: every dtype with every reduction at every length; every layout with every dtype.

    By day: float32 at every length in a sum, and in other reductions with none and with one more element than there are
    ranks; other dtypes with the latter, in all_reduce with each reduction, elsewhere with one of them in turns; layouts
    with float32, and once with complex64.
    """
    found = [*_dtypes(world_size, full), *_layouts(full)]
    found += [Case(name, torch.float32, "SUM" if name in REDUCING else "", "flat", LONG) for name in TENSORS]
    found = [_shuffled(case, world_size) for case in found if possible(case, world_size)]
    return [*found, *_roots(world_size), *_barriers()]


def possible(case: Case, world_size: int) -> bool:
    """Whether there is such a call at all."""
    name, layout = case.collective, case.layout
    if (world_size == 1 and name in MESSAGES) or case.dtype not in LAYOUTS[layout].dtypes:
        return False
    return not (layout == "expanded" and name in IN_PLACE) and not (layout == "0-dim" and name in BY_ROWS)


def _reductions(name: str, dtype: torch.dtype) -> tuple[str, ...]:
    return reductions_of(dtype) if name in REDUCING else ("",)


def _in_turns(reductions: tuple[str, ...], turn: int) -> tuple[str, ...]:
    """One of the reductions; none if there is none."""
    return reductions[turn % (len(reductions) or 1) :][:1]


def _dtypes(world_size: int, full: bool) -> Iterator[Case]:
    for name in TENSORS:
        for place, dtype in enumerate(DTYPES):
            reductions = _reductions(name, dtype)
            if not (full or name == "all_reduce" or dtype is torch.float32):
                reductions = _in_turns(reductions, place)
            for reduction in reductions:
                for count in lengths(world_size) if full else _daily_lengths(dtype, reduction, world_size):
                    yield Case(name, dtype, reduction, "flat", count)


def _daily_lengths(dtype: torch.dtype, reduction: str, world_size: int) -> Sequence[int]:
    if dtype is not torch.float32:
        return [world_size + 1]
    return lengths(world_size) if reduction in ("", "SUM") else [0, world_size + 1]


def _layouts(full: bool) -> Iterator[Case]:
    """A layout is undone before a reduction begins: float32 meets all reductions, other dtypes one in turns."""
    for name in TENSORS:
        for turn, layout in enumerate(layout for layout in LAYOUTS if layout != "flat"):
            for place, dtype in enumerate(DTYPES if full else (torch.float32, torch.complex64)):
                reductions = _reductions(name, dtype)
                if not (full and dtype is torch.float32):
                    reductions = _in_turns(reductions, turn + place if full else 0)
                for reduction in reductions:
                    several = (0, 1, 3) if full else (3,)
                    for count in (1,) if layout == "0-dim" else several:
                        yield Case(name, dtype, reduction, layout, count)


def _roots(world_size: int) -> Iterator[Case]:
    for name in ROOTED if world_size > 1 else ROOTED[:-1]:
        for root in range(world_size):
            for async_op in (False, True):
                yield Case(name, torch.float32, "MAX" if name in REDUCING else "", "flat", 5, root, async_op)


def _barriers() -> Iterator[Case]:
    for turn in range(BARRIERS):
        yield Case("barrier", torch.uint8, "", "flat", turn, 0, turn % 2 == 1)


def _shuffled(case: Case, world_size: int) -> Case:
    """Gives a case any root, and async_op or not: always the same, and not in step with its other attributes."""
    number = zlib.crc32(str(case).encode())
    return dataclasses.replace(case, root=number // 2 % world_size, async_op=number % 2 == 1)


# --- what backends lack ---------------------------------------------------------------------------------------------

REFUSED = "refused"
"""The call raises, on every rank; that it does so is tested."""
RIGHT_OR_REFUSED = "right or refused"
"""It depends on the version."""
NOT_ASKED = "not asked"
"""The ranks would hang, die, or go on with wrong numbers."""


class Gap(NamedTuple):
    """Something that a backend does not do; `what` is how it does not."""

    what: str
    why: str
    holds: Callable[[Case, int], bool]


def _of_complex_product(case: Case) -> bool:
    return case.dtype.is_complex and case.reduction == "PRODUCT"


PYTORCH = (
    Gap(REFUSED, "PyTorch has no products of complex numbers in all_reduce",
        lambda case, _: _of_complex_product(case) and case.collective.startswith("all_reduce")),
    Gap(REFUSED, "PyTorch views complex numbers as pairs before it asks the backend, and cannot view conjugate ones so",
        lambda case, _: case.layout == "conj" and not case.collective.startswith(("reduce", "gather"))),
)  # fmt: skip
"""What PyTorch refuses before it asks any backend."""

_GLOO_LACKS = (torch.int16, *UNSIGNED[1:])

GLOO = (
    Gap(NOT_ASKED, "a 0-dim output ends the process",
        lambda case, _: case.layout == "0-dim" and case.collective.startswith("reduce_scatter_tensor")),
    Gap(NOT_ASKED, "a message without elements from any source never ends",
        lambda case, _: case.collective == "recv from any source" and 0 in case.shape),
    Gap(NOT_ASKED, "it takes the bits in memory for the numbers: wrong signs, silently",
        lambda case, _: case.layout in ("conj", "neg")),
    Gap(NOT_ASKED, "it reduces and moves what lies in memory beside the elements, silently",
        lambda case, _: case.layout in WITH_GAPS
        and (case.collective in REDUCING or case.collective in ("broadcast", "scatter"))),
    Gap(NOT_ASKED, "it scatters what lies in memory after the element, silently",
        lambda case, _: case.layout == "expanded" and case.collective == "scatter"),
    Gap(NOT_ASKED, "it refuses tensors that are not contiguous, and some of these are",
        lambda case, _: case.layout in (*WITH_GAPS, *REORDERED, "expanded")
        and (case.collective in MESSAGES or case.collective.startswith("all_to_all_single"))),
    Gap(REFUSED, "it has no such dtype beside messages",
        lambda case, _: case.dtype in (*_GLOO_LACKS, *EIGHTS)
        and case.collective not in MESSAGES and case.collective != "barrier"),
    Gap(REFUSED, "it gathers no complex numbers",
        lambda case, _: case.dtype.is_complex and case.collective == "gather"),
    Gap(REFUSED, "it averages no whole numbers", lambda case, _: case.reduction == "AVG" and is_whole(case.dtype)),
    Gap(REFUSED, "it averages complex halves as pairs only",
        lambda case, _: case.reduction == "AVG" and case.dtype is torch.complex32
        and not case.collective.startswith("all_reduce")),
    Gap(RIGHT_OR_REFUSED, "its older versions have no AVG", lambda case, _: case.reduction == "AVG"),
    Gap(REFUSED, "it has no products of complex numbers", lambda case, _: _of_complex_product(case)),
    Gap(REFUSED, "all_gather_into_tensor wants one more dimension in the output",
        lambda case, _: case.layout == "0-dim" and case.collective.startswith("all_gather_into_tensor")),
    Gap(REFUSED, "its all_to_all takes tensors of one shape only",
        lambda case, size: case.collective == "all_to_all, uneven" and size > 1 and case.count > 0),
)  # fmt: skip

# From the source of PyTorch 2.11: nobody has run these here.
NCCL = (
    Gap(NOT_ASKED, "it does not receive from any source", lambda case, _: case.collective == "recv from any source"),
    Gap(NOT_ASKED, "it takes no heed of tags", lambda case, _: case.collective == "isend and irecv"),
    Gap(NOT_ASKED, "it takes the bits in memory for the numbers", lambda case, _: case.layout in ("conj", "neg")),
    Gap(NOT_ASKED, "it sends tensors that are not contiguous as they lie in memory",
        lambda case, _: case.layout in (*WITH_GAPS, *REORDERED, "expanded") and case.collective in MESSAGES),
    Gap(RIGHT_OR_REFUSED, "it wants contiguous tensors",
        lambda case, _: case.layout in (*WITH_GAPS, *REORDERED, "expanded", "0-dim")),
    Gap(RIGHT_OR_REFUSED, "it has few dtypes", lambda case, _: case.dtype in (*_GLOO_LACKS, *EIGHTS)),
    Gap(RIGHT_OR_REFUSED, "it has no reductions of bits", lambda case, _: case.reduction in BITWISE),
    Gap(RIGHT_OR_REFUSED, "it averages no booleans",
        lambda case, _: case.reduction == "AVG" and case.dtype is torch.bool),
    Gap(RIGHT_OR_REFUSED, "it has no products of complex numbers", lambda case, _: _of_complex_product(case)),
)  # fmt: skip

GAPS: dict[str, tuple[Gap, ...]] = {"ring": PYTORCH, "gloo": (*PYTORCH, *GLOO), "nccl": (*PYTORCH, *NCCL)}


def gap_of(backend: str, case: Case, world_size: int) -> Gap | None:
    """Returns why a backend does not do a case; None: it must."""
    return next((gap for gap in GAPS[backend] if gap.holds(case, world_size)), None)


# --- one rank's way through them ------------------------------------------------------------------------------------


@dataclasses.dataclass
class Outcome:
    """What one rank saw.

    Attributes:
        asked: How many cases of each collective it went through.
        wrong: (collective, all that there is to say) of those that were not right, or not refused as the table says.
    """

    asked: Counter[str] = dataclasses.field(default_factory=Counter)
    wrong: list[tuple[str, str]] = dataclasses.field(default_factory=list)


def run_table(backend: str, full: bool) -> Outcome:
    """Joins the world and goes through all of its cases, up to the first that ends it."""
    warnings.simplefilter("ignore")  # of complex halves, and of names that PyTorch wants to drop
    config = cx.DistributedConfig(backend="cpu" if backend == "ring" else backend, collective_timeout_ms=TIMEOUT_MS)
    with cx.init(config):
        assert dist.get_backend() == backend
        rank, size = dist.get_rank(), dist.get_world_size()
        return run_rank(backend, asked_cases(backend, size, full), rank, size)


def run_rank(backend: str, table: list[Case], rank: int, world_size: int) -> Outcome:
    """Goes through cases as one rank."""
    outcome = Outcome()
    for case in table:
        outcome.asked[case.collective] += 1
        wrong, over = run_case(backend, case, rank, world_size)
        who = f"{backend}: {case}, rank {rank} of {world_size}"
        outcome.wrong += [(case.collective, f"{who}: {what}") for what in wrong]
        if over:
            break
    return outcome


@functools.cache
def asked_cases(backend: str, world_size: int, full: bool) -> list[Case]:
    """The cases that a backend goes through."""
    found = [(case, gap_of(backend, case, world_size)) for case in cases(world_size, full)]
    return [case for case, gap in found if gap is None or gap.what != NOT_ASKED]


def run_case(backend: str, case: Case, rank: int, world_size: int) -> tuple[list[str], bool]:
    """Returns (what is wrong with it, whether nothing can come after it)."""
    gap = gap_of(backend, case, world_size)
    setting = Setting(case, rank, world_size, "cuda" if backend == "nccl" else "cpu", ours=backend == "ring")
    try:
        COLLECTIVES[case.collective](setting)
        setting.check_the_rest()
    except Exception as error:
        return ([], False) if gap is not None else ([f"{type(error).__name__}: {error}"], True)
    if gap is not None and gap.what == REFUSED:
        return [f"it was not refused, though {gap.why}"], False
    return setting.wrong, False
