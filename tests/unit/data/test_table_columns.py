"""Claims about tables: each column of numbers keeps its values, and each other one is refused by its name and kind."""

from __future__ import annotations

import datetime
import sys
from decimal import Decimal
from types import SimpleNamespace
from typing import Any, ClassVar

import leaks
import numpy as np
import pytest
from markers import by_night
from refusals import refusal

from cyxtrain.data.batches.rows import as_rows
from cyxtrain.data.batches.tables import check_format, columns_of, is_table, table_as_array

LIBRARIES = ["pandas", by_night("polars"), by_night("pyarrow")]
TYPES = ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float32", "float64"]
ENCODE = "Encode text and categories with skrub.TableVectorizer or scikit-learn's encoders, or give their codes as an "
DAY = datetime.date(2026, 1, 31)
TIME = datetime.datetime(2026, 1, 31, 12)
KINDS: dict[str, dict[str, Any]] = {
    "text": {"words": ["Oslo", None, "Rome"]},
    "dates": {"times": [TIME, None, TIME], "days": [DAY, DAY, None], "gaps": [TIME - TIME] * 3},
    "lists": {"lists": [[1.0, 2.0], None, [3.0]]},
    "missing values alone": {"nothing": [None, None, None]},
}
REMEDIES = {
    "text": ENCODE,
    "categories": ENCODE,
    "dates": "Make numbers of dates, with skrub.TableVectorizer",
    "lists": "Give lists as an input of their own, through numpy.stack.",
    "missing values alone": "Leave out columns without values.",
}


def table(library: str, columns: dict[str, Any]) -> Any:
    module: Any = pytest.importorskip(library)
    with leaks.kept():  # threads of Polars wait at a descriptor
        return module.table(columns) if library == "pyarrow" else module.DataFrame(columns)


def column(library: str, values: list[Any], dtype: str) -> Any:
    """Returns values, of which None is missing, as a column of a NumPy type's nullable relative."""
    module: Any = pytest.importorskip(library)
    values = [None if value is None else np.dtype(dtype).type(value).item() for value in values]
    if library == "pandas":
        return module.Series(values, dtype={"bool": "boolean", "uint8": "UInt8"}.get(dtype, dtype.capitalize()))
    if library == "pyarrow":
        return module.array(values, getattr(module, "bool_" if dtype == "bool" else dtype)())
    name = {"bool": "Boolean", "uint8": "UInt8"}.get(dtype, dtype.capitalize())
    return module.Series("found", values, dtype=getattr(module, name))


def check(found: Any, expected: np.ndarray[Any, Any]) -> None:
    np.testing.assert_array_equal(found, expected)
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape


def expected_of(dtype: Any) -> np.dtype[Any]:
    """Returns the type of an array of columns of a type: embeddings take integers of 32 and 64 bits."""
    found = np.dtype(dtype)
    return np.dtype("int64") if found.name in ("int8", "int16", "uint8", "uint16") else found


@pytest.mark.parametrize("library", LIBRARIES)
def test_columns_of_each_type_keep_it_but_small_integers_and_several_types_get_numpys_common_one(library):
    arrays = {name: np.array([0, 1, 1]).astype(name) for name in TYPES}
    for name, values in arrays.items():
        dtype = expected_of(name)
        double = ~values if name == "bool" else values + values
        found = table(library, {"a": values, "b": double})
        check(table_as_array(found, "X"), np.stack([values, double], axis=1).astype(dtype))
        check(table_as_array(found["a"], "y"), values.astype(dtype))
        for other in TYPES:
            mixed = table(library, {"a": values, "b": arrays[other]})
            dtype = expected_of(np.result_type(name, other))
            check(table_as_array(mixed, "X"), np.stack([values, arrays[other]], axis=1).astype(dtype))


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(
    ("dtype", "with_nan"),
    [(each, "float32") for each in ("bool", "uint8", "int16", "float32")]
    + [(each, "float64") for each in ("int32", "int64", "float64")],
)
def test_missing_values_become_nan_and_without_them_a_nullable_column_keeps_its_type(library, dtype, with_nan):
    check(table_as_array(column(library, [1, 0, 1], dtype), "y"), np.array([1, 0, 1], dtype).astype(expected_of(dtype)))
    found = column(library, [1, None, 0], dtype)
    check(table_as_array(found, "y"), np.array([1, np.nan, 0], with_nan))
    in_table = table(library, {"a": found, "b": np.array([2, 3, 4], "int8")})
    expected = np.array([[1, 2], [np.nan, 3], [0, 4]], np.result_type(with_nan, "int8"))
    check(table_as_array(in_table, "X"), expected)


