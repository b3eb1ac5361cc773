"""Element-wise arithmetic of reductions, on the memory of tensors."""

from __future__ import annotations

import contextlib
import enum
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cyxtrain.errors import ConfigError


class Reduction(enum.IntEnum):
    """Reductions of the elements of several ranks."""

    NONE = 0
    SUM = 1
    AVG = 2
    PRODUCT = 3
    MIN = 4
    MAX = 5
    BAND = 6
    BOR = 7
    BXOR = 8

    # The hash of an enum is slow Python code.
    __hash__ = int.__hash__


class _Memory:
    """A tensor's memory for NumPy; `Tensor.numpy()` would mark the user's storage as not resizable."""

    def __init__(self, flat: Tensor, size: int) -> None:
        self.__array_interface__ = {"data": (flat.data_ptr(), False), "shape": (size,), "typestr": "|u1", "version": 3}
        self.flat = flat  # keeps the memory alive


def memory_of(flat: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor without a copy; they live as long as either of the two."""
    size = flat.numel() * flat.element_size()
    if size == 0:
        return memoryview(bytearray())
    return np.asarray(_Memory(flat, size)).data


def lasting() -> contextlib.AbstractContextManager[object]:
    """Return a context for tensors that are kept: those made in inference mode could only be changed there."""
    return torch.inference_mode(False)


def _multiply_complex(one: Tensor, other: Tensor, out: Tensor) -> None:
    """Multiply; PyTorch's own kernel rounds differently in vectors than at the end of a piece."""
    ours = torch.view_as_real(one)
    theirs = torch.view_as_real(other)
    real = ours[:, 0] * theirs[:, 0] - ours[:, 1] * theirs[:, 1]
    imaginary = ours[:, 0] * theirs[:, 1] + ours[:, 1] * theirs[:, 0]
    # `out` is one of the operands: both parts are calculated before either is written.
    result = torch.view_as_real(out)
    result[:, 0] = real
    result[:, 1] = imaginary


def _smaller(one: Tensor, other: Tensor, out: Tensor) -> None:
    torch.minimum(one, other, out=out)
    _one_zero(out)


def _larger(one: Tensor, other: Tensor, out: Tensor) -> None:
    torch.maximum(one, other, out=out)
    _one_zero(out)


def _one_zero(tensor: Tensor) -> None:
    """Turn -0.0 into 0.0: which of the two is smaller would depend on the width of vectors."""
    if tensor.is_floating_point():
        tensor.add_(0.0)


_OPERATORS: dict[Reduction, tuple[Callable[..., Any], np.ufunc]] = {
    Reduction.SUM: (torch.add, np.add),
    Reduction.AVG: (torch.add, np.add),
    Reduction.PRODUCT: (torch.mul, np.multiply),
    Reduction.MIN: (_smaller, np.minimum),
    Reduction.MAX: (_larger, np.maximum),
    Reduction.BAND: (torch.bitwise_and, np.bitwise_and),
    Reduction.BOR: (torch.bitwise_or, np.bitwise_or),
    Reduction.BXOR: (torch.bitwise_xor, np.bitwise_xor),
}
"""PyTorch's operator and NumPy's."""
_UNSIGNED: dict[torch.dtype, type[np.unsignedinteger[Any]]] = {
    getattr(torch, name): getattr(np, name) for name in ("uint16", "uint32", "uint64")
}
_FASTER_IN_NUMPY: dict[torch.dtype, type[np.number[Any]]] = {
    getattr(torch, name): getattr(np, name) for name in ("float32", "float64", "int32", "int64")
}
"""Dtypes that NumPy adds with the same result, and small arrays in a third of the time."""
_NO_ARITHMETIC = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


def added_by_numpy(reduction: Reduction, dtype: torch.dtype) -> type[np.number[Any]] | None:
    """Return NumPy's type for a dtype that NumPy adds faster than PyTorch, with the same result; None for others.

    Which of two NaNs stays depends on the operands' order and place: ranks must sum alike, in pieces that end alike.
    """
    return _FASTER_IN_NUMPY.get(dtype) if reduction in (Reduction.SUM, Reduction.AVG) else None


class Calculation(NamedTuple):
    """How a dtype is combined."""

    operator: Callable[..., Any]  # combines two arrays of elements into `out`
    view: Callable[[Tensor, memoryview], Any]  # returns such an array, from a flat tensor and its bytes
    parts: int = 1  # elements of the array per element of the tensor


def _as_tensor(flat: Tensor, memory: memoryview) -> Any:
    return flat


def _as_parts(flat: Tensor, memory: memoryview) -> Any:
    return torch.view_as_real(flat).view(-1)


def _as_array(dtype: type[np.number[Any]]) -> Callable[[Tensor, memoryview], Any]:
    return lambda flat, memory: np.frombuffer(memory, dtype)


def silent_numpy() -> contextlib.AbstractContextManager[None]:
    """Return a context in which NumPy adds infinities without warnings, like PyTorch."""
    return np.errstate(all="ignore")


def _add_silently(one: Any, other: Any, out: Any) -> None:
    with silent_numpy():
        np.add(one, other, out)


@functools.cache
def calculation_of(reduction: Reduction, dtype: torch.dtype, *, use_numpy: bool = False) -> Calculation:
    """Return how a reduction of a dtype is calculated, by NumPy only if `use_numpy`; refuse unsupported ones."""
    _check_reduction(reduction, dtype)
    torch_operator, numpy_operator = _OPERATORS[reduction]
    # PyTorch lacks arithmetic for wide unsigned integers.
    if dtype in _UNSIGNED:
        return Calculation(numpy_operator, _as_array(_UNSIGNED[dtype]))
    if use_numpy:
        array = added_by_numpy(reduction, dtype)
        if array is not None:
            return Calculation(_add_silently, _as_array(array))
    if dtype.is_complex and reduction is Reduction.PRODUCT:
        return Calculation(_multiply_complex, _as_tensor)
    # PyTorch adds no complex halves on CPUs; real and imaginary parts add up separately.
    if dtype.is_complex:
        return Calculation(torch_operator, _as_parts, parts=2)
    return Calculation(torch_operator, _as_tensor)


class Scratch:
    """Memory for received elements that are to be combined; one operation at a time uses it."""

    def __init__(self, size: int) -> None:
        with lasting():
            self._flat = torch.empty(size, dtype=torch.uint8, device="cpu")
        self._views: dict[tuple[torch.dtype, object], Any] = {}
        self.memory = memory_of(self._flat)

    def of(self, dtype: torch.dtype, how: Calculation) -> Any:
        """Return the memory as an array of a dtype's elements."""
        view = self._views.get((dtype, how.view))
        if view is None:
            with lasting():
                view = how.view(self._flat.view(dtype), self.memory)
            self._views[dtype, how.view] = view
        return view


class Combiner:
    """Combines received elements in a scratch with a flat tensor, in place; refuses unsupported dtypes.

    With `use_numpy`, NumPy adds the dtypes that it adds like PyTorch: see `added_by_numpy`.
    """

    def __init__(self, reduction: Reduction, flat: Tensor, scratch: Scratch, *, use_numpy: bool = False) -> None:
        dtype = flat.dtype
        how = calculation_of(reduction, dtype, use_numpy=use_numpy)
        self.memory = memory_of(flat)
        self._operator, view, self._parts = how
        self._flat = view(flat, self.memory)
        self._scratch = scratch.of(dtype, how)

    def combine(self, first: int, end: int, *, peer_first: bool = False) -> None:
        """Combine scratch[: end - first] into flat[first:end]; the first operand's NaN stays."""
        ours = self._flat[first * self._parts : end * self._parts]
        theirs = self._scratch[: (end - first) * self._parts]
        if peer_first:
            self._operator(theirs, ours, out=ours)
        else:
            self._operator(ours, theirs, out=ours)


def _check_reduction(reduction: Reduction, dtype: torch.dtype) -> None:
    if dtype in _NO_ARITHMETIC:
        raise ConfigError(f"{dtype} has no arithmetic: it can be sent and gathered, but not reduced. Convert it first.")
    if dtype.is_complex and reduction in (Reduction.MIN, Reduction.MAX):
        raise ConfigError(f"{reduction.name} of {dtype} does not exist: complex numbers have no order.")
    if (dtype.is_complex or dtype.is_floating_point) and reduction >= Reduction.BAND:
        raise ConfigError(f"{reduction.name} works on whole numbers and booleans, not on {dtype}.")


def divide(flat: Tensor, divisor: int) -> None:
    """Divide in place, as the end of AVG; integers are truncated towards zero, as NCCL does."""
    if flat.dtype in _UNSIGNED:
        array = np.frombuffer(memory_of(flat), _UNSIGNED[flat.dtype])
        np.floor_divide(array, array.dtype.type(divisor), out=array)
    elif flat.dtype is torch.bool:
        # The mean of booleans is whether any is true, which is their sum already.
        return
    elif flat.is_complex():
        torch.view_as_real(flat).div_(divisor)
    elif flat.is_floating_point():
        flat.div_(divisor)
    else:
        flat.div_(divisor, rounding_mode="trunc")
