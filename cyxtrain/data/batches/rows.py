"""Rows of data, and how a user's arrays become rows."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from numbers import Number
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from cyxtrain.config.settings import is_number
from cyxtrain.data.batches.structure import Tree, fields_of, map_tree, named_tensors, num_rows, same_sequence, tensors
from cyxtrain.environment.accelerator import to_device
from cyxtrain.errors import ConfigError, brief, shortened

NAMES = ("X", "y", "sample_weight")
SAMPLED_ROWS = 1024

# PyTorch gathers no rows of these; the same bits under a signed name it does.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


class Rows(NamedTuple):
    """Inputs, targets or None, and weights, shape (rows,), or None: a batch, or a part of one."""

    inputs: Tree
    targets: Tree | None
    weights: Tensor | None

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Rows:
        """Return rows with the result of a function for each tensor."""
        return Rows(*(map_tree(function, part) for part in self))

    def tensors(self) -> list[Tensor]:
        """Return all tensors."""
        return [tensor for part in self for tensor in tensors(part)]

    def named(self) -> list[tuple[str, Tensor]]:
        """Return each tensor with its name, such as "X", "y" or "X['image']"."""
        return [found for name, part in zip(NAMES, self, strict=True) for found in named_tensors(part, name)]

    def check_lengths(self) -> None:
        """Raise ConfigError if parts have different numbers of rows."""
        count, (first, _) = num_rows(self.inputs), self.named()[0]
        for name, tensor in self.named():
            if len(tensor) != count:
                is_list = isinstance(self.inputs, list)
                hint = " (A list of arrays is several inputs; give rows as DataLoader(rows).)" if is_list else ""
                raise ConfigError(
                    f"{first} and {name} have different lengths: {count} and {len(tensor)} rows. Each row needs its "
                    f"own.{hint}"
                )


def column_code(values: Any) -> str:
    """Return code that makes a column of y, whether it is a tensor, an array, a table's Series or a list."""
    name = getattr(values, "name", None)
    if callable(getattr(values, "to_frame", None)) and name not in (None, ""):
        return f"df[[{name!r}]]"
    if values is None or isinstance(values, (Tensor, np.ndarray)):
        return "y.reshape(-1, 1)"
    return "numpy.asarray(y).reshape(-1, 1)"


def columns_of(values: Any) -> list[Any]:
    """Return the names of a table's columns, such as those of pandas and Polars; none for other data."""
    if isinstance(values, (Tensor, np.ndarray)) or not callable(getattr(values, "__array__", None)):
        return []
    return list(getattr(values, "column_names", getattr(values, "columns", ())))


def as_rows(inputs: Any, targets: Any = None, weights: Any = None) -> Rows:
    """Return a user's arrays as rows; lengths are not checked. Raises ConfigError if they are not arrays."""
    own = _as_tree(inputs, "X")
    if own is None:
        raise ConfigError("X has no rows: it is None, or all of its parts are.")
    return Rows(own, _as_tree(targets, "y"), _as_weights(weights))


def _as_tree(values: Any, name: str) -> Any:
    """Return a user's arrays as tensors, or None: one, or several in a dictionary, a tuple or a list."""
    if values is None:
        return None
    if isinstance(values, PackedSequence):
        raise ConfigError(
            f"{name} is a PackedSequence, whose tensors have no row per sample: give padded rows and their lengths, "
            "and call pack_padded_sequence in the model's forward."
        )
    values = values if (named := fields_of(values)) is None else named
    if isinstance(values, Mapping):
        unnamed = [key for key in values if not isinstance(key, str)]
        if unnamed:
            raise ConfigError(f"{name} is a dictionary whose keys must be strings, got {unnamed[0]!r}.")
        if not values:
            raise ConfigError(f"{name} has no rows: it is an empty dictionary.")
        return _unless_none({key: _as_tree(part, f"{name}[{key!r}]") for key, part in values.items()})
    if not _are_several(values):
        return _as_tensor(values, name)
    return _unless_none(same_sequence(values, (_as_tree(part, f"{name}[{n}]") for n, part in enumerate(values))))


def _unless_none(tree: Any) -> Any:
    """Return a tree; None if all of its parts are None."""
    return None if all(part is None for part in (tree.values() if isinstance(tree, dict) else tree)) else tree


def _are_several(values: Any) -> bool:
    """Return whether a tuple or list holds arrays, one per input; of numbers or lists, it is an array."""
    if not isinstance(values, (tuple, list)):
        return False
    kinds, parts = (Tensor, np.ndarray), [part for part in values if part is not None]
    several = all(isinstance(part, kinds) or fields_of(part) is not None or _are_several(part) for part in parts)
    return len(parts) > 0 and several


def holds_tensors(values: Any) -> bool:
    """Return whether a user's arrays are tensors."""
    named = fields_of(values)
    if named is not None or isinstance(values, (tuple, list)):
        parts = [part for part in values if part is not None][:1] if named is None else named.values()
        return any(map(holds_tensors, parts))
    return isinstance(values, Tensor)