@pytest.mark.nightly
@pytest.mark.parametrize(("dtype", "with_nan"), [("bool", "float32"), ("int64", "float64"), ("double", "float64")])
def test_types_of_arrow_in_pandas_are_those_of_arrow(dtype, with_nan):
    pandas: Any = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    values = [np.dtype(dtype).type(1).item(), None, np.dtype(dtype).type(0).item()]
    found = pandas.DataFrame({"a": pandas.Series(values, dtype=f"{dtype}[pyarrow]")})
    check(table_as_array(found, "X"), np.array([[1], [np.nan], [0]], with_nan))
    words = pandas.DataFrame({"a": pandas.Series(["Oslo"], dtype="string[pyarrow]")})
    assert "column 'a' (text);" in refusal(table_as_array, words, "X")


@pytest.mark.nightly
@pytest.mark.parametrize("library", ["polars", "pyarrow"])
def test_decimals_become_float64(library):
    decimals = table(library, {"a": [Decimal("1.25"), None, Decimal("-3.5")]})
    check(table_as_array(decimals, "X"), np.array([[1.25], [np.nan], [-3.5]]))


@pytest.mark.nightly
def test_integers_of_128_bits_become_float64():
    polars: Any = pytest.importorskip("polars")
    check(table_as_array(polars.Series([2**70, None], dtype=polars.Int128), "y"), np.array([2.0**70, np.nan]))


def test_sparse_columns_are_read_densely():
    pandas: Any = pytest.importorskip("pandas")
    found = pandas.DataFrame(
        {"a": pandas.arrays.SparseArray([0, 3, 0]), "b": pandas.arrays.SparseArray([np.nan, 1, 2])}
    )
    check(table_as_array(found, "X"), np.array([[0, np.nan], [3, 1], [0, 2]]))


def test_a_table_of_pandas_with_one_type_of_numpy_is_not_copied():
    pandas: Any = pytest.importorskip("pandas")
    values = np.arange(6.0).reshape(3, 2)
    rows = as_rows(pandas.DataFrame(values, copy=False), pandas.Series(values[:, 0], copy=False))
    assert np.shares_memory(rows.inputs.numpy(), values)  # type: ignore[union-attr]
    assert np.shares_memory(rows.targets.numpy(), values)  # type: ignore[union-attr]


def categories(library: str) -> Any:
    module: Any = pytest.importorskip(library)
    if library == "pandas":
        return module.Series(["Oslo", "Rome", None], dtype="category")
    if library == "polars":
        return module.Series(["Oslo", "Rome", None], dtype=module.Categorical)
    return module.array(["Oslo", "Rome", None]).dictionary_encode()


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_column_that_holds_no_numbers_is_refused_with_its_name_its_kind_and_a_remedy(library):
    pytest.importorskip(library)
    for kind, columns in {**KINDS, "categories": {"categories": categories(library)}}.items():
        for name, values in columns.items():
            found = table(library, {"good": [1.0, 2.0, 3.0], name: values})
            words = f"X is a table with column {name!r} ({kind}); it must hold numbers or booleans. {REMEDIES[kind]}"
            assert refusal(table_as_array, found, "X").startswith(words)
            alone = refusal(table_as_array, found[name], "X['part']")
            assert alone.startswith(f"X['part'] is a column of {kind}; it must hold numbers or booleans. ")


