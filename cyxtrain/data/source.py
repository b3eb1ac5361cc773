"""The user's arrays as rows: what a batch is gathered from, and what is wrong with them before anything starts."""

from __future__ import annotations

import json
import warnings
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from cyxtrain.errors import ConfigError

_SAMPLED_ROWS = 1024
_SCAN_ELEMENTS = 1 << 22

# PyTorch gathers no rows of these; the same bits under a signed name it does.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


class ArraySource:
    """Rows of a NumPy array or a tensor, with or without targets. Nothing is copied, memory maps stay on disk.

    Args:
        inputs: X, shape (n, ...).
        targets: y, shape (n, ...), or None.

    Raises:
        ConfigError: Not arrays, no rows, or X and y of different length.
    """

    def __init__(self, inputs: Any, targets: Any = None) -> None:
        if isinstance(inputs, (DataLoader, Dataset)):
            raise ConfigError(
                f"X is a {type(inputs).__name__}; this version takes NumPy arrays and tensors: fit(X, y, config)."
            )
        self._first_row = 0  # in the arrays that the user gave
        self.is_numpy = not isinstance(inputs, Tensor)
        self.inputs = _as_tensor(inputs, "X")
        self.targets = None if targets is None else _as_tensor(targets, "y")
        if len(self.inputs) == 0:
            raise ConfigError("X has no rows: there is nothing to train on or to evaluate.")
        if self.targets is not None and len(self.targets) != len(self.inputs):
            raise ConfigError(
                f"X and y have different lengths: {len(self.inputs)} rows and {len(self.targets)} targets. "
                "Each row needs its target."
            )

    def __len__(self) -> int:
        return len(self.inputs)

    def gather(self, indices: np.ndarray[Any, np.dtype[np.int64]]) -> tuple[Tensor, Tensor | None]:
        """Returns (inputs, targets) of rows by number, in that order."""
        rows = torch.from_numpy(indices.copy() if not indices.flags.writeable else indices)
        return _gather(self.inputs, rows), None if self.targets is None else _gather(self.targets, rows)

    def slice(self, first: int, end: int) -> tuple[Tensor, Tensor | None]:
        """Returns (inputs, targets) of neighbouring rows, as copies: a model may change its input in place."""
        return _copy(self.inputs[first:end]), None if self.targets is None else _copy(self.targets[first:end])

    def part(self, first: int, end: int) -> ArraySource:
        """Returns neighbouring rows as a source of their own; a view."""
        part = object.__new__(ArraySource)
        part._first_row = self._first_row + first
        part.is_numpy = self.is_numpy
        part.inputs = self.inputs[first:end]
        part.targets = None if self.targets is None else self.targets[first:end]
        return part

    def facts(self, name: str) -> dict[str, Any]:
        """Returns what must be the same on every rank: shapes, dtypes and a hash of up to 1,024 rows."""
        facts: dict[str, Any] = {}
        for label, tensor in ((f"{name} X", self.inputs), (f"{name} y", self.targets)):
            if tensor is not None:
                facts[f"{label}: shape"] = list(tensor.shape)
                facts[f"{label}: dtype"] = str(tensor.dtype).removeprefix("torch.")
                facts[f"{label}: hash of its values"] = sampled_hash(tensor)
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
        for name, tensor in (("X", self.inputs), ("y", self.targets)):
            if tensor is None or not tensor.is_floating_point() or tensor.numel() == 0:
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
