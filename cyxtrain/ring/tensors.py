"""Tensors as the ring sees them: flat memory to send from and receive into, and how two pieces become one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cyxtrain.errors import ConfigError, CyxtrainError
from cyxtrain.ring.frames import Reduction


class _Memory:
    """Names a tensor's memory for NumPy. `Tensor.numpy()` would mark the user's storage as not resizable."""

    def __init__(self, flat: Tensor, size: int) -> None:
        self.__array_interface__ = {"data": (flat.data_ptr(), False), "shape": (size,), "typestr": "|u1", "version": 3}
        self.flat = flat  # NumPy's array keeps this object, and so the memory


def memory_of(flat: Tensor) -> memoryview:
    """Returns the bytes of a contiguous CPU tensor, without a copy; they live as long as either of the two."""
    size = flat.numel() * flat.element_size()
    if size == 0:
        return memoryview(bytearray())
    return np.asarray(_Memory(flat, size)).data


def check_tensor(tensor: Tensor) -> Tensor:
    """Returns a tensor that the ring can carry.

    Raises:
        CyxtrainError: It is sparse, or not on the CPU.
    """
    if tensor.layout is not torch.strided:
        raise CyxtrainError(f"the ring carries dense tensors, this one is {tensor.layout}; call to_dense() first.")
    if tensor.device.type != "cpu":
        raise CyxtrainError(
            f"the ring carries CPU tensors, this one is on {tensor.device}; call cpu() first, or use the nccl backend."
        )
    return tensor


def check_target(tensor: Tensor) -> Tensor:
    """Returns a tensor that the ring can write into.

    Raises:
        ConfigError: Its elements share memory, as those of `expand` do: there is no room for what each is to be.
        CyxtrainError: The ring cannot carry it.
    """
    if not check_tensor(tensor).is_contiguous() and _shares_memory(tensor):
        raise ConfigError(
            f"elements of this tensor {list(tensor.shape)} share memory (strides {list(tensor.stride())}), as after "
            "expand(): nothing can be received into it. Give a tensor of its own: contiguous() or clone()."
        )
    return tensor


def _shares_memory(tensor: Tensor) -> bool:
    """Whether any two elements are at one place; of rare strides that only `as_strided` makes, whether they may be."""
    reach = 0  # of the dimensions that lie closer together
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def flat_copy_of(tensor: Tensor) -> Tensor:
    """Returns a new one-dimensional tensor with the same elements."""
    return check_tensor(tensor).detach().clone(memory_format=torch.contiguous_format).view(-1)


def is_plain(tensor: Tensor) -> bool:
    """Whether the memory of a tensor holds its elements in order, as they are."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def flat_view_of(tensor: Tensor) -> Tensor:
    """Returns the elements in one dimension: a view where memory is plain, else a copy."""
    check_tensor(tensor)
    return tensor.detach().view(-1) if is_plain(tensor) else flat_copy_of(tensor)


def _multiply_complex(into: Tensor, other: Tensor) -> None:
    """Multiplies in place. PyTorch's own kernel rounds otherwise where it has vectors than at the end of a piece."""
    ours, theirs = torch.view_as_real(into), torch.view_as_real(other)
    a, b, c, d = ours[:, 0], ours[:, 1], theirs[:, 0], theirs[:, 1]
    real, imaginary = a * c - b * d, a * d + b * c
    ours[:, 0], ours[:, 1] = real, imaginary


def _smaller(into: Tensor, other: Tensor) -> None:
    torch.minimum(into, other, out=into)
    _one_zero(into)


def _larger(into: Tensor, other: Tensor) -> None:
    torch.maximum(into, other, out=into)
    _one_zero(into)


def _one_zero(tensor: Tensor) -> None:
    """Makes -0.0 to 0.0: they are equal, so which of them is smaller would depend on the width of vectors."""
    if tensor.is_floating_point():
        tensor.add_(0.0)


