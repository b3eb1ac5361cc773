"""Metrics besides loss and accuracy, exact over the samples of all ranks.

Each rank accumulates its own samples. At the end of an epoch the ranks add sums, and concatenate lists (such as what is
ranked) in rank order.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import functools
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from cyxtrain.data.batches.structure import as_tensor
from cyxtrain.environment import torch_compat
from cyxtrain.environment.accelerator import own_copy
from cyxtrain.errors import ConfigError, brief
from cyxtrain.metrics.accumulator import Accumulator, Pair, joined, mean_of
from cyxtrain.metrics.whole_set import CheckedWholeSet
from cyxtrain.world.world import World


class Metric(ABC):
    """A number per epoch, or one for each of several `names`; `select` finds its output and target."""

    def __init__(self, name: str, larger_is_better: bool | None) -> None:
        self.select: Callable[[Any, Any], tuple[Any, Any]] = lambda output, target: (output, target)
        self.name = name
        self.names = [name]
        self.larger_is_better = larger_is_better

    @abstractmethod
    def add(self, output: Any, target: Any, rows: int) -> None:
        """Add a batch of `rows` samples."""

    @abstractmethod
    def over_ranks(self, world: World) -> list[float]:
        """Return the numbers over the samples of all ranks of a world, NaN if there were none; collective."""

    @abstractmethod
    def reset(self) -> None:
        """Forget all samples."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return the accumulated state, as JSON values."""

    @abstractmethod
    def merge(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Continue from the states of one or several ranks."""


class MeanMetric(Metric):
    """The mean over samples of a user's function of (output, target).

    The function returns a number per sample, their mean, or (sum, weight). A module is copied,
    runs in evaluation mode on the output's device, and its state is part of checkpoints.
    """

    numbers: Accumulator

    def __init__(self, name: str, function: Callable[[Any, Any], Any], larger_is_better: bool | None = None) -> None:
        if larger_is_better is None:
            larger_is_better = getattr(function, "higher_is_better", None)
        super().__init__(name, larger_is_better)
        self._function = copy.deepcopy(function) if isinstance(function, nn.Module) else function
        self.reset()

    @override
    def add(self, output: Any, target: Any, rows: int) -> None:
        if isinstance(self._function, nn.Module) and isinstance(output, Tensor):
            self._function.to(output.device)  # it may have buffers
        result = self._function(output, target)
        if isinstance(result, tuple) and len(result) == 2 and all(map(_is_number, result)):
            total, weight = map(_own_number, result)
            self.numbers.add(self.name, total, weight, sum_factor=1.0)
        else:
            self.numbers.add(self.name, self._total(result, rows), rows, sum_factor=1.0)

    def _total(self, result: Any, rows: int) -> Tensor:
        """Return the sum over samples of a number per sample, or of their mean; raise ConfigError for other results."""
        if not isinstance(result, (Tensor, tuple)):
            with contextlib.suppress(TypeError, ValueError, RuntimeError):  # a string, None, a dictionary
                result = as_tensor(result)
        if isinstance(result, Tensor):
            found = result.detach().double()
            if found.dim() > 0 and len(found) == rows:
                return found.reshape(rows, -1).mean(1).sum()
            if found.numel() == 1:
                return found.reshape(()) * rows
            returned = f"shape {list(found.shape)}"
        else:
            returned = f"{type(result).__name__} {brief(result)}"
        raise ConfigError(
            f"the metric {self.name} must return a number per sample, or their mean, or (sum, weight); for {rows} "
            f"samples it returned {returned}."
        )

    @override
    def over_ranks(self, world: World) -> list[float]:
        return [mean_of(self.numbers.over(world)[self.name])]

    @override
    def reset(self) -> None:
        self.numbers = Accumulator([self.name])
        if isinstance(self._function, nn.Module):
            self._function.eval()
        self._begun = {name: _version(each) for name, each in self._module_state().items()}

    def _module_state(self) -> dict[str, Tensor]:
        """Return the state of a module, {} of a function."""
        if not isinstance(self._function, nn.Module):
            return {}
        found = self._function.state_dict(keep_vars=True)
        return {name: each for name, each in found.items() if isinstance(each, Tensor)}

    def state(self) -> dict[str, Any]:
        """Return sum and count, and the tensors of a module's state that have changed."""
        own = self._module_state()
        changed = {name: _plain(each) for name, each in own.items() if self._begun[name] != _version(each)}
        return {"sums": [*self.numbers.pairs()[self.name]], "own": changed}

    def merge(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Add the sums; a module continues from the first state."""
        for state in states:
            total = joined("mean", self.numbers.pairs()[self.name], state["sums"])
            self.numbers.load({self.name: ("mean", total)})
        if states and states[0].get("own") and isinstance(self._function, nn.Module):
            found = {name: _tensor(each, torch.device("cpu")) for name, each in states[0]["own"].items()}
            self._function.load_state_dict(found, strict=False)


def _version(tensor: Tensor) -> tuple[int, float]:
    """Return what differs after a tensor was replaced or written to in place."""
    return id(tensor), torch_compat.version_of(tensor)


def _is_number(part: Any) -> bool:
    if isinstance(part, Tensor):
        return part.numel() == 1
    return isinstance(part, (Number, np.bool_, np.ndarray))


def _own_number(number: Any) -> Tensor | float:
    """Return a number, which a function may change later, as one of the host, or as a copy on an accelerator."""
    if isinstance(number, Tensor):
        return number.detach().to(torch.float64, copy=True).reshape(())
    return float(number)


# Batches that torchmetrics gets at once on an accelerator.
_KEPT_BATCHES = 16
# Elements of predictions that are kept until then: 8 MiB.
_KEPT_ELEMENTS = 1 << 20


class LibraryMetric(Metric):
    """A copy of a torchmetrics object with one number, or one for each class.

    `prepare` makes of (output, target) the arguments of `update`, which several batches share: it often waits for an
    accelerator.
    """

    def __init__(self, name: str, metric: Any, prepare: Callable[[Any, Any], tuple[Any, Any]] | None = None) -> None:
        super().__init__(name, metric.higher_is_better)
        _refuse_what_cannot_be_joined(name, metric)
        self._metric = copy.deepcopy(metric)  # the program's own stays as it is
        self._metric.reset()
        # compute() synchronizes with the other ranks only while all ranks call it.
        self._metric.dist_sync_fn = self._gathered
        self._metric.distributed_available_fn = self._is_collective
        self._world = World()  # in which it is computed
        # It is computed for this rank alone and for all ranks, between the same two batches.
        self._metric.compute_with_cache = False
        self._has_seen = False
        self._metric.set_dtype(torch.float64)
        self._prepare = prepare
        self._kept: list[tuple[Tensor, Tensor]] = []

    @override
    def add(self, output: Any, target: Any, rows: int) -> None:
        prediction, answer = output, target
        if self._prepare is not None:
            prediction, answer = self._prepare(output, target)
        if isinstance(prediction, Tensor):
            if self._metric.device != prediction.device:
                self._metric.to(prediction.device)
            prediction = own_copy(prediction)
        self._has_seen = True
        if self._prepare is None or prediction.is_cpu:
            self._metric.update(prediction, answer)
            return
        if self._kept and self._kept[0][0].shape[1:] != prediction.shape[1:]:
            self._update_with_kept()
        self._kept.append((prediction, answer))
        if len(self._kept) >= _KEPT_BATCHES or prediction.numel() * len(self._kept) > _KEPT_ELEMENTS:
            self._update_with_kept()

    def _update_with_kept(self) -> None:
        if self._kept:
            predictions, answers = zip(*self._kept, strict=True)
            self._kept = []
            self._metric.update(torch.cat(predictions), torch.cat(answers))

    @override
    def over_ranks(self, world: World) -> list[float]:
        if not any(world.gather_json(self._has_seen)):
            return [math.nan] * len(self.names)
        self._world = world
        try:
            return self._compute()
        finally:
            self._world = World()

    def _is_collective(self) -> bool:
        return self._world.size > 1

    def _gathered(self, tensor: Tensor, group: Any = None) -> list[Tensor]:
        return gathered_states(tensor, self._world)

    def _compute(self) -> list[float]:
        self._update_with_kept()
        with warnings.catch_warnings():  # of a rank without samples, which gets the states of other ranks
            warnings.filterwarnings("ignore", message=".*was called before the ``update`` method")
            try:
                result = self._metric.compute()
            except ValueError:  # too few samples, on all ranks
                return [math.nan] * len(self.names)
            finally:
                if self._metric._is_synced:  # it has raised before it put this rank's own state back
                    self._metric.unsync()
        if isinstance(result, (tuple, list, dict)):
            raise self._not_one_number(f"{len(result)} parts")
        value = as_tensor(result)
        if value.numel() != 1 and value.dim() != 1:
            raise self._not_one_number(f"shape {list(value.shape)}")
        found: list[float] = value.double().reshape(-1).tolist()
        if len(found) > 1:  # the dry run is the first to see how many
            self.names = [f"{self.name.removesuffix('_per_class')}_class_{number}" for number in range(len(found))]
        return found

    def _not_one_number(self, has: str) -> ConfigError:
        return ConfigError(
            f"the metric {self.name} has {has}, and the history takes a number, or one for each class: build it "
            'with an average, such as average="macro", or pass cx.metrics.WholeSet(function).'
        )

    @override
    def reset(self) -> None:
        self._metric.reset()
        self._has_seen = False
        self._kept = []

    @override
    def state(self) -> dict[str, Any]:
        if not self._has_seen:
            return {}
        self._update_with_kept()
        states = {name: _plain(value) for name, value in self._metric.metric_state.items()}
        return {"updates": self._metric.update_count, "states": states}

    @override
    def merge(self, states: Sequence[Mapping[str, Any]]) -> None:
        for number, state in enumerate(filter(None, states)):
            device = self._metric.device
            found = {name: _tensor(value, device) for name, value in state["states"].items()}
            self._metric._update_count += state["updates"]
            if number == 0:
                for name, value in found.items():
                    setattr(self._metric, name, value)
                self._has_seen = True
                continue
            try:
                self._metric.merge_state(found)
            except (RuntimeError, TypeError) as error:
                raise ConfigError(
                    f"the metric {self.name} cannot continue in the middle of an epoch on a different number of ranks "
                    f"({error}): resume from a checkpoint between two epochs, or on the same number of ranks."
                ) from error


def _plain(value: Tensor | list[Tensor]) -> Any:
    """Return a tensor, or a list, as JSON values, the bytes in base64: lists of numbers would take long."""
    if isinstance(value, list):
        return [_plain(tensor) for tensor in value]
    data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return {
        "dtype": str(value.dtype).removeprefix("torch."),
        "shape": list(value.shape),
        "data": base64.b64encode(data).decode(),
    }


def _tensor(state: Any, device: torch.device) -> Any:
    """Return the tensor or the list that `_plain` turned into JSON values."""
    if isinstance(state, list):
        return [_tensor(each, device) for each in state]
    data = bytearray(base64.b64decode(state["data"]))
    dtype = getattr(torch, state["dtype"])
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype, device="cpu")
    return flat.reshape(state["shape"]).to(device)


def _refuse_what_cannot_be_joined(name: str, metric: Any) -> None:
    """Refuse nested metrics, and lists that have an entry per batch on each rank."""
    from torchmetrics import Metric as TheirMetric
    from torchmetrics.utilities import dim_zero_cat

    parts = [each for each in (*metric.modules(), *vars(metric).values()) if isinstance(each, TheirMetric)]
    if any(part is not metric for part in parts):
        raise ConfigError(f"the metric {name} is made of other metrics: pass each of them separately, or a function.")
    for state, default in metric.metric_state.items():
        if isinstance(default, list) and metric._reductions[state] is not dim_zero_cat:
            raise ConfigError(
                f"the metric {name} keeps lists ({state}) that the ranks cannot join: compute it in a function of all "
                "outputs and targets, cx.metrics.WholeSet(function)."
            )


def gathered_states(tensor: Tensor, world: World) -> list[Tensor]:
    """Return the tensor of every rank, in rank order; the numbers of samples may differ, or be 0."""
    own = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
    kinds = world.gather_json(own)
    largest = max(kinds, key=lambda kind: (len(kind["shape"]), math.prod(kind["shape"])))
    found = []
    for rank, kind in enumerate(kinds):
        shape = kind["shape"]
        dtype = kind["dtype"]
        is_empty = math.prod(shape) == 0
        if is_empty:
            dtype = largest["dtype"]
            if largest["shape"]:
                shape = [0, *largest["shape"][1:]]
        shape = shape or largest["shape"]  # a rank without samples has one sum, others have one for each output
        # An all_gather would need equal shapes.
        part = torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")
        if not is_empty:
            if rank == world.rank:
                part.copy_(tensor)
            world.broadcast(part, rank)
        found.append(part.to(tensor.device))
    return found


class Metrics:
    """The metrics of a fit, an evaluation or a validation, besides loss and accuracy; `whole_sets`: of all samples."""

    def __init__(self, metrics: Sequence[Metric] = (), whole_sets: Sequence[CheckedWholeSet] = ()) -> None:
        self._metrics = list(metrics)
        self.whole_sets = whole_sets

    @property
    def _all(self) -> list[Metric | CheckedWholeSet]:
        return [*self._metrics, *self.whole_sets]

    def __bool__(self) -> bool:
        return bool(self._metrics)

    @property
    def names(self) -> list[str]:
        """Their names in the history."""
        return [name for each in self._all for name in each.names]

    @property
    def larger_is_better(self) -> dict[str, bool]:
        """Whether larger values are better, by name, if known."""
        known: dict[str, bool] = {}
        for each in self._all:
            if each.larger_is_better is not None:
                known.update(dict.fromkeys(each.names, each.larger_is_better))
        return known

    def copy(self) -> Metrics:
        """Return metrics of the same kinds without any samples."""
        made = Metrics(copy.deepcopy(self._metrics), self.whole_sets)
        for metric in made._metrics:
            metric.reset()
        return made

    def add(self, output: Any, target: Any, rows: int, row: int = 0) -> None:
        """Add a batch to each; `row`: as in the sums of an epoch."""
        if self._metrics:
            with torch.no_grad():
                for metric in self._metrics:
                    metric.add(*metric.select(output, target), rows)

    def lazy_values(self) -> dict[str, Callable[[], float]]:
        """Return functions that calculate each number over this rank's samples."""
        found: dict[str, Callable[[], float]] = {}
        for metric in self._metrics:
            for place, name in enumerate(metric.names):
                found[name] = functools.partial(_value_of_rank, metric, place)
        return found

    def cheap_values(self) -> dict[str, float]:
        """Return the means of this rank, as `Accumulator.lately`."""
        return {name: mean_of(pair) for name, pair in self.cheap_pairs().items()}

    def cheap_pairs(self) -> dict[str, Pair]:
        """Return (sum, weight) of the means of this rank, as `Accumulator.lately`."""
        means = [metric for metric in self._metrics if isinstance(metric, MeanMetric)]
        found = {metric.name: metric.numbers.lately() for metric in means}
        return {name: pairs[name] for name, pairs in found.items() if pairs}

    def over_ranks(self, world: World) -> dict[str, float]:
        """Return each number over the samples of all ranks of a world; collective."""
        found: dict[str, float] = {}
        for metric in self._metrics:
            values = metric.over_ranks(world)  # which may be the first to know their names
            found.update(zip(metric.names, values, strict=True))
        return found

    def state(self) -> dict[str, Any]:
        """Return this rank's state of each, as JSON values."""
        return {metric.name: metric.state() for metric in self._metrics}

    def merge(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Continue from the states of one or several ranks; metrics without a state start empty."""
        for metric in self._metrics:
            metric.merge([state[metric.name] for state in states if metric.name in state])


def _value_of_rank(metric: Metric, place: int) -> float:
    return metric.over_ranks(World())[place]
