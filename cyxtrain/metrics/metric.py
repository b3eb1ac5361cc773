"""Numbers beside the loss: names, functions and torchmetrics' objects, over the rows of all ranks.

What a rank has seen is kept on it. When an epoch is over the ranks put together what they keep: sums are added, and
what goes by whole lists (such as a ranking) is joined in the order of the ranks, so that a metric is that of all rows.
"""

from __future__ import annotations

import base64
import copy
import json
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cyxtrain.data.batches.structure import as_tensor
from cyxtrain.environment import torch_compat
from cyxtrain.environment.accelerator import own_copy
from cyxtrain.errors import ConfigError
from cyxtrain.world import runtime


class Metric(ABC):
    """One number of an epoch.

    Args:
        name: In logs and in the history.
        larger_is_better: Whether it shall grow; None: nobody has said.
    """

    def __init__(self, name: str, larger_is_better: bool | None) -> None:
        self.name = name
        self.larger_is_better = larger_is_better

    @abstractmethod
    def add(self, output: Any, target: Any, rows: int) -> None:
        """Looks at a batch.

        Args:
            output: Of the model.
            target: Beside it.
            rows: How many there are.
        """

    @abstractmethod
    def here(self) -> float:
        """Returns the number over what this rank has seen; NaN where it has seen nothing."""

    @abstractmethod
    def over_ranks(self) -> float:
        """Returns the number over what all ranks have seen; all call it."""

    @abstractmethod
    def reset(self) -> None:
        """Forgets what it has seen."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Returns what it has seen, as JSON values."""

    @abstractmethod
    def merge(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Goes on from what `state` gave, of one rank or of several together.

        Raises:
            ConfigError: What several have seen cannot be put together.
        """


class MeanMetric(Metric):
    """The mean over rows of what a function says of them.

    Args:
        name: As `Metric`.
        function: Takes output and target; returns a number per row, their mean, or (sum, weight). A module is copied,
            runs on the output's device and in evaluation mode, and its state is part of checkpoints.
        larger_is_better: As `Metric`; None: as its attribute `higher_is_better` says, where it has one.

    Attributes:
        sums: (sum, count), shape (2,), float64, where the function's numbers are.
    """

    def __init__(self, name: str, function: Callable[[Any, Any], Any], larger_is_better: bool | None = None) -> None:
        said = getattr(function, "higher_is_better", None) if larger_is_better is None else larger_is_better
        super().__init__(name, said)
        self._function = copy.deepcopy(function) if isinstance(function, nn.Module) else function
        self.sums = torch.zeros(2, dtype=torch.float64, device="cpu")
        self.reset()

    def add(self, output: Any, target: Any, rows: int) -> None:
        """Adds a batch."""
        if isinstance(self._function, nn.Module) and isinstance(output, Tensor):
            self._function.to(output.device)
        result = self._function(output, target)
        if isinstance(result, tuple):
            there = next((part.device for part in result if isinstance(part, Tensor)), torch.device("cpu"))
            self._add(*(_as_double(part, there) for part in result))
            return
        found = as_tensor(result).detach().double()
        per_row = found.dim() > 0 and len(found) == rows
        if not per_row and found.numel() != 1:
            raise ConfigError(
                f"the metric {self.name} must return a number per row, or their mean; for {rows} rows it returned "
                f"shape {list(found.shape)}."
            )
        total = found.reshape(rows, -1).mean(1).sum() if per_row else found.reshape(()) * rows
        self._add(total, torch.full_like(total, rows))

    def _add(self, total: Tensor, weight: Tensor) -> None:
        device = total.device
        earlier = self.sums if self.sums.device == device else self.sums.to(device, non_blocking=self.sums.is_cpu)
        self.sums = earlier + torch.stack([total, weight.to(device)])

    def here(self) -> float:
        """Returns the mean."""
        return mean_of(self.sums)

    def over_ranks(self) -> float:
        """Returns the mean over all rows of all ranks."""
        sums = self.sums.cpu().clone()
        dist.all_reduce(sums, group=runtime.cpu_group())
        return mean_of(sums)

    def reset(self) -> None:
        """Begins anew."""
        self.sums = torch.zeros(2, dtype=torch.float64, device="cpu")
        if isinstance(self._function, nn.Module):
            self._function.eval()
        self._begun = {name: (id(each), torch_compat.version_of(each)) for name, each in self._own().items()}

    def _own(self) -> dict[str, Tensor]:
        """Return the state of a module."""
        found = self._function.state_dict(keep_vars=True) if isinstance(self._function, nn.Module) else {}
        return {name: each for name, each in found.items() if isinstance(each, Tensor)}

    def state(self) -> dict[str, Any]:
        """Returns sum and count, and of a module what has changed."""
        changed = {
            name: each
            for name, each in self._own().items()
            if self._begun[name] != (id(each), torch_compat.version_of(each))
        }
        return {"sums": self.sums.tolist(), "own": {name: _plain(each) for name, each in changed.items()}}

    def merge(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Adds them up; a module goes on from the first one's state."""
        for state in states:
            self.sums += torch.tensor(state["sums"], dtype=torch.float64, device="cpu")
        own = states[0].get("own") if states else None
        if own and isinstance(self._function, nn.Module):
            found = {name: _tensor(each, torch.device("cpu")) for name, each in own.items()}
            self._function.load_state_dict(found, strict=False)


def _as_double(number: Any, device: torch.device) -> Tensor:
    """Returns one number in float64; one of the host comes to an accelerator without a stop."""
    if isinstance(number, Tensor):
        return number.detach().double().reshape(())
    return torch.full((), float(number), dtype=torch.float64, device=device)


def mean_of(sums: Tensor) -> float:
    """Returns sum / count of shape (2,); NaN of nothing."""
    total, count = sums.tolist()
    return total / count if count else math.nan


_KEPT_BATCHES = 16
"""On an accelerator, batches that torchmetrics looks at in one go."""
_KEPT_ELEMENTS = 1 << 20
"""Elements of predictions that are kept until then: 8 MiB."""


class LibraryMetric(Metric):
    """One of torchmetrics' objects, or of a class that derives from its Metric.

    Args:
        name: As `Metric`.
        metric: Its own; a copy is kept.
        prepare: Makes of (output, target) what it wants.
        larger_is_better: As `Metric`; None: what it says itself.
        joins: Whether batches may be put together before it looks at them: torchmetrics' own often stop the host. On
            an accelerator it then looks at several at once.
    """

    def __init__(
        self,
        name: str,
        metric: Any,
        prepare: Callable[[Any, Any], tuple[Any, Any]] = lambda output, target: (output, target),
        larger_is_better: bool | None = None,
        *,
        joins: bool = False,
    ) -> None:
        super().__init__(name, metric.higher_is_better if larger_is_better is None else larger_is_better)
        _refuse_what_cannot_be_joined(name, metric)
        self._metric = copy.deepcopy(metric)
        self._metric.reset()
        # It meets the other ranks while it computes, where all of them ask.
        self._metric.dist_sync_fn, self._metric.distributed_available_fn = _gathered, self._are_together
        self._together = False
        self._metric.compute_with_cache = False
        self._has_seen = False
        self._metric.set_dtype(torch.float64)
        self._prepare = prepare
        self._joins = joins
        self._kept: list[tuple[Tensor, Tensor]] = []

    def add(self, output: Any, target: Any, rows: int) -> None:
        """Looks at a batch."""
        prediction, answer = self._prepare(output, target)
        if isinstance(prediction, Tensor) and self._metric.device != prediction.device:
            self._metric.to(prediction.device)
        prediction = own_copy(prediction) if isinstance(prediction, Tensor) else prediction
        self._has_seen = True
        if not self._joins or prediction.is_cpu:
            self._metric.update(prediction, answer)
            return
        if self._kept and self._kept[0][0].shape[1:] != prediction.shape[1:]:
            self._look_at_kept()
        self._kept.append((prediction, answer))
        if len(self._kept) >= _KEPT_BATCHES or prediction.numel() * len(self._kept) > _KEPT_ELEMENTS:
            self._look_at_kept()

    def _look_at_kept(self) -> None:
        if self._kept:
            kept, self._kept = self._kept, []
            predictions, answers = zip(*kept, strict=True)
            self._metric.update(torch.cat(predictions), torch.cat(answers))

    def here(self) -> float:
        """Returns the number of this rank's rows."""
        return self._compute() if self._has_seen else math.nan

    def over_ranks(self) -> float:
        """Returns the number of all rows."""
        if dist.get_world_size() == 1:
            return self.here()
        if not any(json.loads(text) for text in runtime.gather_texts(json.dumps(self._has_seen))):
            return math.nan
        self._together = True
        try:
            return self._compute()
        finally:
            self._together = False

    def _are_together(self) -> bool:
        return self._together

    def _compute(self) -> float:
        self._look_at_kept()
        with warnings.catch_warnings():  # one that has the states of others alone thinks that it was called too early
            warnings.filterwarnings("ignore", message=".*was called before the ``update`` method")
            try:
                value = as_tensor(self._metric.compute())
            except ValueError:  # there are too few rows for it, on all ranks alike
                return math.nan
        if value.numel() != 1:
            raise ConfigError(
                f"the metric {self.name} has shape {list(value.shape)}, and an epoch has one number: build it with an "
                'average, such as average="macro".'
            )
        return float(value)

    def reset(self) -> None:
        """Begins anew."""
        self._metric.reset()
        self._has_seen, self._kept = False, []

    def state(self) -> dict[str, Any]:
        """Returns its states: tensors as text."""
        if not self._has_seen:
            return {}
        self._look_at_kept()
        states = {
            name: [_plain(part) for part in value] if isinstance(value, list) else _plain(value)
            for name, value in self._metric.metric_state.items()
        }
        return {"updates": self._metric.update_count, "states": states}

    def merge(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Takes over the first, and merges the others into it."""
        for number, state in enumerate(filter(None, states)):
            device = self._metric.device
            found = {
                name: [_tensor(part, device) for part in value] if isinstance(value, list) else _tensor(value, device)
                for name, value in state["states"].items()
            }
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
                    f"the metric {self.name} cannot go on in the middle of an epoch on another number of ranks "
                    f"({error}): resume from a checkpoint that was made between two epochs, or on as many ranks."
                ) from error


def _plain(tensor: Tensor) -> dict[str, Any]:
    """Returns a tensor as JSON values: its bytes as text, because lists of what is ranked would take long."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    kind = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
    return {**kind, "data": base64.b64encode(data).decode()}


def _tensor(state: Mapping[str, Any], device: torch.device) -> Tensor:
    data, dtype = bytearray(base64.b64decode(state["data"])), getattr(torch, state["dtype"])
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype, device="cpu")
    return flat.reshape(state["shape"]).to(device)


def _refuse_what_cannot_be_joined(name: str, metric: Any) -> None:
    """Refuses what hides states in other metrics, or in lists of which ranks have as many as batches."""
    from torchmetrics import Metric as TheirMetric
    from torchmetrics.utilities import dim_zero_cat

    parts = [each for each in (*metric.modules(), *vars(metric).values()) if isinstance(each, TheirMetric)]
    if any(part is not metric for part in parts):
        raise ConfigError(f"the metric {name} is made of other metrics: give each of them by itself, or a function.")
    for state, default in metric.metric_state.items():
        if isinstance(default, list) and metric._reductions[state] is not dim_zero_cat:
            raise ConfigError(
                f"the metric {name} keeps lists ({state}) that the ranks cannot join: give a function of (output, "
                "target)."
            )


def _gathered(tensor: Tensor, group: Any = None) -> list[Tensor]:
    """Returns the tensor of every rank, by rank: of any number of rows, also of none."""
    own = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
    kinds = [json.loads(text) for text in runtime.gather_texts(json.dumps(own))]
    largest = max(kinds, key=lambda kind: (len(kind["shape"]), math.prod(kind["shape"])))
    found = []
    for rank, kind in enumerate(kinds):
        is_empty = math.prod(kind["shape"]) == 0
        shape = [0, *largest["shape"][1:]] if is_empty and largest["shape"] else kind["shape"]
        dtype = largest["dtype"] if is_empty else kind["dtype"]
        mine = rank == dist.get_rank()
        part = torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")
        if mine and not is_empty:
            part.copy_(tensor)
        if not is_empty:
            dist.broadcast(part, rank, group=runtime.cpu_group())
        found.append(part.to(tensor.device))
    return found


class Metrics:
    """The metrics of a fit, an evaluation or a validation, besides loss and accuracy.

    Args:
        metrics: In the order in which they are shown.
    """

    def __init__(self, metrics: Sequence[Metric] = ()) -> None:
        self._metrics = list(metrics)

    def __bool__(self) -> bool:
        return bool(self._metrics)

    @property
    def names(self) -> list[str]:
        """Their names."""
        return [metric.name for metric in self._metrics]

    @property
    def larger_is_better(self) -> dict[str, bool]:
        """Whether each shall grow, by name; of those for which somebody has said."""
        said = {metric.name: metric.larger_is_better for metric in self._metrics}
        return {name: grows for name, grows in said.items() if grows is not None}

    def copy(self) -> Metrics:
        """Returns metrics of the same kinds that have seen nothing."""
        made = Metrics(copy.deepcopy(self._metrics))
        for metric in made._metrics:
            metric.reset()
        return made

    def add(self, output: Any, target: Any, rows: int) -> None:
        """Lets each look at a batch."""
        if self._metrics:
            with torch.no_grad():
                for metric in self._metrics:
                    metric.add(output, target, rows)

    def here(self) -> dict[str, float]:
        """Returns each over what this rank has seen."""
        return {metric.name: metric.here() for metric in self._metrics}

    def lazily(self) -> dict[str, Callable[[], float]]:
        """Returns what gives each over what this rank has seen."""
        return {metric.name: metric.here for metric in self._metrics}

    def cheap_sums(self) -> dict[str, Tensor]:
        """Returns (sum, count) of those that are means, over what this rank has seen."""
        return {metric.name: metric.sums for metric in self._metrics if isinstance(metric, MeanMetric)}

    def over_ranks(self) -> dict[str, float]:
        """Returns each over what all ranks have seen, the same on each; all call it."""
        return {metric.name: metric.over_ranks() for metric in self._metrics}

    def state(self) -> dict[str, Any]:
        """Returns what each has seen on this rank, as JSON values."""
        return {metric.name: metric.state() for metric in self._metrics}

    def merge(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Goes on from states, of one rank or of several together; one that is new begins anew."""
        for metric in self._metrics:
            metric.merge([state[metric.name] for state in states if metric.name in state])