_IN_PLACE: dict[Reduction, Callable[[Tensor, Tensor], Any]] = {
    Reduction.SUM: lambda into, other: into.add_(other),
    Reduction.AVG: lambda into, other: into.add_(other),
    Reduction.PRODUCT: lambda into, other: into.mul_(other),
    Reduction.MIN: _smaller,
    Reduction.MAX: _larger,
    Reduction.BAND: lambda into, other: into.bitwise_and_(other),
    Reduction.BOR: lambda into, other: into.bitwise_or_(other),
    Reduction.BXOR: lambda into, other: into.bitwise_xor_(other),
}
_UNSIGNED: dict[torch.dtype, type[np.unsignedinteger[Any]]] = {
    torch.uint16: np.uint16,
    torch.uint32: np.uint32,
    torch.uint64: np.uint64,
}
_NUMPY_IN_PLACE: dict[Reduction, np.ufunc] = {
    Reduction.SUM: np.add,
    Reduction.AVG: np.add,
    Reduction.PRODUCT: np.multiply,
    Reduction.MIN: np.minimum,
    Reduction.MAX: np.maximum,
    Reduction.BAND: np.bitwise_and,
    Reduction.BOR: np.bitwise_or,
    Reduction.BXOR: np.bitwise_xor,
}
_NO_ARITHMETIC = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


def combiner(reduction: Reduction, flat: Tensor, scratch: Tensor) -> Callable[[int, int], None]:
    """Returns a function of (first, end) that combines scratch[: end - first] into flat[first:end].

    Args:
        reduction: How.
        flat: One-dimensional; changed in place.
        scratch: One-dimensional, of the same dtype.

    Raises:
        ConfigError: This dtype has no such reduction.
    """
    dtype = flat.dtype
    if dtype in _NO_ARITHMETIC:
        raise ConfigError(f"{dtype} has no arithmetic: it can be sent and gathered, but not reduced. Convert it first.")
    if dtype.is_complex and reduction in (Reduction.MIN, Reduction.MAX):
        raise ConfigError(f"{reduction.name} of {dtype} does not exist: complex numbers have no order.")
    if (dtype.is_complex or dtype.is_floating_point) and reduction >= Reduction.BAND:
        raise ConfigError(f"{reduction.name} works on whole numbers and booleans, not on {dtype}.")
    if dtype in _UNSIGNED:
        return _unsigned_combiner(reduction, flat, scratch)
    if dtype.is_complex and reduction is not Reduction.PRODUCT:
        # PyTorch adds no complex halves on CPUs; the two parts of any complex number add up by themselves.
        return _pairwise(combiner(reduction, torch.view_as_real(flat).view(-1), torch.view_as_real(scratch).view(-1)))
    in_place = _multiply_complex if dtype.is_complex else _IN_PLACE[reduction]

    def combine(first: int, end: int) -> None:
        in_place(flat[first:end], scratch[: end - first])

    return combine


def _pairwise(combine: Callable[[int, int], None]) -> Callable[[int, int], None]:
    return lambda first, end: combine(2 * first, 2 * end)


def _unsigned_combiner(reduction: Reduction, flat: Tensor, scratch: Tensor) -> Callable[[int, int], None]:
    """PyTorch has little arithmetic for wide unsigned integers, NumPy has all of it."""
    into = np.frombuffer(memory_of(flat), _UNSIGNED[flat.dtype])
    other = np.frombuffer(memory_of(scratch), _UNSIGNED[flat.dtype])
    ufunc = _NUMPY_IN_PLACE[reduction]

    def combine(first: int, end: int) -> None:
        ufunc(into[first:end], other[: end - first], out=into[first:end])

    return combine


def divide(flat: Tensor, divisor: int) -> None:
    """Divides in place: the end of AVG. Whole numbers are truncated towards zero, as NCCL does."""
    if flat.dtype in _UNSIGNED:
        array = np.frombuffer(memory_of(flat), _UNSIGNED[flat.dtype])
        np.floor_divide(array, array.dtype.type(divisor), out=array)
    elif flat.dtype is torch.bool:
        return  # a mean of truth values is their SUM here: whether any is true
    elif flat.is_complex():
        torch.view_as_real(flat).div_(divisor)
    elif flat.is_floating_point():
        flat.div_(divisor)
    else:
        flat.div_(divisor, rounding_mode="trunc")
