"""Numbers that a program logs by name: sums of an epoch or a validation, which the ranks join once, at its end."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from numbers import Real
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from cyxtrain.config.settings import names_checked, require, require_choice
from cyxtrain.environment import torch_compat
from cyxtrain.errors import ConfigError, brief, on_all_ranks
from cyxtrain.metrics.accumulator import ALIKE, REDUCES, Accumulator, Number, Pair, joined, number_of
from cyxtrain.metrics.weighting import BatchLoss
from cyxtrain.world.slices import Slices
from cyxtrain.world.world import World

GRAD_NORM = "grad_norm"


class LoggedNumbers:
    """The numbers that `DistributedTrainer.log` is called with on this rank."""

    def __init__(self, reserved: Iterable[str] = (), best_names: Iterable[str | None] = ()) -> None:
        self.rows = 1  # the weight of a number that is logged without one
        self.place = 0  # of the running step, or batch of a validation, by which ranks know the last number
        self.reserved = {"loss", "accuracy", *reserved}  # names that `fit` measures itself
        self.best_names = set(best_names)  # names by which checkpoints are compared
        self.is_closed = False  # whether the last epoch is complete
        self.larger_is_better: dict[str, bool] = {}
        self._reduces: dict[str, str] = {}
        self._numbers = Accumulator()
        # With virtual ranks: a part for each slice, and one for what is logged outside of slices.
        self.slices: Slices | None = None
        self._parts: dict[int, Accumulator] = {}
        self._apart: LoggedNumbers | None = None
        self._is_repeating = False

    def use_slices(self, slices: Slices) -> None:
        """Add up the numbers of each slice by themselves: the result does not depend on the ranks.

        What is logged outside of slices counts once, as rank 0 has it.
        """
        if self.slices != slices:
            self.slices = slices
            self._parts = {slices.count: self._numbers}

    def enter_slice(self, number: int | None) -> None:
        """Begin a slice; None: what comes next is outside of slices."""
        if self.slices is not None:
            self._numbers = self._parts.setdefault(self.slices.count if number is None else number, Accumulator())

    @property
    def has_any(self) -> bool:
        """Whether anything has been logged."""
        return bool(self._reduces)

    @contextlib.contextmanager
    def apart(self, sets: Iterable[str]) -> Iterator[LoggedNumbers]:
        """Keep what is logged within the context apart, as numbers of a validation of sets with names, or of one ""."""
        prefixes = ["val_", *(f"val_{each}_" for each in sets if each)]
        best: set[str] = set()
        for prefix in prefixes:
            best.update(name.removeprefix(prefix) for name in self.best_names if name and prefix in name)
        inner = self._apart = LoggedNumbers(self.reserved, best)
        if self.slices is not None:
            inner.use_slices(self.slices)
        try:
            yield inner
        finally:
            self._apart = None
            for prefix in prefixes:
                for name, is_better in inner.larger_is_better.items():
                    self.larger_is_better[prefix + name] = is_better

    @contextlib.contextmanager
    def repeating(self) -> Iterator[None]:
        """Ignore what is logged within: the model runs again on rows that count already, or on no samples."""
        before = self._is_repeating
        self._is_repeating = True
        try:
            yield
        finally:
            self._is_repeating = before

    def begin(self, rows: int, place: int) -> None:
        """Begin a step or a batch with this many samples."""
        self.rows = rows
        self.place = place

    def keep(self) -> Callable[[], None]:
        """Return a function that forgets the numbers that are added from now on."""
        parts = dict(self._parts)
        kept = [*parts.values()] or [self._numbers]
        for numbers in kept:
            numbers.keep()

        def roll_back() -> None:
            for numbers in kept:
                numbers.roll_back()
            self._parts = dict(parts)
            self.enter_slice(None)

        return roll_back

    def reset(self) -> None:
        """Forget the sums, but not how numbers are reduced."""
        self.rows = 1
        self._parts = {}
        self._numbers = Accumulator()
        self.enter_slice(None)

    def add(
        self, name: str, value: Any, reduce: str = "mean", weight: Any = None, larger_is_better: bool | None = None
    ) -> None:
        """Add a number, as `DistributedTrainer.log`, without waiting for an accelerator."""
        if self._is_repeating or _is_recomputing():
            return
        if self._apart is not None:
            self._apart.add(name, value, reduce, weight, larger_is_better)
            return
        require(not self.is_closed, f"log({name!r}) was called after the last epoch. Call it before on_train_end.")
        if name not in self._reduces:
            self._check_name(name, larger_is_better, self.reserved)
            require_choice("log", "reduce", reduce, REDUCES)
        self._set_reduce(name, reduce)
        require(weight is None or reduce == "mean", f"log({name!r}): a weight counts in a mean, not with {reduce!r}.")
        if larger_is_better is not None:
            self.larger_is_better[name] = bool(larger_is_better)
        number = _as_number(name, "value", value)
        if reduce != "mean":
            self._numbers.add(name, number, self.place, reduce=reduce)
        elif weight is None:
            self._numbers.add(name, number, self.rows)
        else:
            self._numbers.add(name, number, _as_weight(name, weight))

    def _set_reduce(self, name: str, reduce: str) -> None:
        """Note how a number is reduced; raise ConfigError if it was reduced differently before."""
        known = self._reduces.setdefault(name, reduce)
        if reduce != known:
            raise ConfigError(
                f"log({name!r}) was called with reduce={known!r}, and with reduce={reduce!r}. Use one of them."
            )

    def add_parts(self, parts: Mapping[str, BatchLoss], known: Sequence[str]) -> None:
        """Add what a model or a step returned of a batch under names that are not `known` from the dry run."""
        if self._apart is not None:
            self._apart.add_parts(parts, known)
            return
        for name, part in parts.items():
            if name in known:
                continue
            if name not in self._reduces:
                self._check_name(name, None, ())
            self._set_reduce(name, "mean")
            numbers = (part.value, part.weight, part.sum_factor)
            value, weight, sum_factor = (_as_number(name, "value", each) for each in numbers)
            self._numbers.add(name, value, weight, sum_factor=sum_factor)

    def add_norms(self, norms: Mapping[str, Tensor], *, may_be_skipped: bool) -> None:
        """Add norms of averaged gradients by optimizer; only finite ones if it is not known whether the step counts."""
        for owner, norm in norms.items():
            name = f"{GRAD_NORM}_{owner}" if owner else GRAD_NORM
            self._reduces[name] = ALIKE
            number = _as_number(name, "value", norm)
            if may_be_skipped and isinstance(number, Tensor):
                self._numbers.add(name, number, number.isfinite(), reduce=ALIKE)
            else:
                self._numbers.add(name, number, reduce=ALIKE)

    def _check_name(self, name: Any, larger_is_better: bool | None, reserved: Collection[str]) -> None:
        require(isinstance(name, str) and bool(name), f"log takes a name, got {brief(name)}.")
        check_free(name.removeprefix("val_"), f"log({name!r})", reserved)
        if name in self.best_names and larger_is_better is None:
            raise ConfigError(
                f"keep_best with {name!r}: it is unknown whether larger is better. Pass larger_is_better=True or False "
                f"to trainer.log({name!r}, ...)."
            )

    def state(self) -> dict[str, Any]:
        """Return this rank's sums as JSON values, with virtual ranks by slice; waits for the device."""
        if self.slices is not None:
            return {str(number): self._state_of(numbers) for number, numbers in self._parts.items()}
        return self._state_of(self._numbers)

    def _state_of(self, numbers: Accumulator) -> dict[str, Any]:
        return {
            name: [reduce, self.larger_is_better.get(name), [*pair]] for name, (reduce, pair) in numbers.kept().items()
        }

    def restore(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Continue from the sums of one or several ranks; with virtual ranks, those of all ranks of a checkpoint."""
        if self.slices is None:
            self._restore_part(self._numbers, states)
            return
        by_slice = _by_slice(states, self.slices)
        self._parts = {}
        for number in (*self.slices.owned, self.slices.count):
            self.enter_slice(number)
            self._restore_part(self._numbers, [by_slice.get(number, {})])

    def _restore_part(self, numbers: Accumulator, states: Sequence[Mapping[str, Any]]) -> None:
        found: dict[str, tuple[str, Pair]] = {}
        for state in states:
            for name, (reduce, better, sums) in state.items():
                self._set_reduce(name, reduce)
                if better is not None:
                    self.larger_is_better[name] = better
                first, second = (*sums, 0.0)[:2]  # earlier versions have one number of a sum
                pair = (first, second)
                if name in found:
                    pair = joined(reduce, found[name][1], pair)
                found[name] = reduce, pair
        numbers.clear()
        numbers.load(found)

    def over_ranks(self, world: World) -> dict[str, float]:
        """Return the numbers of the ranks of a world; collective."""
        if world.sends_nothing:
            return {name: value() for name, value in self.lazy_values().items()}
        # First an all_reduce: another collective of a rank whose callback calls one alone would not match it.
        if not world.reduce(torch.tensor(self._num_names, device="cpu"), dist.ReduceOp.MAX):
            return {}
        try:
            of_all = self._joined(world.gather_json(self.state()))
        except ConfigError as error:
            raise on_all_ranks(error) from None
        return of_all.over_ranks(world.alone())

    @property
    def _num_names(self) -> int:
        return len({name for numbers in (self._numbers, *self._parts.values()) for name in numbers.names})

    def _joined(self, states: Sequence[Mapping[str, Any]]) -> LoggedNumbers:
        """Return the numbers of these states of ranks, added up in the order of ranks, or of slices."""
        if self.slices is not None:
            by_slice = _by_slice(states, self.slices)
            states = [by_slice[number] for number in sorted(by_slice)]
        joined_numbers = LoggedNumbers()
        joined_numbers.larger_is_better = self.larger_is_better
        joined_numbers.restore(states)
        return joined_numbers

    def lazy_values(self) -> dict[str, Callable[[], float]]:
        """Return a function for each number of this rank."""
        if self.slices is not None:
            return self._joined([self.state()]).lazy_values()
        return {name: partial(number_of, reduce, pair) for name, (reduce, pair) in self._numbers.kept().items()}


class NumberLogger:
    """The part of a trainer that takes a user's own numbers."""

    _logged: LoggedNumbers | None = None
    """Where the numbers go; None: outside of a fit or an evaluation."""

    @names_checked
    def log(
        self,
        name: str,
        value: Any,
        *,
        reduce: Literal["mean", "sum", "max", "min", "last"] = "mean",
        weight: Any = None,
        larger_is_better: bool | None = None,
    ) -> None:
        """Record a number of your own in the history of the running epoch, or of the running validation as "val_...".

        Call it in a step, a loss function or a callback's hook. The calls of all ranks count; a rank need not call it.
        What runs again, as in gradient checkpointing, counts once, and what a skipped step has logged does not count.
        Ranks join the numbers once, at the end of the epoch or validation; the host does not wait for an accelerator.

        Args:
            name: In history, logs, `keep_best` and `monitor`.
            value: A number, or a tensor with one.
            reduce: What an epoch has of all values: their "mean", "sum", "max", "min", or the "last" one (of the
                lowest rank that logged in the last step).
            weight: How much a value counts in the mean. None: the samples of the running batch; outside of a batch 1.
            larger_is_better: For `keep_best`.

        Raises:
            ConfigError: There is no fit or evaluation, `fit` measures a number of this name, `value` is not a number,
                or `reduce` has changed.
        """
        if self._logged is None:
            raise ConfigError(
                f"log({name!r}) was called outside of a fit. Call it in a step, a loss function, or a callback's hook "
                "before on_train_end (not in a callback that stays in the notebook)."
            )
        self._logged.add(name, value, reduce, weight, larger_is_better)

    @contextlib.contextmanager
    def _logging(self) -> Iterator[LoggedNumbers]:
        """Keep what is logged within the context."""
        before = self._logged
        self._logged = LoggedNumbers()
        try:
            yield self._logged
        finally:
            self._logged = before


def _by_slice(states: Sequence[Mapping[str, Any]], slices: Slices) -> dict[int, Mapping[str, Any]]:
    """Return the states of slices in those of ranks; what is outside of slices is rank 0's."""
    found: dict[int, Mapping[str, Any]] = {}
    for of_rank in states:
        for number, of_slice in of_rank.items():
            if int(number) < slices.count:
                found[int(number)] = of_slice
    outside = str(slices.count)
    if states and outside in states[0]:
        found[slices.count] = states[0][outside]
    return found


def check_free(name: str, what: str, reserved: Collection[str] = ()) -> None:
    """Refuse a name under which `fit` records a number itself; `what` has it."""
    if name in ("epoch", "step", *reserved) or name.startswith((GRAD_NORM, "learning_rate")):
        raise ConfigError(f"{what}: fit records a number of this name itself. Choose another name.")


def _is_recomputing() -> bool:
    """Return whether a backward runs a part of a forward again, with a graph; hooks of gradients have no graph."""
    return torch.is_grad_enabled() and torch_compat.current_autograd_node() is not None


def _as_number(name: str, what: str, value: Any) -> Number:
    """Return a number of the host, or a copy of a number on an accelerator, which a later step may overwrite."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        value = value.detach()
        return float(value) if value.is_cpu else value.to(torch.float64, copy=True).reshape(())
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, (np.ndarray, np.bool_)) and value.size == 1 and value.dtype.kind in "biuf":
        return float(value.item())
    got = f"{brief(value)} ({type(value).__name__})"
    if isinstance(value, (Tensor, np.ndarray)):
        got = f"{type(value).__name__} of shape {list(value.shape)}"
    raise ConfigError(f"log({name!r}): {what} must be a number, got {got}. Log a number of it, such as its mean.")


def _as_weight(name: str, value: Any) -> Number:
    weight = _as_number(name, "weight", value)
    # The host does not wait for a weight on an accelerator.
    if not isinstance(weight, Tensor) and not 0 <= weight < math.inf:
        raise ConfigError(f"log({name!r}): weight must be a finite number of at least 0, got {weight}.")
    return weight