@pytest.mark.parametrize("library", LIBRARIES)
def test_all_columns_that_hold_no_numbers_are_named_with_each_remedy_once(library):
    words = KINDS["text"]["words"]
    found = table(library, {"city": words, "area": [1.0, 2.0, 3.0], "sold": KINDS["dates"]["days"], "street": words})
    message = refusal(table_as_array, found, "X")
    assert "column 'city' (text), 'sold' (dates), 'street' (text); it must" in message
    assert message.count("Encode text") == message.count("Make numbers of dates") == 1
    assert len(message) < 500


@pytest.mark.parametrize("library", LIBRARIES)
def test_classes_in_words_have_the_code_that_numbers_them(library):
    found = table(library, {"city": ["Rome", "Oslo", "Rome"]})
    for y in (found, found["city"]):
        assert "Number the classes, as in numpy.unique(y, return_inverse=True)[1]." in refusal(table_as_array, y, "y")
    assert np.unique(found["city"], return_inverse=True)[1].tolist() == [1, 0, 1]


def test_objects_are_refused_and_the_remedy_converts_them():
    pandas: Any = pytest.importorskip("pandas")
    for values, kind in {(1, None): "int", (Decimal("1.5"), None): "Decimal", (True, False): "bool"}.items():
        found = pandas.Series([*values], dtype=object)
        message = refusal(table_as_array, found, "X")
        assert f"X is a column of objects ({kind}); it must hold numbers or booleans. Convert objects" in message
        assert "as .astype('float64') does in pandas." in message
        check(table_as_array(found.astype("float64"), "X"), np.array(values, dtype=np.float64))
    for dtype in ("period[D]", "datetime64[ns, UTC]"):
        assert "a column of dates;" in refusal(table_as_array, pandas.Series(["2026-01-31"], dtype=dtype), "X")
    ranges = pandas.Series(pandas.interval_range(0, 2))
    assert "a column of objects (interval[int64, right]);" in refusal(table_as_array, ranges, "X")


def test_a_table_without_columns_is_an_array_without_columns():
    pandas: Any = pytest.importorskip("pandas")
    assert table_as_array(pandas.DataFrame(index=range(3)), "X").shape == (3, 0)


@pytest.mark.nightly
def test_other_types_of_polars_and_arrow_have_their_names():
    polars: Any = pytest.importorskip("polars")
    pyarrow: Any = pytest.importorskip("pyarrow")
    for found, kind in (
        (polars.Series([b"1"]), "objects (Binary)"),
        (polars.Series([{"a": 1}]), "lists"),
        (polars.Series([[1, 2]], dtype=polars.Array(polars.Int64, 2)), "lists"),
        (polars.Series(["a"], dtype=polars.Enum(["a"])), "categories"),
        (polars.Series([Decimal(1)], dtype=polars.Object), "objects (Decimal)"),
        (pyarrow.array([b"1"]), "objects (binary)"),
        (pyarrow.array([{"a": 1}]), "lists"),
        (pyarrow.array(["a"], pyarrow.large_string()), "text"),
        (pyarrow.chunked_array([["a"], ["b"]]), "text"),
    ):
        assert f"X is a column of {kind};" in refusal(table_as_array, found, "X")


@pytest.mark.nightly
def test_a_query_is_run_by_the_streaming_engine_and_asked_for_its_columns_without_running(monkeypatch):
    polars: Any = pytest.importorskip("polars")
    engines: list[Any] = []
    collect = polars.LazyFrame.collect

    def noting(query: Any, **options: Any) -> Any:
        engines.append(options["engine"])
        return collect(query, **options)

    monkeypatch.setattr(polars.LazyFrame, "collect", noting)
    query = polars.LazyFrame({"a": [1, 2, 3], "b": [0.5, None, 2.5]}).filter(polars.col("a") > 1)
    assert columns_of(query) == ["a", "b"]
    assert engines == []
    check(table_as_array(query, "X"), np.array([[2, np.nan], [3, 2.5]]))
    assert engines == ["streaming"]


