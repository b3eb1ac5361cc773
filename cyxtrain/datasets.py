"""Real data that travels with the package, so that the first run needs no download."""

from __future__ import annotations

import importlib.resources
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Images: TypeAlias = npt.NDArray[np.float32]
Labels: TypeAlias = npt.NDArray[np.int64]


def load_digits() -> tuple[tuple[Images, Labels], tuple[Images, Labels]]:
    """Return 1,797 handwritten digits as `(x_train, y_train), (x_test, y_test)`, in a fixed split.

    Each picture is a vector of 64 pixels, ready for a linear layer; `nn.Unflatten(1, (1, 8, 8))` makes an image of it.
    The split is stored with the data and never changes: 360 pictures, 36 of each digit, are for the test. They are
    spread evenly over the source's order, so the same 13 people wrote both parts. Each call reads the file (46 KB)
    again, and the arrays are the caller's own.

    Returns:
        - `x_train`: float32 (1437, 64), from 0 (paper) to 1 (ink), in steps of 1/16.
        - `y_train`: int64 (1437,), the digit, 0 to 9.
        - `x_test`: float32 (360, 64).
        - `y_test`: int64 (360,).

    Source: E. Alpaydin, C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository,
    1998, https://doi.org/10.24432/C50P49, CC BY 4.0 (`data/digits.LICENSE`).
    """
    path = importlib.resources.files("cyxtrain") / "data" / "digits.npz"
    with path.open("rb") as file, np.load(file) as stored:
        return _part(stored["x_train"], stored["y_train"]), _part(stored["x_test"], stored["y_test"])


def _part(pixels: npt.NDArray[np.uint8], digits: npt.NDArray[np.uint8]) -> tuple[Images, Labels]:
    """Scale pixels from 0 ... 16 to 0 ... 1, exact in float32, and convert digits to class targets."""
    return pixels.astype(np.float32) / np.float32(16), digits.astype(np.int64)
