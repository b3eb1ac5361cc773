"""Gradients of few numbers: each matrix travels as two thin ones, and what that leaves out joins the next step.

Source: Vogels, Karimireddy, Jaggi, PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization
(2019), algorithms 1 and 2.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from cyxtrain.parallel.exchange import GradientExchange, average

_LEAST_SAVING = 2
"""How many times fewer numbers the thin matrices must have; else a gradient travels as it is."""


class LowRankGradient:
    """A gradient as a matrix M, and its approximation P Q^T.

    Args:
        number: Of the gradient in its bucket.
        matrix: M, m x n, in the bucket; float32 or float64.
        width: Columns of P and Q.
        seed: For the first Q, the same on every rank.
    """

    def __init__(self, number: int, matrix: Tensor, width: int, seed: int) -> None:
        self.number = number
        self.matrix = matrix
        rows, columns = matrix.shape
        generator = torch.Generator("cpu").manual_seed(seed)
        numbers = torch.randn(columns, width, generator=generator, device="cpu")
        self.query = numbers.to(matrix.device, matrix.dtype)
        """Q of the step before, n x width: the same on every rank."""
        self.error = self.query.new_zeros(rows, columns)
        """What this rank's approximations have left out so far, m x n, in units of the unscaled gradient."""
        self.left, self.own_right = self.query.new_empty(rows, width), self.query

    def project(self, left: Tensor, scale: float) -> None:
        """Adds the error to the gradient, and gives `left` M Q.

        Args:
            left: m x width, of this rank.
            scale: What gradients are multiplied by in this step.
        """
        self.matrix.add_(self.error, alpha=scale)
        torch.mm(self.matrix, self.query, out=left)

    def project_back(self, left: Tensor, right: Tensor) -> None:
        """Makes the mean of M Q orthonormal, and gives `right` M^T P.

        Args:
            left: m x width, the same on every rank.
            right: n x width, of this rank.
        """
        # QR gives a direction even to a column of zeros, as long as it is finite: it may be needed in the next step.
        self.left = torch.linalg.qr(left).Q
        self.own_right = torch.mm(self.matrix.t(), self.left)
        right.copy_(self.own_right)

    def settle(self, right: Tensor, scale: float, *, keeps_error: bool) -> None:
        """Makes the gradient P Q^T, the same on every rank.

        Args:
            right: Q, the mean of M^T P over ranks.
            scale: As in `project`.
            keeps_error: Whether this approximation counts.
        """
        if keeps_error:
            torch.addmm(self.matrix, self.left, self.own_right.t(), alpha=-1, out=self.error)
            if scale != 1:
                self.error.div_(scale)
            self.query.copy_(right)
        torch.mm(self.left, right.t(), out=self.matrix)


class LowRank(GradientExchange):
    """The first round: M Q of each matrix, with the gradients that are too small for it, and the flags. The second: Q.

    Cost of a step: (m + n) x width numbers for a gradient of m x n, 6 m n width multiplications; memory for the error,
    as large as the gradients.

    Args:
        numbers: As `GradientExchange`.
        gradients_end: As `GradientExchange`.
        gradients: Each gradient's place in `numbers`, of its parameter's shape.
        width: The approximation's rank: columns of P and Q.
    """

    def __init__(self, numbers: Tensor, gradients_end: int, gradients: Sequence[Tensor], width: int) -> None:
        super().__init__(numbers, gradients_end)
        self.gradients: dict[int, LowRankGradient] = {}
        """Those that travel as thin matrices, by number."""
        self._plain = [self._flags]
        for number, gradient in enumerate(gradients):
            matrix = as_matrix(gradient)
            columns = columns_of(matrix, width)
            if columns:
                self.gradients[number] = LowRankGradient(number, matrix, columns, seed=number)
            else:
                self._plain.append(matrix.reshape(-1))
        low_rank = list(self.gradients.values())
        shapes = [(each.matrix.shape[0], each.query.shape[1]) for each in low_rank]
        self._first, parts = _joined([*((len(part), 1) for part in self._plain), *shapes], numbers)
        self._plain_parts, self._lefts = parts[: len(self._plain)], parts[len(self._plain) :]
        self._second, self._rights = _joined([tuple(each.query.shape) for each in low_rank], numbers)
        self._group: Any = None
        self._scale = 1.0

    @override
    def launch(self, group: Any, scale: float) -> None:
        self._group, self._scale = group, scale
        for part, plain in zip(self._plain_parts, self._plain, strict=True):
            part.view(-1).copy_(plain)
        for gradient, left in zip(self.gradients.values(), self._lefts, strict=True):
            gradient.project(left, self._scale)
        self._pending = [average(self._first, group)]

    def send_on(self) -> None:
        """Begins the second round."""
        self.arrive()
        for part, plain in zip(self._plain_parts, self._plain, strict=True):
            plain.copy_(part.view(-1))
        for gradient, left, right in zip(self.gradients.values(), self._lefts, self._rights, strict=True):
            gradient.project_back(left, right)
        if self.gradients:
            self._pending = [average(self._second, self._group)]

    @property
    def arrived(self) -> list[Tensor]:
        """Both rounds."""
        return [self._first, self._second]

    def settle(self, *, is_whole: bool, unused: Collection[int]) -> None:
        """Makes the approximations, and keeps what they leave out; of a step that cannot be taken, nothing."""
        for gradient, right in zip(self.gradients.values(), self._rights, strict=True):
            gradient.settle(right, self._scale, keeps_error=is_whole and gradient.number not in unused)


def columns_of(matrix: Tensor, width: int) -> int:
    """Returns how many columns its thin matrices have; 0: it travels whole, because they would save too little."""
    columns = min(width, *matrix.shape) if matrix.numel() else 0
    return columns if _LEAST_SAVING * columns * sum(matrix.shape) < matrix.numel() else 0


def as_matrix(gradient: Tensor) -> Tensor:
    """Returns a gradient as a matrix, without a copy: a row for each index of the dimension outermost in memory.

    Args:
        gradient: Of any shape, dense in any order of its dimensions.
    """
    outermost = max(range(gradient.dim()), key=lambda d: (gradient.stride(d), gradient.size(d)), default=None)
    rows = 1 if outermost is None or gradient.numel() == 0 else gradient.size(outermost)
    return gradient.as_strided((rows, gradient.numel() // rows), (gradient.numel() // rows, 1))


def _joined(shapes: Sequence[tuple[int, ...]], like: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Returns one flat tensor, and parts of these shapes that make it up."""
    counts = [rows * columns for rows, columns in shapes]
    flat = torch.zeros(sum(counts), dtype=like.dtype, device=like.device)
    return flat, [part.view(shape) for part, shape in zip(flat.split(counts), shapes, strict=True)]
