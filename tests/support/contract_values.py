"""The contract of the collectives: the numbers that ranks bring, how they lie in memory, and what must come of them.

All of it is computed here, with NumPy: whole numbers exactly, the others in more precision than they have.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex32, torch.complex64, torch.complex128)
SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
EIGHTS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
DTYPES = (*FLOATS, *COMPLEX, *SIGNED, *UNSIGNED, torch.bool, *EIGHTS)
ARITHMETIC = ("SUM", "AVG", "PRODUCT", "MIN", "MAX")
BITWISE = ("BAND", "BOR", "BXOR")
NUMBERS = "numbers"
"""Asks `given` for ordinary numbers where nothing is calculated."""
ODD = 1037
"""A length that no number of ranks from 2 to 5 divides, nor a width of vectors."""
LONG = 300_007
"""Elements of four bytes: more than the ring receives in one piece."""


def is_whole(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex)


def reductions_of(dtype: torch.dtype) -> tuple[str, ...]:
    """What can be done with numbers of a dtype."""
    if dtype in EIGHTS:
        return ()
    if dtype.is_complex:
        return ("SUM", "AVG", "PRODUCT")
    return (*ARITHMETIC, *BITWISE) if is_whole(dtype) else ARITHMETIC


def lengths(world_size: int) -> list[int]:
    return sorted({0, 1, world_size - 1, world_size, world_size + 1, ODD})


# --- layouts --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a tensor lies in memory.

    Attributes:
        dimensions: After the first one.
        view: Makes of (shape, dtype) a tensor, mostly as a part of something larger; all of it is `FILLER`.
        dtypes: That have it.
    """

    dimensions: tuple[int, ...]
    view: Callable[[tuple[int, ...], torch.dtype], Tensor]
    dtypes: tuple[torch.dtype, ...] = DTYPES


FILLER = 1
"""The value of every byte that no collective is to touch; True in booleans."""


