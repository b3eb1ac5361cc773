"""The user's arrays as rows: what a batch is gathered from, and what is wrong with them before anything starts."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from cyxtrain.data.tree import Tree, leaves, map_tree, num_rows, tensors
from cyxtrain.errors import ConfigError

_SAMPLED_ROWS = 1024
_SCAN_ELEMENTS = 1 << 22
_NAMES = ("X", "y", "sample_weight")

# PyTorch gathers no rows of these; the same bits under a signed name it does.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


class Rows(NamedTuple):
    """Rows of the data together: a batch, or some of it.

    Attributes:
        inputs: What the model is given.
        targets: What the loss compares with, or None.
        weights: How much each row counts, shape (rows,), or None: all alike.
    """

    inputs: Tree
    targets: Tree | None
    weights: Tensor | None

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Rows:
        """Returns rows with what a function makes of each tensor."""
        return Rows(*(None if part is None else map_tree(function, part) for part in self))  # type: ignore[arg-type]

    def tensors(self) -> list[Tensor]:
        """Returns all tensors."""
        return [tensor for part in self for tensor in tensors(part)]


class ArraySource:
    """Rows of NumPy arrays or tensors, with or without targets. Nothing is copied, memory maps stay on disk.

    Args:
        inputs: X, shape (n, ...); or a dictionary, a tuple or a list of such.
        targets: y, shape (n, ...), or None; or several, as X.
        weights: How much each row counts, shape (n,), or None: all alike.

    Raises:
        ConfigError: Not arrays, no rows, or parts of different length.
    """

    def __init__(self, inputs: Any, targets: Any = None, weights: Any = None) -> None:
        if isinstance(inputs, (DataLoader, Dataset)):
            raise ConfigError(
                f"X is a {type(inputs).__name__}; this version takes NumPy arrays and tensors: fit(X, y, config)."
            )
        self._first_row = 0  # in the arrays that the user gave
        self.is_numpy = not _holds_tensors(inputs)
        own = as_tree(inputs, "X")
        if not tensors(own) or num_rows(own) == 0:
            raise ConfigError("X has no rows: there is nothing to train on or to evaluate.")
        self.rows = Rows(own, None if targets is None else as_tree(targets, "y"), _as_weights(weights))
        self._check_lengths()

    def _check_lengths(self) -> None:
        count, (first, _) = len(self), self.named()[0]
        for name, tensor in self.named():
            if len(tensor) != count:
                hint = " (A list of arrays is several inputs.)" if isinstance(self.rows.inputs, list) else ""
                raise ConfigError(
                    f"{first} and {name} have different lengths: {count} and {len(tensor)} rows. Each row needs its "
                    f"own.{hint}"
                )

    def __len__(self) -> int:
        return num_rows(self.rows.inputs)

    @property
    def inputs(self) -> Tree:
        """X."""
        return self.rows.inputs

    @property
    def targets(self) -> Tree | None:
        """y, or None."""
        return self.rows.targets

    def named(self) -> list[tuple[str, Tensor]]:
        """Returns each tensor with its name, such as "X", "y" or "X['image']"."""
        return [found for name, part in zip(_NAMES, self.rows, strict=True) for found in leaves(part, name)]

    def gather(self, indices: np.ndarray[Any, np.dtype[np.int64]]) -> Rows:
        """Returns rows by number, in that order."""
        chosen = torch.from_numpy(indices.copy() if not indices.flags.writeable else indices)
        return self.rows.mapped(lambda tensor: _gather(tensor, chosen))

    def slice(self, first: int, end: int) -> Rows:
        """Returns neighbouring rows, as copies: a model may change its input in place."""
        return self.rows.mapped(lambda tensor: _copy(tensor[first:end]))

    def part(self, first: int, end: int) -> ArraySource:
        """Returns neighbouring rows as a source of their own; a view."""
        part = object.__new__(ArraySource)
        part._first_row = self._first_row + first
        part.is_numpy = self.is_numpy
        part.rows = self.rows.mapped(lambda tensor: tensor[first:end])
        return part

    def weighted(self, factors: Tensor) -> ArraySource:
        """Returns the same rows, each counting so many times as much, shape (n,)."""
        part, weights = self.part(0, len(self)), self.rows.weights
        part.rows = part.rows._replace(weights=factors if weights is None else weights * factors.to(weights.device))
        return part

    def facts(self, name: str) -> dict[str, Any]:
        """Returns what must be the same on every rank: shapes, dtypes and a hash of up to 1,024 rows."""
        facts: dict[str, Any] = {}
        for what, tensor in self.named():
            label = f"{name} {what}"
            facts[f"{label}: shape"] = list(tensor.shape)
            facts[f"{label}: dtype"] = str(tensor.dtype).removeprefix("torch.")
            # Of weights all count: a rare class may have its own.
            rows = len(tensor) if what == _NAMES[-1] else _SAMPLED_ROWS
            facts[f"{label}: hash of its values"] = sampled_hash(tensor, rows)
        return facts

    def digest(self) -> str:
        """Returns a digest of all facts: how a checkpoint knows the data that its run has seen."""
        return xxhash.xxh3_64_hexdigest(json.dumps(self.facts("data")).encode())

    def not_finite(self, part: int, parts: int) -> tuple[str, int]:
        """Returns what holds NaN or infinities: the first of X, else of y, such as "row 7 of X holds nan"; how many.

        Args:
            part: Which share of the rows to look through, from 0.
            parts: How many there are: each rank takes one.
        """
        first, end = len(self) * part // parts, len(self) * (part + 1) // parts
        text, wrong = "", set[int]()
        for name, tensor in self.named():
            if not tensor.is_floating_point() or tensor.numel() == 0:
                continue
            rows = max(1, _SCAN_ELEMENTS // tensor[0].numel())
            for start in range(first, end, rows):
                piece = tensor[start : min(start + rows, end)]
                # A sum is not finite where any element is not; it may overflow too, so look again.
                found = [] if bool(piece.sum().isfinite()) else rows_not_finite(piece)
                wrong.update(start + row for row in found)
                if found and not text:
                    values = piece[found[0]].reshape(-1)
                    bad = values[~values.isfinite()][0].item()
                    text = f"row {self._first_row + start + found[0]} of {name} holds {bad}"
        return text, len(wrong)


def as_tree(values: Any, name: str) -> Tree:
    """Returns a user's arrays as tensors: one, or several in a dictionary, a tuple or a list.

    Raises:
        ConfigError: They are no arrays, or a name is no text.
    """
    if isinstance(values, Mapping):
        unnamed = [key for key in values if not isinstance(key, str)]
        if unnamed:
            raise ConfigError(f"{name} is a dictionary whose keys must be names, and {unnamed[0]!r} is none.")
        if not values:
            raise ConfigError(f"{name} has no rows: it is a dictionary of nothing.")
        return {key: as_tree(part, f"{name}[{key!r}]") for key, part in values.items()}
    if not _are_several(values):
        return _as_tensor(values, name)
    parts = [as_tree(part, f"{name}[{number}]") for number, part in enumerate(values)]
    if isinstance(values, list):
        return parts
    make: Callable[[list[Tree]], tuple[Tree, ...]] = getattr(values, "_make", tuple)  # a named tuple's own
    return make(parts)


def _are_several(values: Any) -> bool:
    """Returns whether a tuple or list holds arrays, one per input; one of numbers, or of lists, is itself an array."""
    if not isinstance(values, (tuple, list)):
        return False
    kinds = (Tensor, np.ndarray, Mapping)
    return len(values) > 0 and all(isinstance(part, kinds) or _are_several(part) for part in values)


def _holds_tensors(values: Any) -> bool:
    if isinstance(values, (tuple, list, Mapping)):
        return any(_holds_tensors(part) for part in (values.values() if isinstance(values, Mapping) else values[:1]))
    return isinstance(values, Tensor)


def _as_weights(weights: Any) -> Tensor | None:
    if weights is None:
        return None
    found = _as_tensor(weights, "sample_weight")
    found = found if found.is_floating_point() or found.is_complex() else found.to(torch.float64)
    if found.dim() != 1 or found.is_complex():
        raise ConfigError(f"sample_weight must be one number per row, shape (n,); it has shape {list(found.shape)}.")
    if bool((found < 0).any()):
        raise ConfigError("sample_weight must not be negative: what counts for nothing has weight 0.")
    return found


def rows_not_finite(rows: Tensor) -> list[int]:
    """Returns which rows hold NaN or an infinity."""
    found: list[int] = (~rows.reshape(len(rows), -1).isfinite()).any(1).nonzero().reshape(-1).tolist()
    return found


def _as_tensor(values: Any, name: str) -> Tensor:
    tensor = values.detach() if isinstance(values, Tensor) else _from_numpy(_as_array(values, name), name)
    if tensor.layout is not torch.strided:
        raise ConfigError(f"{name} is a sparse tensor, whose rows cannot be dealt: give {name}.to_dense().")
    if tensor.dim() == 0:
        raise ConfigError(f"{name} is a single number; it must be an array with a row per sample.")
    return tensor


def _as_array(values: Any, name: str) -> np.ndarray[Any, Any]:
    if isinstance(values, np.ma.MaskedArray):
        raise ConfigError(f"{name} is a masked array, and the mask would be lost: fill it, with {name}.filled(value).")
    if isinstance(values, np.ndarray):
        return values
    try:
        return np.asarray(values)
    except (TypeError, ValueError) as error:  # such as lists of different lengths
        raise ConfigError(f"{name} cannot be made an array: {error}") from error


def _from_numpy(array: np.ndarray[Any, Any], name: str) -> Tensor:
    if array.dtype.kind not in "fiubc":
        raise ConfigError(
            f"{name} holds {array.dtype} values; it must hold numbers. "
            "Rows of different lengths must be padded, and texts encoded, first."
        )
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if array.dtype.name in ("float96", "float128", "longdouble"):
        array = array.astype(np.float64)
    if any(stride < 0 or stride % array.itemsize for stride in array.strides):
        array = np.ascontiguousarray(array)
    with warnings.catch_warnings():
        # Read-only arrays are fine: nothing here writes to them.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


def _gather(tensor: Tensor, rows: Tensor) -> Tensor:
    if tensor.dtype in _SIGNED:
        return _gather(tensor.view(_SIGNED[tensor.dtype]), rows).view(tensor.dtype)
    return tensor.index_select(0, rows if tensor.is_cpu else rows.to(tensor.device))


def _copy(rows: Tensor) -> Tensor:
    return rows.clone(memory_format=torch.contiguous_format)


def sampled_hash(tensor: Tensor, rows: int = _SAMPLED_ROWS) -> str:
    """Returns a hash of up to that many rows, evenly spaced, the first and the last among them."""
    count = min(len(tensor), rows)
    chosen = torch.from_numpy(np.linspace(0, len(tensor) - 1, count).astype(np.int64))
    sample = _gather(tensor, chosen).cpu().contiguous()
    return xxhash.xxh3_64_hexdigest(sample.reshape(-1).view(torch.uint8).numpy().data)
