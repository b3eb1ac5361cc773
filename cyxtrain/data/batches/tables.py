"""Tables of pandas, Polars and PyArrow as arrays. The libraries are the user's: they are not imported here.

Columns of numbers and booleans, of any type, become one array, and missing values NaN. Other columns are refused by
name: nothing is encoded.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

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
    # Tables of pandas have columns as attributes, too, and its Series have labels.
    if len(getattr(values, "shape", (0, 0))) != 2:
        return []
    name = "column_names" if _library_of(values) == "pyarrow" else "columns"
    return list(getattr(values, name, ()))


def table_as_array(values: Any, name: str) -> _Array:
    """Return a table as an array of shape (rows, columns), and a single column as (rows,).

    Columns of several types get NumPy's common type. Integers of 8 and 16 bits become int64, also if they have no
    sign: they are codes, as of categories, which embeddings take in 32 or 64 bits. A query of Polars is run by its
    streaming engine. Cost: a copy, except of a table of pandas whose columns have the same type of NumPy.

    Raises:
        ConfigError: A column does not hold numbers or booleans. The error lists all of them; `name` is the table's.
    """
    if _is_lazy(values):
        values = values.collect(engine="streaming")
    found = _columns_as_array(values, name)
    if found.dtype.kind in "iu" and found.dtype.itemsize < 4:
        return found.astype(np.int64)
    return found


def _columns_as_array(values: Any, name: str) -> _Array:
    is_frame = len(getattr(values, "shape", ())) == 2
    columns = [*_columns_in(values, is_frame)]
    wrong = [column for column in columns if column.dtype == object]
    if wrong:
        raise _not_numbers(wrong, name, is_frame)
    arrays = (np.asarray(column.read(column.dtype)) for column in columns)
    if not is_frame:
        return next(arrays)
    if _library_of(values) == "pandas" and len({*values.dtypes}) == 1 and isinstance(values.dtypes.iloc[0], np.dtype):
        return np.asarray(values)
    found = np.empty((len(values), len(columns)), np.result_type(np.bool_, *{column.dtype for column in columns}))
    for number, array in enumerate(arrays):
        found[:, number] = array
    return found


def check_columns(trained: Mapping[str, Sequence[str]], found: Mapping[str, Sequence[str]]) -> None:
    """Raise ConfigError if tables of inputs have other columns than those of training, or another order.

    Both have the names of columns by the name of the table, such as "X"; arrays are not among them.
    """
    for name in sorted(trained.keys() & found.keys()):
        if name.startswith("X") and found[name] != trained[name]:
            raise ConfigError(
                f"{name} must have the columns that the model was trained with, in their order, because it gets them "
                f"by place: {_difference(trained[name], found[name])}. Select them with the list of the columns of the "
                "training data."
            )


def check_order(trained: Mapping[str, Sequence[str]], found: Mapping[str, Sequence[str]]) -> None:
    """Raise ConfigError if tables have the columns of those before in another order; other names may be meant."""
    same = {name: columns for name, columns in found.items() if sorted(columns) == sorted(trained.get(name, ()))}
    check_columns(trained, same)


def _difference(expected: Sequence[str], columns: Sequence[str]) -> str:
    lacks = [column for column in expected if column not in columns]
    others = [column for column in columns if column not in expected]
    what = []
    if lacks:
        what.append(f"it lacks {shortened(map(repr, lacks))}")
    if others:
        what.append(f"it also has {shortened(map(repr, others))}")
    return ", and ".join(what) or "their order differs"


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


class _Column(NamedTuple):
    """A column of a table.

    Attributes:
        name: In the table.
        label: Name of its type, or of the class of its objects.
        dtype: Type of its numbers in an array; object if it holds something else.
        read: Returns its numbers for this type, with NaN for missing ones.
    """

    name: Any
    label: str
    dtype: np.dtype[Any]
    read: Callable[[np.dtype[Any]], Any]


def _of_pandas(name: Any, column: Any) -> _Column:
    kind = column.dtype
    label = str(kind)
    plain = None
    if kind.kind in _NUMBERS:  # nullable and sparse types have NumPy's in an attribute
        plain = np.dtype(getattr(kind, "numpy_dtype", getattr(kind, "subtype", kind)))
    elif label == "object":
        label = _class_of_first(column.dropna())

    def read(dtype: np.dtype[Any]) -> Any:
        if isinstance(kind, np.dtype):
            return column
        if dtype.kind not in "fc":  # then no value is missing
            return column.to_numpy(dtype=dtype)
        return column.to_numpy(dtype=dtype, na_value=np.nan)

    return _Column(name, label, _with_nan(plain, bool(column.isna().any())), read)


def _of_polars(name: Any, column: Any) -> _Column:
    label = str(column.dtype)
    plain = None
    if label.endswith("Int128"):  # NumPy has no such type
        plain = np.dtype(object)
    elif column.dtype.is_numeric() or label == "Boolean":
        plain = column.head(0).to_numpy().dtype
    elif label == "Object":
        label = _class_of_first(column.drop_nulls())

    def read(dtype: np.dtype[Any]) -> Any:
        if dtype.kind != "f":
            return column
        return column.cast(getattr(sys.modules["polars"], dtype.name.capitalize()))

    return _Column(name, label, _with_nan(plain, column.null_count() > 0), read)


def _of_arrow(name: Any, column: Any) -> _Column:
    types: Any = sys.modules["pyarrow"].types
    plain = None
    if any(ask(column.type) for ask in (types.is_boolean, types.is_integer, types.is_floating, types.is_decimal)):
        plain = np.dtype(column.type.to_pandas_dtype())

    def read(dtype: np.dtype[Any]) -> Any:
        if dtype.kind != "f":
            return column
        return column.cast(dtype.name, safe=False)  # rounds integers above 2**53, as NumPy does

    return _Column(name, str(column.type), _with_nan(plain, column.null_count > 0), read)


def _with_nan(plain: np.dtype[Any] | None, has_missing: bool) -> np.dtype[Any]:
    """Return the type of a column whose numbers have a `plain` type if none is missing; None: it has no numbers."""
    if plain is None:
        return np.dtype(object)
    if plain.kind not in _NUMBERS:  # decimals, and integers of 128 bits
        return np.dtype(np.float64)
    if has_missing and plain.kind in "biu":
        return np.result_type(plain, np.float32)
    return plain


def _class_of_first(values: Iterable[Any]) -> str:
    return next((type(value).__name__ for value in values), "null")


def _kind_of(label: str) -> str:
    """Return what a column of a type holds instead of numbers, such as "text"."""
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
        if library == "polars":
            yield _of_polars(name, column)
        elif library == "pyarrow":
            yield _of_arrow(name, column)
        elif getattr(column.dtype, "pyarrow_dtype", None) is None:
            yield _of_pandas(name, column)
        else:
            yield _of_arrow(name, column.array.__arrow_array__())


def _not_numbers(wrong: Sequence[_Column], name: str, is_frame: bool) -> ConfigError:
    """Return the error for columns that do not hold numbers."""
    kinds = [_kind_of(column.label) for column in wrong]
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
