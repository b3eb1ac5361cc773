"""PowerSGD: each gradient is exchanged as two thin matrices, and what they leave out is added in the next step.

Source: Vogels, Karimireddy, Jaggi, PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization
(2019), algorithms 1 and 2.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from cyxtrain.parallel.exchange import GradientExchange, MeanWork

_LEAST_SAVING = 2  # how many times fewer numbers the thin matrices must have; otherwise a gradient is exchanged whole


class LowRankGradient:
    """A gradient as a matrix M, m x n, in its bucket, and its approximation P Q^T."""

    def __init__(self, number: int, matrix: Tensor, width: int, seed: int) -> None:
        self.number = number
        self.matrix = matrix
        rows, columns = matrix.shape
        generator = torch.Generator("cpu").manual_seed(seed)
        numbers = torch.randn(columns, width, generator=generator, device="cpu")
        self.query = numbers.to(matrix.device, matrix.dtype)
        """Q of the previous step, n x width: the same on every rank."""
        self.error = self.query.new_zeros(rows, columns)
        """What this rank's approximations have left out so far, m x n, in units of the unscaled gradient."""
        self.left, self.own_right = self.query.new_empty(rows, width), self.query

    def project(self, left: Tensor, scale: float) -> None:
        """Add the error, times `scale`, to the gradient; set `left`, m x width, to M Q."""
        self.matrix.add_(self.error, alpha=scale)
        torch.mm(self.matrix, self.query, out=left)

    def project_back(self, left: Tensor, right: Tensor) -> None:
        """Orthonormalize `left`, the mean of M Q over ranks, to P; set `right`, n x width, to M^T P."""
        # QR gives a direction even to a column of zeros, if it is finite: the next step may need it.
        self.left = torch.linalg.qr(left).Q
        self.own_right = torch.mm(self.matrix.t(), self.left)
        right.copy_(self.own_right)

    def complete(self, right: Tensor, scale: float, *, keeps_error: bool) -> None:
        """Set the gradient to P Q^T; `right` is Q, the mean of M^T P over ranks."""
        if keeps_error:
            torch.addmm(self.matrix, self.left, self.own_right.t(), alpha=-1, out=self.error)
            if scale != 1:
                self.error.div_(scale)
            self.query.copy_(right)
        torch.mm(self.left, right.t(), out=self.matrix)


class LowRankExchange(GradientExchange):
    """The first round: M Q of each matrix, small gradients, and the flags. The second: Q.

    Cost of a step: (m + n) x width numbers for a gradient of m x n, 6 m n width multiplications; memory for the error,
    as large as the gradients.
    """

    def __init__(self, numbers: Tensor, gradients_end: int, gradients: Sequence[Tensor], width: int) -> None:
        super().__init__(numbers, gradients_end)
        self.gradients: dict[int, LowRankGradient] = {}  # those that are exchanged as thin matrices, by number
        self._whole = [self._flags]
        for number, gradient in enumerate(gradients):
            matrix = as_matrix(gradient)
            columns = columns_of(matrix, width)
            if columns:
                self.gradients[number] = LowRankGradient(number, matrix, columns, seed=number)
            else:
                self._whole.append(matrix.reshape(-1))
        low_rank = list(self.gradients.values())
        shapes = [(each.matrix.shape[0], each.query.shape[1]) for each in low_rank]
        self._first, parts = _joined([*((len(part), 1) for part in self._whole), *shapes], numbers)
        self._whole_parts, self._lefts = parts[: len(self._whole)], parts[len(self._whole) :]
        self._second, self._rights = _joined([tuple(each.query.shape) for each in low_rank], numbers)
        self._group: Any = None
        self._scale = 1.0

    @override
    def launch(self, group: Any, scale: float) -> None:
        self._group, self._scale = group, scale
        for part, whole in zip(self._whole_parts, self._whole, strict=True):
            part.view(-1).copy_(whole)
        for gradient, left in zip(self.gradients.values(), self._lefts, strict=True):
            gradient.project(left, scale)
        self._pending = [MeanWork(self._first, group)]

    @override
    def launch_second_round(self) -> None:
        self.wait()
        for part, whole in zip(self._whole_parts, self._whole, strict=True):
            whole.copy_(part.view(-1))
        for gradient, left, right in zip(self.gradients.values(), self._lefts, self._rights, strict=True):
            gradient.project_back(left, right)
        if self.gradients:
            self._pending = [MeanWork(self._second, self._group)]

    @property
    @override
    def received(self) -> list[Tensor]:
        return [self._first, self._second]

    @override
    def complete(self, *, is_finite: bool, unused: Collection[int]) -> None:
        """Set the approximations; keep what they leave out, except of a step that cannot be taken."""
        for gradient, right in zip(self.gradients.values(), self._rights, strict=True):
            gradient.complete(right, self._scale, keeps_error=is_finite and gradient.number not in unused)


def columns_of(matrix: Tensor, width: int) -> int:
    """Return how many columns a gradient's thin matrices have; 0: they would save too little."""
    columns = min(width, *matrix.shape) if matrix.numel() else 0
    return columns if _LEAST_SAVING * columns * sum(matrix.shape) < matrix.numel() else 0


def as_matrix(gradient: Tensor) -> Tensor:
    """Return a dense gradient as a matrix without a copy; rows run over the dimension outermost in memory."""
    outermost = max(range(gradient.dim()), key=lambda d: (gradient.stride(d), gradient.size(d)), default=None)
    rows = 1 if outermost is None or gradient.numel() == 0 else gradient.size(outermost)
    return gradient.as_strided((rows, gradient.numel() // rows), (gradient.numel() // rows, 1))


def _joined(shapes: Sequence[tuple[int, ...]], like: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return one flat tensor, and views of these shapes that make it up."""
    counts = [rows * columns for rows, columns in shapes]
    flat = torch.zeros(sum(counts), dtype=like.dtype, device=like.device)
    return flat, [part.view(shape) for part, shape in zip(flat.split(counts), shapes, strict=True)]
