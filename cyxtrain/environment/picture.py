"""A matplotlib figure that a notebook shows as a picture; imported only to draw one, as matplotlib is an extra."""

from __future__ import annotations

import io

from matplotlib.figure import Figure


class Picture(Figure):
    """A figure that a notebook shows as PNG also if nothing has loaded matplotlib's backend for notebooks."""

    def _repr_png_(self) -> bytes:
        png = io.BytesIO()
        self.savefig(png, format="png")
        return png.getvalue()