def test_columns_and_labels_may_be_called_as_the_attributes_that_hold_the_names():
    pandas: Any = pytest.importorskip("pandas")
    assert columns_of(pandas.DataFrame({"column_names": [1.0], "columns": [2.0]})) == ["column_names", "columns"]
    assert columns_of(pandas.Series([1.0, 2.0], index=["column_names", "columns"])) == []


@pytest.mark.nightly
def test_batches_and_pieces_of_arrow_are_tables():
    pyarrow: Any = pytest.importorskip("pyarrow")
    batch = pyarrow.record_batch({"a": [1, 2], "b": [0.5, 1.5]})
    check(table_as_array(batch, "X"), np.array([[1, 0.5], [2, 1.5]]))
    check(table_as_array(pyarrow.chunked_array([[1], [2, None]]), "y"), np.array([1, 2, np.nan]))


def test_indexes_that_differ_are_refused_with_the_first_label():
    pandas: Any = pytest.importorskip("pandas")
    x = pandas.DataFrame({"a": [1.0, 2.0, 3.0]}, index=["ann", "bob", "cid"])
    y = pandas.Series([0, 1, 0], index=["ann", "cid", "bob"])
    message = refusal(as_rows, x, y)
    assert message == (
        "X and y have different indexes: 2 of 3 labels differ, first in row 1 (bob in X, cid in y). To match samples "
        "by label, give y.loc[X.index]; if the samples are in the same order, call reset_index(drop=True) on both."
    )
    as_rows(x, y.loc[x.index])
    as_rows(x.reset_index(drop=True), y.reset_index(drop=True))
    as_rows(x, y.to_numpy(), y.to_numpy())
    as_rows(x, y[:2])  # the numbers of samples are compared later
    numbered = pandas.Series([1.0, 2.0, 3.0])
    assert "X['a'] and sample_weight have different indexes: 3 of 3" in refusal(as_rows, {"a": x}, None, numbered)
    assert "X[0] and X[1] have different indexes: 3 of 3" in refusal(as_rows, (x, numbered))


def test_indexes_that_are_equal_in_another_form_pass():
    pandas: Any = pytest.importorskip("pandas")
    values = pandas.Series([1.0, 2.0])
    for one, other in (
        (pandas.RangeIndex(2), pandas.Index([0.0, 1.0])),
        (pandas.Index([1.0, np.nan]), pandas.Index([1.0, np.nan])),
        (pandas.MultiIndex.from_tuples([("a", 1), ("b", 2)]), pandas.Index([("a", 1), ("b", 2)])),
    ):
        as_rows(values.set_axis(one), values.set_axis(other))


def test_libraries_are_not_imported_for_other_data(monkeypatch):
    for library in ("pandas", "polars", "pyarrow"):
        monkeypatch.delitem(sys.modules, library, raising=False)
    assert not is_table([1.0])
    as_rows({"a": np.zeros((3, 2))}, [0, 1, 0])
    assert not {"pandas", "polars", "pyarrow"} & sys.modules.keys()


def test_only_a_dataset_without_a_format_is_asked_for_one():
    class Rows(list[Any]):
        format: ClassVar[dict[str, Any]] = {"type": None, "format_kwargs": {}}

        def __getitem__(self, index: Any) -> Any:
            return {"pixels": [[1.0, 2.0]][: len(self)], "name": ["a"][: len(self)]}

    message = refusal(check_format, Rows([1]))
    assert message == (
        "X is a datasets.Dataset without a format: its column 'pixels' gives a list, not a tensor, for each sample. "
        'Give X.with_format("torch").'
    )
    check_format(Rows([]))
    check_format([[1.0]])
    check_format(SimpleNamespace(format="png"))
