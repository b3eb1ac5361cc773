"""Compressed exchange of gradients: in half precision, or by PowerSGD.

PowerSGD exchanges each gradient as two thin matrices, and adds what they leave out in the next step.
Source: Vogels, Karimireddy, Jaggi, PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization
(2019), algorithms 1 and 2.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from cyxtrain.config import DDPConfig
from cyxtrain.errors import CheckpointError
from cyxtrain.parallel.bucket import Bucket
from cyxtrain.parallel.exchange import GradientExchange, HalfPrecisionExchange, MeanWork
from cyxtrain.world.world import World

COMPRESSIBLE = {torch.float32, torch.float64}  # gradients of other types are exchanged uncompressed
_NARROW = {"fp16": torch.float16, "bf16": torch.bfloat16}
_LEAST_SAVING = 2  # how many times fewer numbers the thin matrices must have; otherwise a gradient is exchanged whole


def install_compression(buckets: Sequence[Bucket], config: DDPConfig) -> dict[str, LowRankGradient]:
    """Set the exchange of buckets to the configured compression; return low-rank gradients by name."""
    found = {}
    for bucket in buckets:
        end = len(bucket.buffer())
        if config.compression is None or bucket.numbers.dtype not in COMPRESSIBLE:
            continue
        if config.compression == "powersgd":
            gradients = dict(zip(bucket.names, bucket.gradients(), strict=True))
            exchange = LowRankExchange(bucket.numbers, end, gradients, config.matrix_approximation_rank)
            found.update(exchange.by_name)
            bucket.exchange = exchange
        else:
            bucket.exchange = HalfPrecisionExchange(bucket.numbers, end, _NARROW[config.compression])
    return found


def gathered_state(gradients: Mapping[str, LowRankGradient], world: World) -> dict[str, Any]:
    """Return the state of low-rank gradients: "queries" by name, "errors" of each rank by name.

    All ranks call it. Cost: the gradients once from each rank to each, and as many times the memory as there are ranks.
    """
    if not gradients:
        return {}
    ranks = range(world.size)
    errors: list[dict[str, Tensor]] = [{} for _ in ranks]
    for name, gradient in gradients.items():
        own = gradient.error.cpu()
        gathered = [torch.empty_like(own) for _ in ranks]
        dist.all_gather(gathered, own, group=world.cpu_group)
        for rank in ranks:
            errors[rank][name] = gathered[rank]
    queries = {name: gradient.query.cpu().clone() for name, gradient in gradients.items()}
    return {"queries": queries, "errors": errors}


def load_state(gradients: Mapping[str, LowRankGradient], state: Mapping[str, Any], world: World) -> None:
    """Load what `gathered_state` returned; on another number of ranks, each gets the mean of all errors.

    Gradients that are new, or whose shape has changed, keep their initial state.
    """
    try:
        queries = state["queries"]
        errors = state["errors"]
        for name, gradient in gradients.items():
            if name in queries and queries[name].shape == gradient.query.shape:
                gradient.query.copy_(queries[name])
            of_ranks = [own[name] for own in errors if name in own and own[name].shape == gradient.error.shape]
            if len(of_ranks) == world.size:
                gradient.error.copy_(of_ranks[world.rank])
            elif of_ranks:
                gradient.error.copy_(torch.stack(of_ranks).mean(0))
    except (KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"the saved state of gradient compression cannot be used: {error!r}.") from error


class LowRankGradient:
    """A gradient as a matrix M, m x n, in its bucket, and its approximation P Q^T."""

    def __init__(self, number: int, matrix: Tensor, width: int, seed: int) -> None:
        self.number = number
        self.matrix = matrix
        rows, columns = matrix.shape
        generator = torch.Generator("cpu").manual_seed(seed)
        numbers = torch.randn(columns, width, generator=generator, device="cpu")
        # Q of the previous step, n x width: the same on every rank
        self.query = numbers.to(matrix.device, matrix.dtype)
        # what this rank's approximations have left out so far, m x n, in units of the unscaled gradient
        self.error = self.query.new_zeros(rows, columns)
        self.left = self.query.new_empty(rows, width)
        self.own_right = self.query

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

    def __init__(self, numbers: Tensor, gradients_end: int, gradients: Mapping[str, Tensor], width: int) -> None:
        super().__init__(numbers, gradients_end)
        self.by_name: dict[str, LowRankGradient] = {}  # those that are exchanged as thin matrices
        self._whole = [self._flags]
        for number, (name, gradient) in enumerate(gradients.items()):
            matrix = as_matrix(gradient)
            columns = columns_of(matrix, width)
            if columns:
                # By its name: the first directions depend neither on the process nor on the size of buckets.
                self.by_name[name] = LowRankGradient(number, matrix, columns, seed=zlib.crc32(name.encode()))
            else:
                self._whole.append(matrix.reshape(-1))
        low_rank = list(self.by_name.values())
        shapes_of_whole = [(len(part), 1) for part in self._whole]
        shapes_of_lefts = [(each.matrix.shape[0], each.query.shape[1]) for each in low_rank]
        shapes_of_rights = [tuple(each.query.shape) for each in low_rank]
        self._first, parts = _joined([*shapes_of_whole, *shapes_of_lefts], numbers)
        self._whole_parts = parts[: len(self._whole)]
        self._lefts = parts[len(self._whole) :]
        self._second, self._rights = _joined(shapes_of_rights, numbers)
        self._group: Any = None
        self._scale = 1.0

    @override
    def launch(self, group: Any, scale: float) -> None:
        self._group = group
        self._scale = scale
        for part, whole in zip(self._whole_parts, self._whole, strict=True):
            part.view(-1).copy_(whole)
        for gradient, left in zip(self.by_name.values(), self._lefts, strict=True):
            gradient.project(left, scale)
        self._pending = [MeanWork(self._first, group)]

    @override
    def launch_second_round(self) -> None:
        self.wait()
        for part, whole in zip(self._whole_parts, self._whole, strict=True):
            whole.copy_(part.view(-1))
        for gradient, left, right in zip(self.by_name.values(), self._lefts, self._rights, strict=True):
            gradient.project_back(left, right)
        if self.by_name:
            self._pending = [MeanWork(self._second, self._group)]

    @property
    @override
    def results(self) -> list[Tensor]:
        return [self._first, self._second]

    @override
    def complete(self, *, is_finite: bool, unused: Collection[int]) -> None:
        """Set the approximations; keep what they leave out, except of a step that cannot be taken."""
        for gradient, right in zip(self.by_name.values(), self._rights, strict=True):
            keeps_error = is_finite and gradient.number not in unused
            gradient.complete(right, self._scale, keeps_error=keeps_error)


def columns_of(matrix: Tensor, width: int) -> int:
    """Return how many columns a gradient's thin matrices have; 0: they would save too little."""
    columns = min(width, *matrix.shape)
    count_of_both = columns * sum(matrix.shape)
    return columns if _LEAST_SAVING * count_of_both < matrix.numel() else 0


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
