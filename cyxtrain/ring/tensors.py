"""Tensors as the ring sees them: flat memory to send from and receive into, and how two pieces become one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cyxtrain.errors import ConfigError, CyxtrainError
from cyxtrain.ring.frames import Reduction
from cyxtrain.ring.staging import host_copy


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
        CyxtrainError: It is sparse, or neither on the CPU nor on a CUDA device.
    """
    if tensor.is_cpu and tensor.layout is torch.strided:
        return tensor
    if tensor.layout is not torch.strided:
        raise CyxtrainError(f"the ring carries dense tensors, this one is {tensor.layout}; call to_dense() first.")
    if tensor.device.type not in ("cpu", "cuda"):
        raise CyxtrainError(f"the ring carries CPU and CUDA tensors, this one is on {tensor.device}; call cpu() first.")
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
    """Returns a new one-dimensional CPU tensor with the same elements."""
    if check_tensor(tensor).device.type == "cuda":
        return host_copy(tensor)
    return tensor.detach().clone(memory_format=torch.contiguous_format).view(-1)


def overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two one-dimensional, contiguous tensors share memory."""
    (first, end), (start, stop) = (
        (part.data_ptr(), part.data_ptr() + part.numel() * part.element_size()) for part in (one, other)
    )
    return first < stop and start < end


def is_plain(tensor: Tensor) -> bool:
    """Whether the memory of a tensor holds its elements in order, as they are."""
    return tensor.is_contiguous() and tensor.is_cpu and not tensor.is_conj() and not tensor.is_neg()


def flat_view_of(tensor: Tensor) -> Tensor:
    """Returns the elements in one dimension: a view where memory is plain, else a copy."""
    if is_plain(check_tensor(tensor)):
        return tensor.detach().view(-1)
    return flat_copy_of(tensor)


def _multiply_complex(one: Tensor, other: Tensor, out: Tensor) -> None:
    """Multiplies. PyTorch's own kernel rounds otherwise where it has vectors than at the end of a piece."""
    ours, theirs, result = (torch.view_as_real(tensor) for tensor in (one, other, out))
    a, b, c, d = ours[:, 0], ours[:, 1], theirs[:, 0], theirs[:, 1]
    result[:, 0], result[:, 1] = a * c - b * d, a * d + b * c


def _smaller(one: Tensor, other: Tensor, out: Tensor) -> None:
    torch.minimum(one, other, out=out)
    _one_zero(out)


def _larger(one: Tensor, other: Tensor, out: Tensor) -> None:
    torch.maximum(one, other, out=out)
    _one_zero(out)


def _one_zero(tensor: Tensor) -> None:
    """Makes -0.0 to 0.0: they are equal, so which of them is smaller would depend on the width of vectors."""
    if tensor.is_floating_point():
        tensor.add_(0.0)


_OPERATORS: dict[Reduction, Callable[..., Any]] = {
    Reduction.SUM: torch.add,
    Reduction.AVG: torch.add,
    Reduction.PRODUCT: torch.mul,
    Reduction.MIN: _smaller,
    Reduction.MAX: _larger,
    Reduction.BAND: torch.bitwise_and,
    Reduction.BOR: torch.bitwise_or,
    Reduction.BXOR: torch.bitwise_xor,
}
_UNSIGNED: dict[torch.dtype, type[np.unsignedinteger[Any]]] = {
    torch.uint16: np.uint16,
    torch.uint32: np.uint32,
    torch.uint64: np.uint64,
}
_NUMPY_OPERATORS: dict[Reduction, np.ufunc] = {
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


class Scratch:
    """Memory for what arrives and is to be combined; one operation at a time uses it.

    Args:
        size: In bytes.
    """

    def __init__(self, size: int) -> None:
        self._flat = torch.empty(size, dtype=torch.uint8, device="cpu")
        self._views: dict[torch.dtype, Tensor] = {}
        self.memory = memory_of(self._flat)

    def of(self, dtype: torch.dtype) -> Tensor:
        """Returns it as elements of a dtype."""
        view = self._views.get(dtype)
        if view is None:
            view = self._views[dtype] = self._flat.view(dtype)
        return view


class Combiner:
    """Combines what arrived in a scratch with what is in a tensor, in place.

    Args:
        reduction: How.
        flat: One-dimensional; changed in place.
        scratch: Where things arrive.

    Raises:
        ConfigError: This dtype has no such reduction.
    """

    def __init__(self, reduction: Reduction, flat: Tensor, scratch: Scratch) -> None:
        dtype = flat.dtype
        _check_reduction(reduction, dtype)
        self._operator: Callable[..., Any] = _OPERATORS[reduction]
        self._flat: Any = flat
        self._scratch: Any = scratch.of(dtype)
        self._parts = 1
        if dtype in _UNSIGNED:  # PyTorch has little arithmetic for wide unsigned integers, NumPy has all of it
            self._operator = _NUMPY_OPERATORS[reduction]
            self._flat, self._scratch = (
                np.frombuffer(memory, _UNSIGNED[dtype]) for memory in (memory_of(flat), scratch.memory)
            )
        elif dtype.is_complex and reduction is Reduction.PRODUCT:
            self._operator = _multiply_complex
        elif dtype.is_complex:
            # PyTorch adds no complex halves on CPUs; the two parts of any complex number add up by themselves.
            self._flat, self._scratch = (torch.view_as_real(part).view(-1) for part in (flat, self._scratch))
            self._parts = 2

    def combine(self, first: int, end: int, *, theirs_first: bool = False) -> None:
        """Combines scratch[: end - first] into flat[first:end].

        Args:
            first: Element.
            end: Element.
            theirs_first: Whether the scratch stands first: of two NaNs the first one's bits stay.
        """
        ours, theirs = self._flat[first * self._parts : end * self._parts], self._scratch[: (end - first) * self._parts]
        if theirs_first:
            self._operator(theirs, ours, out=ours)
        else:
            self._operator(ours, theirs, out=ours)

    def gather_up(self, count: int) -> None:
        """Combines `count` elements of the second half of the scratch into those of the first.

        They are those of the next rank, which in the ring puts its own first.
        """
        half = self._scratch.shape[0] // 2
        found, own = self._scratch[: count * self._parts], self._scratch[half : half + count * self._parts]
        self._operator(own, found, out=found)

    def combine_rows(self, own: int, steps: Sequence[tuple[int, int]]) -> None:
        """Combines `flat`, as row `own` of the scratch, with the other rows, and puts the result in its place.

        Args:
            own: The row that `flat` is; all rows are as long.
            steps: Which row is combined into which, the last one into that of the result.
        """
        count = self._flat.shape[0]  # len() of a tensor is slow
        rows = [self._scratch[row * count : (row + 1) * count] for row in range(len(steps) + 1)]
        rows[own] = self._flat
        *early, (one, other) = steps
        for into, source in early:
            self._operator(rows[into], rows[source], out=rows[into])
        self._operator(rows[one], rows[other], out=self._flat)


def _check_reduction(reduction: Reduction, dtype: torch.dtype) -> None:
    if dtype in _NO_ARITHMETIC:
        raise ConfigError(f"{dtype} has no arithmetic: it can be sent and gathered, but not reduced. Convert it first.")
    if dtype.is_complex and reduction in (Reduction.MIN, Reduction.MAX):
        raise ConfigError(f"{reduction.name} of {dtype} does not exist: complex numbers have no order.")
    if (dtype.is_complex or dtype.is_floating_point) and reduction >= Reduction.BAND:
        raise ConfigError(f"{reduction.name} works on whole numbers and booleans, not on {dtype}.")


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
