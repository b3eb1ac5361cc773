"""Rows of data, and how a user's arrays become rows."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from numbers import Number
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from cyxtrain.config.settings import is_number
from cyxtrain.data.batches.stored import StoredTensor, is_stored, refuse_closed, stored_tensor
from cyxtrain.data.batches.structure import Tree, fields_of, map_tree, named_tensors, num_rows, same_sequence, tensors
from cyxtrain.data.batches.tables import check_indexes, columns_of, is_table, table_as_array
from cyxtrain.environment.accelerator import to_device
from cyxtrain.errors import ConfigError, brief, shortened

NAMES = ("X", "y", "sample_weight")
SAMPLED_ROWS = 1024
# Of an HDF5 dataset: each may need a whole chunk of the file.
_SAMPLED_STORED_ROWS = 64

# PyTorch's index_select does not take these types; it takes the same bits as signed integers.
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
        found: list[tuple[str, Tensor]] = []
        for name, part in zip(NAMES, self, strict=True):
            found.extend(named_tensors(part, name))
        return found

    def check_lengths(self) -> None:
        """Raise ConfigError if parts have different numbers of samples."""
        count = num_rows(self.inputs)
        if all(num_rows(tensor) == count for tensor in self.tensors()):
            return
        named = self.named()
        for name, tensor in named:
            if len(tensor) == count:
                continue
            hint = ""
            if isinstance(self.inputs, list):
                hint = " (A list of arrays is several inputs; give samples as DataLoader(samples).)"
            raise ConfigError(
                f"{named[0][0]} and {name} have different lengths: {count} and {len(tensor)} samples. Each sample "
                f"needs its own.{hint}"
            )


def column_code(values: Any) -> str:
    """Return code that makes a column of y, whether it is a tensor, an array, a table's Series or a list."""
    name = getattr(values, "name", None)
    if callable(getattr(values, "to_frame", None)) and name not in (None, ""):
        return f"df[[{name!r}]]"
    if values is None or isinstance(values, (Tensor, np.ndarray)):
        return "y.reshape(-1, 1)"
    return "numpy.asarray(y).reshape(-1, 1)"


def as_rows(inputs: Any, targets: Any = None, weights: Any = None) -> Rows:
    """Return a user's arrays as rows; lengths are not checked. Raises ConfigError if they are not arrays."""
    own = _as_tree(inputs, "X")
    if own is None:
        raise ConfigError("X has no samples: it is None, or all of its parts are.")
    rows = Rows(own, _as_tree(targets, "y"), _as_weights(weights))
    check_indexes(given_arrays(inputs, targets, weights))
    return rows