def filled(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    size = math.prod(shape) * dtype.itemsize
    return (
        torch.full((size,), FILLER, dtype=torch.uint8).view(dtype).view(shape)
        if size
        else torch.empty(shape, dtype=dtype)
    )


def _permuted(shape: tuple[int, ...], dtype: torch.dtype, order: tuple[int, ...]) -> Tensor:
    """A tensor of this shape that lies in memory in another order of dimensions."""
    back = [order.index(dimension) for dimension in range(len(order))]
    return filled(tuple(shape[dimension] for dimension in order), dtype).permute(back)


def _every_other(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return filled((*shape[:-1], 2 * shape[-1]), dtype)[..., ::2]


def _piece(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return filled((math.prod(shape) + 12,), dtype)[7:-5].view(shape)


LAYOUTS = {
    "flat": Layout((), filled),
    "0-dim": Layout((), filled),
    "rows": Layout((5,), filled),
    "no columns": Layout((0,), filled),
    "seven dimensions": Layout((2, 1, 2, 1, 2, 3), filled),
    "a middle piece": Layout((), _piece),
    "every other": Layout((), _every_other),
    "a column": Layout((), lambda shape, dtype: filled((*shape, 3), dtype)[..., 1]),
    "transposed": Layout((5,), lambda shape, dtype: _permuted(shape, dtype, (1, 0))),
    "permuted": Layout((2, 3, 4), lambda shape, dtype: _permuted(shape, dtype, (2, 0, 3, 1))),
    "channels last": Layout((2, 3, 4), lambda shape, dtype: _permuted(shape, dtype, (0, 2, 3, 1))),
    "expanded": Layout((5,), filled),  # its inputs are; there is no writing into such a tensor
    "conj": Layout((), lambda shape, dtype: filled(shape, dtype).conj(), COMPLEX),
    "neg": Layout((), lambda shape, dtype: torch._neg_view(filled(shape, dtype)), (*FLOATS, *COMPLEX)),
}
WITH_GAPS = ("every other", "a column")
REORDERED = ("transposed", "permuted", "channels last")


# --- what ranks bring, and what must come ---------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def given(dtype: torch.dtype, count: int, reduction: str, rank: int, part: int = 0) -> Tensor:
    """The numbers that a rank brings, flat: the same whenever it is asked for, and not to be changed.

    Random bits where nothing is calculated, so that every NaN and every zero must arrive as it is. Whole numbers may
    overflow, and wrap, in all reductions but AVG.
    """
    if count == 0:
        return torch.empty(0, dtype=dtype)
    random = np.random.default_rng([zlib.crc32(f"{dtype} {reduction}".encode()), count, rank, part])
    if dtype is torch.bool:
        return torch.from_numpy(random.integers(0, 2, count).astype(np.bool_))
    if reduction and not is_whole(dtype):
        real = torch.from_numpy(random.standard_normal((count, 2 if dtype.is_complex else 1)))
        return (torch.view_as_complex(real) if dtype.is_complex else real[:, 0]).to(dtype)
    bits = torch.from_numpy(random.integers(0, 256, count * dtype.itemsize, np.uint8)).view(dtype)
    if reduction == "AVG":
        return torch.from_numpy((bits.numpy().astype(object) // 8).astype(bits.numpy().dtype))
    return bits


def bits_of(tensor: Tensor) -> np.ndarray[Any, Any]:
    """The bytes of a tensor's elements, in order."""
    plain = torch.empty(tensor.numel(), dtype=tensor.dtype)
    plain.view(tensor.shape).copy_(tensor.detach())
    return plain.view(torch.uint8).numpy() if plain.numel() else np.empty(0, np.uint8)


def wrong_bits(found: Tensor, must: Tensor) -> str:
    """Compares what has only moved; "": every bit is right."""
    if tuple(found.shape) != tuple(must.shape):
        return f"has shape {list(found.shape)}, not {list(must.shape)}"
    places = np.unique(np.flatnonzero(bits_of(found) != bits_of(must)) // found.dtype.itemsize)
    return f"{len(places)} of {found.numel()} elements are wrong, first element {places[0]}" if len(places) else ""


_FOLDS: dict[str, Callable[[Any, Any], Any]] = {
    "SUM": lambda a, b: a + b,
    "AVG": lambda a, b: a + b,
    "PRODUCT": lambda a, b: a * b,
    "MIN": np.minimum,
    "MAX": np.maximum,
    "BAND": lambda a, b: a & b,
    "BOR": lambda a, b: a | b,
    "BXOR": lambda a, b: a ^ b,
}
_FOLDS_OF_TRUTH = _FOLDS | dict.fromkeys(("SUM", "AVG", "MAX"), np.logical_or) | {"PRODUCT": np.logical_and}


def wrong_numbers(found: Tensor, brought: list[Tensor], reduction: str) -> str:
    """Compares a result with the numbers of all ranks; "": it is right.

    Whole numbers must be right to the bit: they wrap, and an average is cut towards zero. Of truth values SUM, AVG
    and MAX say whether any is true, PRODUCT and MIN whether all are. The others may be rounded once per rank.
    """
    dtype, ours, numbers = found.dtype, _exact(found), [_exact(tensor) for tensor in brought]
    must = functools.reduce((_FOLDS_OF_TRUTH if dtype is torch.bool else _FOLDS)[reduction], numbers)
    if dtype is torch.bool or reduction in ("MIN", "MAX"):
        wrong = ours != must
    elif is_whole(dtype):
        must = np.asarray(must, dtype=object)  # without dimensions it would be a mere int
        must = _wrapped(np.sign(must) * (abs(must) // len(brought)) if reduction == "AVG" else must, dtype)
        wrong = ours != must
    else:
        must = must / len(brought) if reduction == "AVG" else must
        wrong = ~(abs(ours - must) <= _rounding(numbers, reduction, dtype))  # so that NaN is wrong
    places = np.argwhere(np.asarray(wrong, dtype=bool))
    if len(places) == 0:
        return ""
    first = tuple(int(index) for index in places[0])
    came, right = ours[first], np.asarray(must)[first]
    return f"{len(places)} of {found.numel()} elements are wrong, first {list(first)}: {came}, not {right}"


def _exact(tensor: Tensor) -> np.ndarray[Any, Any]:
    """The numbers of a tensor: Python's integers, or long doubles."""
    if tensor.dtype is torch.bool:
        return tensor.numpy()
    if is_whole(tensor.dtype):
        return tensor.numpy().astype(object)
    if not tensor.is_complex():
        return tensor.to(torch.float64).numpy().astype(np.longdouble)
    parts = torch.view_as_real(tensor.contiguous()).to(torch.float64).numpy().astype(np.longdouble)
    return parts[..., 0] + 1j * parts[..., 1]


def _wrapped(numbers: Any, dtype: torch.dtype) -> Any:
    info = torch.iinfo(dtype)
    return (numbers - info.min) % 2**info.bits + info.min


def _rounding(numbers: list[Any], reduction: str, dtype: torch.dtype) -> Any:
    """How far a result may be off: a rounding for each rank, of the largest number that can come up on the way."""
    info, sizes = torch.finfo(dtype), np.stack([abs(array) for array in numbers])
    largest = sizes.prod(axis=0) if reduction == "PRODUCT" else sizes.sum(axis=0)
    roundings = len(numbers) * (4 if dtype.is_complex else 1)  # a complex product is made of four
    return roundings * info.eps * (largest + info.smallest_normal)
