"""Tables of pandas, Polars and PyArrow as arrays. The libraries are the user's: they are not imported here.

Columns of numbers and booleans, of any type, become one array, and missing values NaN. Other columns are refused by
name: nothing is encoded.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cyxtrain.errors import ConfigError, brief, shortened

_TABLES = {
    "pandas": ("DataFrame", "Series"),
    "polars": ("DataFrame", "LazyFrame", "Series"),
    "pyarrow": ("Table", "RecordBatch", "ChunkedArray", "Array"),
}
_NUMBERS = "fiubc"
# What the names of types begin with, in the three libraries and, for objects, in Python; in lower case.
_KINDS = {
    "lists": r"(large_|fixed_size_)?list|array|struct|map|tuple|dict$|ndarray",
    "text": r"(large_)?str",
    "categories": r"cat|enum|dict",
    "dates": r"date|time|duration|period|month",
    "missing values alone": r"null",
}
_ARROW_NUMBERS = ("is_boolean", "is_integer", "is_floating", "is_decimal")
_ENCODE = (
    "Encode text and categories with skrub.TableVectorizer or scikit-learn's encoders, or give their codes as an input "
    "of their own, for an embedding."
)
_REMEDIES = {
    "text": _ENCODE,
    "categories": _ENCODE,
    "dates": "Make numbers of dates, with skrub.TableVectorizer or as their year and month.",
    "lists": "Give lists as an input of their own, through numpy.stack.",
    "missing values alone": "Leave out columns without values.",
}
_CONVERT = "Convert objects to numbers, as .astype('float64') does in pandas."
_Array = npt.NDArray[Any]


def is_table(values: Any) -> bool:
    """Return whether values are a table or a column of pandas, Polars or PyArrow."""
    return _library_of(values) != ""


def columns_of(values: Any) -> list[Any]:
    """Return the names of a table's columns, as of pandas and Polars; none for other data."""
    if _is_lazy(values):
        return list(values.collect_schema().names())
    if isinstance(values, np.ndarray) or not callable(getattr(values, "__array__", None)):
        return []
    # PyArrow calls them `column_names`, pandas and Polars `columns`.
    return list(getattr(values, "column_names", getattr(values, "columns", ())))


def table_as_array(values: Any, name: str) -> _Array:
    """Return a table as an array of shape (rows, columns), and a single column as (rows,).

    Columns of several types get NumPy's common type. A query of Polars is run by its streaming engine. Cost: a copy,
    except of a table of pandas whose columns have the same type of NumPy.

    Raises:
        ConfigError: A column does not hold numbers or booleans. The error lists all of them; `name` is the table's.
    """
    if _is_lazy(values):
        values = values.collect(engine="streaming")
    is_frame = len(getattr(values, "shape", ())) == 2
    columns = [*_columns_in(values, is_frame)]
    wrong = [column for column in columns if column.dtype.kind not in _NUMBERS]
    if wrong:
        raise _not_numbers(wrong, name, is_frame)
    if not is_frame:
        return columns[0].read()
    if not columns:
        raise ConfigError(f"{name} is a table without columns: give at least one column of numbers.")
    if all(column.is_plain_in_pandas for column in columns) and len({*values.dtypes}) == 1:
        return np.asarray(values)
    found = np.empty((len(values), len(columns)), np.result_type(*{column.dtype for column in columns}))
    for number, column in enumerate(columns):
        found[:, number] = column.read()
    return found


def check_indexes(arrays: Iterable[tuple[str, Any]]) -> None:
    """Raise ConfigError if tables of pandas have different indexes; `arrays`: the user's, with their names."""
    if "pandas" not in sys.modules:
        return
    tables = [(name, values) for name, values in arrays if _library_of(values) == "pandas"]
    for name, values in tables[1:]:
        first_name, first = tables[0]
        # Different lengths have an error of their own.
        if len(values) == len(first) and not values.index.equals(first.index):
            _compare_labels(first_name, first.index, name, values.index)


def check_format(dataset: Any) -> None:
    """Raise ConfigError for a dataset of Hugging Face without a format whose rows hold lists or images."""
    chosen = getattr(dataset, "format", None)
    if not isinstance(chosen, Mapping) or "format_kwargs" not in chosen or chosen["type"] is not None:
        return
    rows = dataset[:1]
    for name, value in ((name, values[0]) for name, values in rows.items() if values):
        if isinstance(value, list) or type(value).__module__.startswith("PIL."):
            raise ConfigError(
                f"X is a datasets.Dataset without a format: its column {name!r} gives a {type(value).__name__}, not a "
                'tensor, for each sample. Give X.with_format("torch").'
            )