def given_arrays(*parts: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name of each of a user's arrays, such as "X['image']", and the array; `parts`: X, y and weights."""
    for name, values in zip(NAMES, parts, strict=False):
        yield from _arrays_in(values, name)


def _arrays_in(values: Any, name: str) -> Iterator[tuple[str, Any]]:
    named = fields_of(values)
    if named is None and _are_several(values):
        named = dict(enumerate(values))
    if named is None:
        yield name, values
        return
    for key, part in named.items():
        yield from _arrays_in(part, f"{name}[{key!r}]")


def _as_tree(values: Any, name: str) -> Any:
    """Return a user's arrays as tensors, or None: one, or several in a dictionary, a tuple or a list."""
    if values is None:
        return None
    refuse_closed(values, name)
    if isinstance(values, PackedSequence):
        raise ConfigError(
            f"{name} is a PackedSequence, whose tensors have no row per sample: give padded rows and their lengths, "
            "and call pack_padded_sequence in the model's forward."
        )
    named = fields_of(values)
    if named is not None:
        _check_names(named, name)
        by_name = {key: _as_tree(part, f"{name}[{key!r}]") for key, part in named.items()}
        return None if _are_none(by_name.values()) else by_name
    if not _are_several(values):
        return _as_tensor(values, name)
    parts = [_as_tree(part, f"{name}[{number}]") for number, part in enumerate(values)]
    return None if _are_none(parts) else same_sequence(values, parts)


def _check_names(values: Mapping[Any, Any], name: str) -> None:
    unnamed = [key for key in values if not isinstance(key, str)]
    if unnamed:
        raise ConfigError(f"{name} is a dictionary whose keys must be strings, got {unnamed[0]!r}.")
    if not values:
        raise ConfigError(f"{name} has no samples: it is an empty dictionary.")


def _are_none(parts: Iterable[Any]) -> bool:
    return all(part is None for part in parts)


def _are_several(values: Any) -> bool:
    """Return whether a tuple or list holds arrays, one per input; of numbers or lists, it is an array."""
    if not isinstance(values, (tuple, list)):
        return False
    parts = [part for part in values if part is not None]
    return len(parts) > 0 and all(map(_is_array_or_several, parts))


def _is_array_or_several(part: Any) -> bool:
    is_array = isinstance(part, (Tensor, np.ndarray)) or is_stored(part) or is_table(part)
    return is_array or fields_of(part) is not None or _are_several(part)


def holds_tensors(values: Any) -> bool:
    """Return whether a user's arrays are tensors."""
    named = fields_of(values)
    if named is not None:
        return any(map(holds_tensors, named.values()))
    if isinstance(values, (tuple, list)):
        first = next((part for part in values if part is not None), None)
        return holds_tensors(first)
    return isinstance(values, Tensor)


def _as_weights(weights: Any) -> Tensor | None:
    if weights is None:
        return None
    found = _as_tensor(weights, "sample_weight")
    if not found.is_floating_point() and not found.is_complex():
        found = found.to(torch.float64)
    if found.dim() != 1 or found.is_complex():
        raise ConfigError(f"sample_weight must be one number per sample, shape (n,); it has shape {list(found.shape)}.")
    if bool((found < 0).any()):
        raise ConfigError("sample_weight must not be negative: a sample that does not count has weight 0.")
    return found


def rows_not_finite(rows: Tensor) -> list[int]:
    """Return which rows hold NaN or an infinity."""
    is_wrong = (~rows.reshape(len(rows), -1).isfinite()).any(1)
    found: list[int] = is_wrong.nonzero().reshape(-1).tolist()
    return found


def _as_tensor(values: Any, name: str) -> Tensor:
    stored = stored_tensor(values, name)
    if stored is not None:
        return stored
    if isinstance(values, Tensor):
        tensor = values.detach()
    else:
        array = table_as_array(values, name) if is_table(values) else _as_array(values, name)
        tensor = _from_numpy(array)
    if tensor.layout is not torch.strided:
        raise ConfigError(f"{name} is a sparse tensor, which cannot be divided into samples: give {name}.to_dense().")
    if tensor.dim() == 0:
        raise ConfigError(f"{name} is a single number; it must be an array with a row per sample.")
    return tensor


def _as_array(values: Any, name: str) -> np.ndarray[Any, Any]:
    if isinstance(values, np.ma.MaskedArray):
        raise ConfigError(f"{name} is a masked array, and the mask would be lost: fill it, with {name}.filled(value).")
    try:
        array = np.asarray(values)
    except (TypeError, ValueError) as error:  # such as lists of different lengths
        raise ConfigError(f"{name} cannot be converted to an array: {error}") from error
    if array.dtype.kind not in "fiubc":
        raise _not_numbers(values, array, name)
    return array


def _not_numbers(values: Any, array: np.ndarray[Any, Any], name: str) -> ConfigError:
    """Return the error for an array, made of a user's values, that does not hold numbers."""
    columns = columns_of(values)
    wrong = []
    for column in columns:
        bad = _first_bad(np.asarray(values[column]))
        if bad:
            wrong.append(f"{column!r} ({bad})")
    where = ""
    if wrong:
        where = f" in column {shortened(wrong)}"
    elif bad := _first_bad(array):
        where = f" ({bad})"
    remedy = "Encode strings as numbers, fill missing values, and pad rows of different lengths first."
    if columns and not wrong:
        remedy = f"Its columns are of different kinds: give {name}.astype('float32')."
    elif name == "y":
        remedy = "Fill missing values; number classes, as in numpy.unique(y, return_inverse=True)[1]."
    return ConfigError(f"{name} holds {array.dtype} values{where}; it must hold numbers. {remedy}")


def _first_bad(array: np.ndarray[Any, Any]) -> str:
    """Return the first value that is NaN or not a number; "" if all are numbers."""
    if array.dtype.kind in "iub":
        return ""
    for value in array.reshape(-1):
        if not isinstance(value, Number) or value != value:
            return brief(str(value))
    return ""


def _from_numpy(array: np.ndarray[Any, Any]) -> Tensor:
    if not array.dtype.isnative:  # PyTorch has neither foreign byte orders nor extended precision
        array = array.astype(array.dtype.newbyteorder("="))
    if array.dtype.name in ("float96", "float128", "longdouble"):
        array = array.astype(np.float64)
    # torch.from_numpy refuses strides that are negative or not whole items.
    if any(stride < 0 or stride % array.itemsize for stride in array.strides):
        array = np.ascontiguousarray(array)
    with warnings.catch_warnings():
        # Read-only arrays are fine: nothing here writes to them.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


def gather(tensor: Tensor, rows: Tensor, *, pinned: bool = False) -> Tensor:
    """Return rows by number, of any dtype; rows on the CPU go to pinned memory if `pinned`."""
    if isinstance(tensor, StoredTensor):
        found, places = tensor.sorted_rows(rows.numpy())
        return gather(found, places, pinned=pinned)
    if tensor.dtype in _SIGNED:
        return gather(tensor.view(_SIGNED[tensor.dtype]), rows, pinned=pinned).view(tensor.dtype)
    if not tensor.is_cpu:
        if rows.device != tensor.device:
            rows = to_device(rows, tensor.device)
        return tensor.index_select(0, rows)
    if pinned:
        # Straight into pinned memory, without a second copy.
        out = torch.empty((rows.shape[0], *tensor.shape[1:]), dtype=tensor.dtype, device="cpu", pin_memory=True)
        return torch.index_select(tensor, 0, rows, out=out)
    return tensor.index_select(0, rows)


def sampled_hash(tensor: Tensor, rows: int = SAMPLED_ROWS) -> str:
    """Return a hash of up to that many samples, evenly spaced, the first and the last among them."""
    if tensor.dim() == 0:
        tensor = tensor.reshape(1)
    if isinstance(tensor, StoredTensor):
        rows = min(rows, _SAMPLED_STORED_ROWS)
    count = min(len(tensor), rows)
    chosen = torch.from_numpy(np.linspace(0, len(tensor) - 1, count).astype(np.int64))
    sample = gather(tensor, chosen).cpu().contiguous()
    return xxhash.xxh3_64_hexdigest(sample.reshape(-1).view(torch.uint8).numpy().data)


def weighted_by_class(rows: Rows, weights: Mapping[Any, Any], ignored: int | None) -> Rows:
    """Return rows, with their weights multiplied by their classes' weights; the class `ignored` needs none."""
    targets = rows.targets
    if not isinstance(targets, Tensor) or targets.numel() != len(targets) or targets.is_complex():
        raise ConfigError("class_weight needs one class number per sample in y; for other targets, give sample_weight.")
    for value in weights.values():
        if not is_number(value) or not 0 <= value < math.inf:
            raise ConfigError(f"class_weight must hold numbers of at least 0, got {value!r}.")
    classes, which = torch.unique(targets.reshape(-1), return_inverse=True)
    table = _weights_of(classes.tolist(), weights, ignored)
    factors = torch.tensor(table, dtype=torch.float64, device=targets.device)[which]
    if rows.weights is not None:
        factors = rows.weights * factors.to(rows.weights.device)
    return rows._replace(weights=factors)


def _weights_of(classes: list[float], weights: Mapping[Any, Any], ignored: int | None) -> list[float]:
    known = dict(weights)
    if ignored is not None:
        known.setdefault(ignored, 0.0)
    missing = [f"{number:g}" for number in classes if number not in known]
    if missing:
        raise ConfigError(
            f"class_weight has no weight for class {shortened(missing)}, which y holds; it has one for class "
            f"{shortened(map(repr, weights)) or 'none'}: give one for each class, by its number."
        )
    return [float(known[number]) for number in classes]
