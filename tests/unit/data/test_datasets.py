"""The digits are the real ones, whole, and split as they always were."""

from __future__ import annotations

import hashlib
import importlib.resources

import numpy as np
import pytest

from cyxtrain.datasets import load_digits

SPLIT_DIGEST = "a6c69c6ccef87324aefca2a3c0481d25cb9b456d554ba4ff7e2f7dc5c4aeb871"
"""SHA-256 of x_train, y_train, x_test, y_test, little-endian. Published accuracies hold for this split alone."""


@pytest.fixture(scope="module")
def digits():
    return load_digits()


@pytest.fixture(scope="module")
def source():
    """An independent copy: pixels 0 ... 16 and digits, in the order of the source."""
    from sklearn.datasets import load_digits as load_source

    return load_source(return_X_y=True)


def rows(x, y):
    """The samples as a set: 64 pixels 0 ... 16 and the digit, as bytes."""
    return {row.tobytes() for row in np.column_stack([x, y]).astype(np.uint8)}


def test_arrays_have_the_shapes_types_and_range_that_are_documented(digits):
    (x_train, y_train), (x_test, y_test) = digits
    assert (x_train.shape, y_train.shape, x_test.shape, y_test.shape) == ((1437, 64), (1437,), (360, 64), (360,))
    assert {x_train.dtype, x_test.dtype} == {np.dtype(np.float32)}
    assert {y_train.dtype, y_test.dtype} == {np.dtype(np.int64)}
    assert (x_train.min(), x_train.max()) == (x_test.min(), x_test.max()) == (0, 1)


def test_both_parts_together_are_scikit_learns_digits_and_share_no_picture(digits, source):
    (x_train, y_train), (x_test, y_test) = digits
    train, test = rows(x_train * 16, y_train), rows(x_test * 16, y_test)
    assert train | test == rows(*source)
    assert (len(train), len(test), len(train | test)) == (1437, 360, 1797)


def test_split_follows_the_rule_that_the_licence_file_states(digits, source):
    pixels, labels = source
    is_test = np.zeros(len(labels), dtype=bool)
    for digit in range(10):
        places = np.flatnonzero(labels == digit)
        is_test[[places[(2 * k + 1) * len(places) // 72] for k in range(36)]] = True
    (x_train, y_train), (x_test, y_test) = digits
    np.testing.assert_array_equal(x_train * 16, pixels[~is_test])
    np.testing.assert_array_equal(y_train, labels[~is_test])
    np.testing.assert_array_equal(x_test * 16, pixels[is_test])
    np.testing.assert_array_equal(y_test, labels[is_test])


def test_split_never_changes(digits):
    (x_train, y_train), (x_test, y_test) = digits
    digest = hashlib.sha256()
    for array, dtype in ((x_train, "<f4"), (y_train, "<i8"), (x_test, "<f4"), (y_test, "<i8")):
        digest.update(array.astype(dtype).tobytes())
    assert digest.hexdigest() == SPLIT_DIGEST


def test_every_digit_is_there_equally_often(digits):
    (_, y_train), (_, y_test) = digits
    assert np.bincount(y_test).tolist() == [36] * 10
    counts = np.bincount(y_train)
    assert counts.min() >= 138
    assert counts.max() <= 147


def test_data_stays_small_and_names_its_source():
    folder = importlib.resources.files("cyxtrain") / "data"
    assert len((folder / "digits.npz").read_bytes()) < 100_000
    licence = (folder / "digits.LICENSE").read_text(encoding="utf-8")
    assert "https://doi.org/10.24432/C50P49" in licence
    assert "CC BY 4.0" in licence


def test_arrays_are_the_callers_own():
    (x_train, _), _ = load_digits()
    x_train[:] = -1
    (again, _), _ = load_digits()
    assert again.min() == 0