@dataclass(frozen=True)
class _Column:
    """A column of a library, with its name in the table."""

    name: Any
    library: str
    values: Any

    @functools.cached_property
    def dtype(self) -> np.dtype[Any]:
        """Type of its numbers in an array; object if it holds something else."""
        plain = self._plain_dtype()
        if self.library == "pandas":
            missing = self.values.isna().any()
        elif self.library == "polars":
            missing = self.values.null_count()
        else:
            missing = self.values.null_count
        if missing and plain.kind in "biu":
            return np.result_type(plain, np.float32)
        return plain

    def _plain_dtype(self) -> np.dtype[Any]:
        """Return the type of its numbers if none is missing; object if it holds something else."""
        kind: Any = getattr(self.values, "type" if self.library == "pyarrow" else "dtype")
        if self.library == "pandas":
            if kind.kind not in _NUMBERS:
                return np.dtype(object)
            # Nullable and sparse types have NumPy's in an attribute.
            return np.dtype(getattr(kind, "numpy_dtype", getattr(kind, "subtype", kind)))
        if self.library == "polars":
            is_number = kind.is_numeric() or str(kind) == "Boolean"
        else:
            is_number = any(getattr(sys.modules["pyarrow"].types, question)(kind) for question in _ARROW_NUMBERS)
        if not is_number:
            return np.dtype(object)
        plain = np.dtype(kind.to_pandas_dtype() if self.library == "pyarrow" else self.values.head(0).to_numpy().dtype)
        if plain.kind not in _NUMBERS:  # decimals, and integers of 128 bits
            return np.dtype(np.float64)
        return plain

    @property
    def is_plain_in_pandas(self) -> bool:
        """Whether it is a view of an array in pandas."""
        return self.library == "pandas" and isinstance(self.values.dtype, np.dtype)

    def read(self) -> _Array:
        """Return its numbers as an array, with NaN for missing ones."""
        values = self.values
        if self.library == "pandas" and not self.is_plain_in_pandas:
            values = values.to_numpy(dtype=self.dtype, na_value=np.nan)
        elif self.library == "polars" and self.dtype.kind == "f":
            values = values.cast(getattr(sys.modules["polars"], self.dtype.name.capitalize()))
        elif self.library == "pyarrow" and self.dtype.kind == "f":
            values = values.cast(self.dtype.name, safe=False)  # rounds integers above 2**53, as NumPy does
        return np.asarray(values)

    def kind(self) -> str:
        """Return what it holds instead of numbers, such as "text"."""
        if self.library == "pyarrow":
            return _kind_of(str(self.values.type))
        label = str(self.values.dtype)
        if label.lower() != "object":
            return _kind_of(label)
        present = self.values.dropna() if self.library == "pandas" else self.values.drop_nulls()
        return _kind_of(next((type(value).__name__ for value in present), "null"))


def _kind_of(label: str) -> str:
    for kind, beginning in _KINDS.items():
        if re.match(beginning, label.lower()):
            return kind
    return f"objects ({brief(label, 40)})"


def _library_of(values: Any) -> str:
    """Return which library a table or a column is of; "" for other values."""
    for library, names in _TABLES.items():
        module = sys.modules.get(library)
        # Nobody has a table of a library that is not imported, or has only begun to be.
        if isinstance(values, tuple(getattr(module, name, ()) for name in names)):
            return library
    return ""


def _is_lazy(values: Any) -> bool:
    return isinstance(values, getattr(sys.modules.get("polars"), "LazyFrame", ()))


def _columns_in(values: Any, is_frame: bool) -> Iterator[_Column]:
    library = _library_of(values)
    named: Any = [(None, values)]
    if is_frame and library == "pandas":
        named = values.items()
    elif is_frame:
        named = zip(columns_of(values), values.get_columns() if library == "polars" else values.columns, strict=True)
    for name, column in named:
        if getattr(getattr(column, "dtype", None), "pyarrow_dtype", None) is None:
            yield _Column(name, library, column)
        else:  # a type of Arrow in pandas
            yield _Column(name, "pyarrow", column.array.__arrow_array__())


def _not_numbers(wrong: Sequence[_Column], name: str, is_frame: bool) -> ConfigError:
    """Return the error for columns that do not hold numbers."""
    kinds = [column.kind() for column in wrong]
    what = f"a column of {kinds[0]}"
    if is_frame:
        found = shortened(f"{column.name!r} ({kind})" for column, kind in zip(wrong, kinds, strict=True))
        what = f"a table with column {found}"
    remedies = {kind: _REMEDIES.get(kind, _CONVERT) for kind in kinds}
    if name.startswith("y"):
        for kind in {"text", "categories"} & remedies.keys():
            remedies[kind] = "Number the classes, as in numpy.unique(y, return_inverse=True)[1]."
    return ConfigError(
        f"{name} is {what}; it must hold numbers or booleans. {' '.join(dict.fromkeys(remedies.values()))}"
    )


def _compare_labels(first_name: str, first: Any, name: str, index: Any) -> None:
    """Raise ConfigError if a label of two indexes of the same length differs."""
    codes, _ = first.append(index).factorize()  # missing labels have one code
    places = np.flatnonzero(codes[: len(first)] != codes[len(first) :])
    if len(places) == 0:
        return
    row = int(places[0])
    labels = f"{brief(first[row])} in {first_name}, {brief(index[row])} in {name}"
    raise ConfigError(
        f"{first_name} and {name} have different indexes: {len(places):,} of {len(first):,} labels differ, first in "
        f"row {row} ({labels}). To match samples by label, give {name}.loc[{first_name}.index]; if the samples are in "
        "the same order, call reset_index(drop=True) on both."
    )