def _as_weights(weights: Any) -> Tensor | None:
    if weights is None:
        return None
    found = _as_tensor(weights, "sample_weight")
    found = found if found.is_floating_point() or found.is_complex() else found.to(torch.float64)
    if found.dim() != 1 or found.is_complex():
        raise ConfigError(f"sample_weight must be one number per row, shape (n,); it has shape {list(found.shape)}.")
    if bool((found < 0).any()):
        raise ConfigError("sample_weight must not be negative: a row that does not count has weight 0.")
    return found


def rows_not_finite(rows: Tensor) -> list[int]:
    """Return which rows hold NaN or an infinity."""
    found: list[int] = (~rows.reshape(len(rows), -1).isfinite()).any(1).nonzero().reshape(-1).tolist()
    return found


def _as_tensor(values: Any, name: str) -> Tensor:
    tensor = values.detach() if isinstance(values, Tensor) else _from_numpy(_as_array(values, name))
    if tensor.layout is not torch.strided:
        raise ConfigError(f"{name} is a sparse tensor, which cannot be divided into rows: give {name}.to_dense().")
    if tensor.dim() == 0:
        raise ConfigError(f"{name} is a single number; it must be an array with a row per sample.")
    return tensor


def _as_array(values: Any, name: str) -> np.ndarray[Any, Any]:
    if isinstance(values, np.ma.MaskedArray):
        raise ConfigError(f"{name} is a masked array, and the mask would be lost: fill it, with {name}.filled(value).")
    try:
        array = np.asarray(values)
    except (TypeError, ValueError) as error:  # such as lists of different lengths
        raise ConfigError(f"{name} cannot be made an array: {error}") from error
    if array.dtype.kind in "fiubc":
        return array
    columns = {repr(each): _first_bad(np.asarray(values[each])) for each in columns_of(values)}
    wrong = [f"{column} ({bad})" for column, bad in columns.items() if bad]
    bad = _first_bad(array)
    where = f" in column {shortened(wrong)}" * bool(wrong) or f" ({bad})" * bool(bad)
    remedy = "Encode texts as numbers, fill missing values, and pad rows of different lengths first."
    if columns and not wrong:
        remedy = f"Its columns are of different kinds: give {name}.astype('float32')."
    elif name == "y":
        remedy = "Fill missing values; number classes, as in numpy.unique(y, return_inverse=True)[1]."
    raise ConfigError(f"{name} holds {array.dtype} values{where}; it must hold numbers. {remedy}")


def _first_bad(array: np.ndarray[Any, Any]) -> str:
    """Return the first value that is NaN or not a number; "" if there is none."""
    if array.dtype.kind in "iub":
        return ""
    return next((brief(str(each)) for each in array.reshape(-1) if not isinstance(each, Number) or each != each), "")


def _from_numpy(array: np.ndarray[Any, Any]) -> Tensor:
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


def gather(tensor: Tensor, rows: Tensor, *, pinned: bool = False) -> Tensor:
    """Return rows by number, of any dtype; rows on the CPU go to pinned memory if `pinned`."""
    if tensor.dtype in _SIGNED:
        return gather(tensor.view(_SIGNED[tensor.dtype]), rows, pinned=pinned).view(tensor.dtype)
    if not tensor.is_cpu:
        return tensor.index_select(0, rows if rows.device == tensor.device else to_device(rows, tensor.device))
    if pinned:
        out = torch.empty((rows.shape[0], *tensor.shape[1:]), dtype=tensor.dtype, device="cpu", pin_memory=True)
        return torch.index_select(tensor, 0, rows, out=out)
    return tensor.index_select(0, rows)


def sampled_hash(tensor: Tensor, rows: int = SAMPLED_ROWS) -> str:
    """Return a hash of up to that many rows, evenly spaced, the first and the last among them."""
    tensor = tensor if tensor.dim() else tensor.reshape(1)
    count = min(len(tensor), rows)
    chosen = torch.from_numpy(np.linspace(0, len(tensor) - 1, count).astype(np.int64))
    sample = gather(tensor, chosen).cpu().contiguous()
    return xxhash.xxh3_64_hexdigest(sample.reshape(-1).view(torch.uint8).numpy().data)


def weighted_by_class(rows: Rows, weights: Mapping[Any, Any], ignored: int | None) -> Rows:
    """Return rows whose weights are multiplied by those of their classes; the class `ignored` needs no weight."""
    targets = rows.targets
    if not isinstance(targets, Tensor) or targets.numel() != len(targets) or targets.is_complex():
        raise ConfigError("class_weight needs one class number per row in y; for other targets, give sample_weight.")
    wrong = [value for value in weights.values() if not is_number(value) or not 0 <= value < math.inf]
    if wrong:
        raise ConfigError(f"class_weight must hold numbers of at least 0, got {wrong[0]!r}.")
    classes, which = torch.unique(targets.reshape(-1), return_inverse=True)
    known = weights if ignored is None else {ignored: 0.0, **weights}
    missing = [number for number in classes.tolist() if number not in known]
    if missing:
        raise ConfigError(
            f"class_weight has no weight for class {shortened(f'{number:g}' for number in missing)}, which y holds; it "
            f"has one for class {shortened(map(repr, weights)) or 'none'}: give one for each class, by its number."
        )
    table = [float(known[number]) for number in classes.tolist()]
    factors = torch.tensor(table, dtype=torch.float64, device=targets.device)[which]
    own = rows.weights
    return rows._replace(weights=factors if own is None else own * factors.to(own.device))
