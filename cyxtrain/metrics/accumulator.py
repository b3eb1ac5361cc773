"""Numbers by name in float64, which batches add up: of losses, of metrics, and of what a program logs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cyxtrain.environment.accelerator import HostCopy, from_host, own_copy
from cyxtrain.world.world import World

Number = Tensor | float
Pair = tuple[float, float]
"""Of a "mean" the sum of its terms and their weight; of the "last" number its place and the number; of others the
number, and 0."""

REDUCES = ("mean", "sum", "max", "min", "last")
# the mean of a number that is the same on every rank; the ranks do not add it up
ALIKE = "alike"
# Numbers of an accelerator that are added at once: single additions would cost a step more.
_FOLD = 16


class Accumulator:
    """A table in float64: for each name a column of pairs, with a row for each part of the data, or one for all.

    An accelerator's numbers stay there, and the host does not wait for them.

    Args:
        names: Of means that all ranks have; others begin with their first number.
        rows: How many parts.
    """

    def __init__(self, names: Iterable[str] = (), rows: int = 1) -> None:
        self._rows = rows
        self._columns = {name: _Column("mean", rows) for name in names}
        self._before: dict[str, _Column] | None = None
        self._copies: dict[str, HostCopy] = {}
        self._latest: dict[str, Pair] = {}

    @property
    def names(self) -> list[str]:
        """The names of the columns."""
        return [*self._columns]

    def add(
        self,
        name: str,
        value: Number,
        weight: Number = 1.0,
        *,
        sum_factor: Number | None = None,
        row: int = 0,
        reduce: str = "mean",
    ) -> None:
        """Add a number to the column of its name.

        To a mean, `value` times `sum_factor` (None: `weight`) over `weight`; 0 if the weight is 0. The weight of the
        "last" number is its place; other weights are not used.
        """
        if name not in self._columns:
            self._columns[name] = _Column(reduce, self._rows)
        self._columns[name].add(row, value, weight if sum_factor is None else sum_factor, weight)

    def keep(self) -> None:
        """Begin a step: `roll_back` forgets what is added from now on."""
        self._before = dict(self._columns)
        for column in self._columns.values():
            column.keep()

    def roll_back(self) -> None:
        """Forget what was added since `keep`."""
        self._columns = dict(self._before or {})
        for column in self._columns.values():
            column.roll_back()

    def clear(self) -> None:
        """Forget all numbers."""
        self._columns.clear()

    def table(self) -> Tensor:
        """Return the pairs side by side, shape (rows, 2 x names), float64, on the CPU; waits for an accelerator."""
        tables = [column.table() for column in self._columns.values()]
        device = next((table.device for table in tables if not table.is_cpu), torch.device("cpu"))
        return torch.cat([table.to(device, non_blocking=table.is_cpu) for table in tables], dim=1).cpu()

    def load(self, pairs: Mapping[str, tuple[str, Pair]], row: int = 0) -> None:
        """Replace the numbers of a row by (how it is reduced, pair) of each name; row 0 first, which clears the others.

        Means without one stay.
        """
        for name, (reduce, pair) in pairs.items():
            if row == 0:
                self._columns[name] = _Column(reduce, self._rows)
            self._columns[name].load(pair, row)

    def pairs(self) -> dict[str, Pair]:
        """Return the exact sums over the rows, each rounded once; waits for an accelerator."""
        if all(column.is_on_host for column in self._columns.values()):
            return {name: _over_rows(column.host) for name, column in self._columns.items()}
        return self._pairs_in(self.table())  # in one copy

    def _pairs_in(self, table: Tensor) -> dict[str, Pair]:
        columns = table.split(2, dim=1)
        return {name: _over_rows(column.tolist()) for name, column in zip(self._columns, columns, strict=True)}

    def kept(self) -> dict[str, tuple[str, Pair]]:
        """Return (how it is reduced, pair) of each name, as `load` takes it; waits for an accelerator."""
        return {name: (self._columns[name].reduce, pair) for name, pair in self.pairs().items()}

    def lately(self) -> dict[str, Pair]:
        """Return `pairs`; of an accelerator those at the call before, without waiting for it."""
        tables = {name: column.table() for name, column in self._columns.items()}
        if all(table.is_cpu for table in tables.values()):
            return self.pairs()
        if all(copy.is_there() for copy in self._copies.values()):
            self._latest = {name: _over_rows(copy.read().tolist()) for name, copy in self._copies.items()}
            self._copies = {name: HostCopy(table) for name, table in tables.items()}
        return self._latest

    def over(self, world: World) -> dict[str, Pair]:
        """Return `pairs` over all ranks of a world, which have the same means; collective.

        The table is added over ranks element by element, then exactly over its rows: if each row was filled by one
        rank, the result has the same bits on any number of ranks.
        """
        return self._pairs_in(world.reduce(self.table()))


class _Column:
    """The pairs of one name: on the host, from its first number of an accelerator on there."""

    def __init__(self, reduce: str, rows: int) -> None:
        self.reduce = reduce
        self.host: list[Pair] = [_NOTHING.get(reduce, (0.0, 0.0))] * rows
        self._device: Tensor | None = None
        self._pending: list[tuple[int, Number, Number, Number]] = []
        self._kept: tuple[list[Pair], int] | None = None  # the pairs, and how many were pending

    def add(self, row: int, value: Number, sum_factor: Number, weight: Number) -> None:
        # Each step comes here: most numbers are on the host, and skip `_on_host`.
        if isinstance(value, Tensor):
            value = _on_host(value)
        if isinstance(sum_factor, Tensor):
            sum_factor = _on_host(sum_factor)
        if isinstance(weight, Tensor):
            weight = _on_host(weight)
        if isinstance(value, Tensor) or isinstance(sum_factor, Tensor) or isinstance(weight, Tensor):
            self._pending.append((row, _own(value), _own(sum_factor), _own(weight)))
        elif self._device is not None or self._pending:
            self._pending.append((row, value, sum_factor, weight))
        else:
            self.host[row] = joined(self.reduce, self.host[row], self._pair(value, sum_factor, weight), on_rank=True)
            return
        if len(self._pending) >= _FOLD and self._kept is None:
            self._fold()

    def _pair(self, value: float, sum_factor: float, weight: float) -> Pair:
        if self.reduce in ("mean", ALIKE):
            if not weight:
                return 0.0, weight  # the value may be 0 / 0
            return value * sum_factor, weight
        if self.reduce == "last":
            return weight, value
        return value, 0.0

    @property
    def is_on_host(self) -> bool:
        return self._device is None and not self._pending

    def keep(self) -> None:
        if len(self._pending) >= _FOLD:
            self._fold()
        self._kept = [*self.host], len(self._pending)

    def roll_back(self) -> None:
        if self._kept is not None:
            self.host, pending = self._kept
            del self._pending[pending:]

    def load(self, pair: Pair, row: int) -> None:
        self.host[row] = pair

    def table(self) -> Tensor:
        """Return the pairs, shape (rows, 2), where they are."""
        self._fold()
        if self._device is not None:
            return self._device
        return torch.tensor(self.host, dtype=torch.float64, device="cpu")

    def _fold(self) -> None:
        """Add the pending numbers to the table on the accelerator."""
        if not self._pending:
            return
        rows, *numbers = zip(*self._pending, strict=True)
        table = self._device
        if table is None:
            device = next(each.device for one in self._pending for each in one if isinstance(each, Tensor))
            table = from_host(self.host, device, torch.float64)
        self._pending = []
        if self._kept is not None:
            self._kept = (self._kept[0], 0)
        values, sum_factors, weights = (vector_on(each, table.device) for each in numbers)
        if self.reduce == "last":
            self._device = torch.stack([weights[-1], values[-1]]).view(1, 2)
        elif self.reduce == "max":
            self._device = torch.stack([torch.maximum(table[0, 0], values.max()), table[0, 1]]).view(1, 2)
        elif self.reduce == "min":
            self._device = torch.stack([torch.minimum(table[0, 0], values.min()), table[0, 1]]).view(1, 2)
        else:
            if self.reduce != "sum":
                values = (values * sum_factors).masked_fill_(weights == 0, 0.0)
            self._device = _added(table, rows, torch.stack([values, weights], dim=1))


_NOTHING: Mapping[str, Pair] = {"max": (-math.inf, 0.0), "min": (math.inf, 0.0), "last": (-math.inf, math.nan)}


def joined(reduce: str, before: Pair, new: Pair, *, on_rank: bool = False) -> Pair:
    """Return the pair of two parts: the second is of a later call `on_rank`, otherwise of a higher rank."""
    if reduce == "last":
        is_later = on_rank or new[0] > before[0]
        return new if is_later else before
    if reduce == ALIKE and not on_rank:
        return before
    if reduce in ("max", "min"):
        if math.isnan(before[0]) or math.isnan(new[0]):
            return math.nan, 0.0
        choose: Callable[[float, float], float] = max if reduce == "max" else min
        return choose(before[0], new[0]), 0.0
    return before[0] + new[0], before[1] + new[1]


def number_of(reduce: str, pair: Pair) -> float:
    """Return the number that a pair stands for; NaN for a mean without weight."""
    if reduce in ("mean", ALIKE):
        return mean_of(pair)
    if reduce == "last":
        return pair[1]
    return pair[0]


def mean_of(pair: Sequence[float]) -> float:
    """Return sum / weight; NaN if the weight is 0."""
    total, weight = pair
    return total / weight if weight else math.nan


def _over_rows(pairs: Sequence[Sequence[float]]) -> Pair:
    """Return the sum of each column, rounded once; NaN and infinities stay."""
    if len(pairs) == 1:
        return pairs[0][0], pairs[0][1]
    first, second = map(exact_sum, zip(*pairs, strict=True))
    return first, second


def exact_sum(numbers: Sequence[float]) -> float:
    """Return the sum, rounded once; NaN and infinities stay."""
    # fsum raises on opposite infinities, and diverging training must show its numbers.
    if all(map(math.isfinite, numbers)):
        return math.fsum(numbers)
    return sum(numbers)


def _added(table: Tensor, rows: Sequence[int], pairs: Tensor) -> Tensor:
    """Return a table with each pair added to its row; the table may be overwritten."""
    if len(table) == 1:  # index_add_ has no fixed order on an accelerator
        return table + pairs.sum(0)
    return table.index_add_(0, from_host(rows, table.device, torch.int64), pairs)


def _on_host(number: Tensor) -> Number:
    return float(number.item()) if number.is_cpu else number


def _own(number: Any) -> Any:
    return own_copy(number.detach()) if isinstance(number, Tensor) else number  # a later step may overwrite a tensor


def vector_on(numbers: Sequence[Number], device: torch.device) -> Tensor:
    """Return numbers in float64 on a device, without waiting for it."""
    dtype = torch.float64
    if not any(isinstance(number, Tensor) for number in numbers):
        return from_host(numbers, device, dtype)
    found: list[Tensor] = []
    for number in numbers:
        if not isinstance(number, Tensor):
            number = torch.full((), number, dtype=dtype, device=device)
        found.append(number.reshape(()))
    # Of one type: converted together, not one by one.
    if all(number.device == device and number.dtype is found[0].dtype for number in found):
        return torch.stack(found).to(dtype)
    return torch.stack([number.to(device, dtype) for number in found])
