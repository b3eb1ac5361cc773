"""The loss function of a trainer: its divisor, its parts, and what accuracy is."""

from __future__ import annotations

import contextlib
import copy
import math
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cyxtrain.config.settings import is_number, require, unknown_name
from cyxtrain.data.batches.batch import Batch
from cyxtrain.data.batches.structure import Tree, fields_of, parts_by_name, with_fields
from cyxtrain.environment import torch_compat
from cyxtrain.errors import ConfigError
from cyxtrain.metrics.accumulator import exact_sum, vector_on
from cyxtrain.metrics.accuracy import Accuracy, ignored_class, labels_in
from cyxtrain.metrics.logged import check_free
from cyxtrain.metrics.named_losses import loss_function
from cyxtrain.metrics.num_items import ItemRule
from cyxtrain.metrics.weighting import (
    NO_LOSS,
    BatchLoss,
    Weighting,
    batch_loss_of,
    is_scalar,
    loss_in_output,
    weight_of_classes,
    weighting_of,
)
from cyxtrain.parallel import GatherCall

_CLASS_LOSSES = (nn.CrossEntropyLoss, nn.NLLLoss, nn.MultiMarginLoss, nn.MultiLabelMarginLoss)
_BINARY_LOSSES = (nn.BCELoss, nn.BCEWithLogitsLoss)
_ELEMENTWISE_LOSSES = (*_BINARY_LOSSES, nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.PoissonNLLLoss)


class WeightedLosses(NamedTuple):
    """A `loss_fn` with its `loss_weights`."""

    loss_fn: Any
    loss_weights: Mapping[str, float] | float


class Loss:
    """A loss function as the trainer uses it.

    Args:
        loss_fn: A module of `torch.nn`, one of its functions, a name, a callable of (output, target) that returns the
            mean over samples or (sum, weight), or None: the model returns its loss. A dictionary of them by output
            name: the losses are added, and None is no loss. `WeightedLosses` have factors.
        used: The loss that a user's own step may use; the step returns its loss as a model does.
    """

    def __init__(self, loss_fn: Any, used: Loss | None = None) -> None:
        self.used = used
        factors: Any = {}
        if isinstance(loss_fn, WeightedLosses):
            loss_fn, factors = loss_fn
        # Losses by output name; `outputs` has the cross-entropy for further outputs that have only metrics.
        self.by_output = _losses_by_output(loss_fn)
        self.outputs: dict[str, Loss] = {**self.by_output} if used is None else used.outputs
        self.weightings: dict[str, Weighting] = {}  # of each of several losses, by name in the history
        self.shown: tuple[str, ...] = ()  # further numbers in the history: several losses, other scalars of the model
        self.items: ItemRule | None = None  # how to count `num_items_in_batch`; None: the model is not given it
        self.uses_num_items = False  # whether the model's loss is the sum of its terms, divided by that number
        self.weight_per_row = 1.0  # about, if the data decide it; of any rank
        self.gathers: list[GatherCall] = []  # of `all_gather_with_grad`, by model and loss in each batch
        self._factors = _checked_factors(loss_fn, factors)
        self.factor = self._factors.get("loss", 1.0)  # the number in loss_weights if there is one loss_fn
        self._gives_pairs: bool | None = None
        self.function: Any = loss_fn if self.by_output else loss_function(loss_fn)
        self.functions = self._all_functions()
        # Functions that are modules, and the modules whose methods functions are.
        self.modules = [*self.named_modules("").values()]
        kind = type(self.function)
        self.is_known = issubclass(kind, torch_compat.LossModule) and kind.__module__.startswith("torch.")
        seen = (used or self).function
        self.is_binary = isinstance(seen, _BINARY_LOSSES)  # targets are 0 or 1, one per output
        self.threshold = 0.5  # outputs above it predict 1
        if isinstance(seen, nn.BCEWithLogitsLoss):
            self.threshold = 0.0
        self._reduction = getattr(self.function, "reduction", None) if self.is_known else None
        self.weighting = Weighting.NOTHING if self._reduction == "sum" else Weighting.SAMPLES
        self._summing: nn.Module | None = None  # the same function, which adds up its terms
        self._per_row: Any = None  # the same function, which returns a loss per sample; of rows with weights
        self.ignored: int | None = None  # the class number that does not count, if the data has it
        self.accuracy: Accuracy | None = None  # as the dry run found it; None if targets are not classes
        self._name_parts()

    def _all_functions(self) -> list[Any]:
        if self.used is not None:
            return self.used.functions
        if self.by_output:
            return [function for loss in self.by_output.values() for function in loss.functions]
        return [] if self.function is None else [self.function]

    def named_modules(self, name: str) -> dict[str, nn.Module]:
        """Return `modules` under a name; of several losses as `name.output`."""
        if self.used is not None:
            return self.used.named_modules(name)
        if self.by_output:
            modules: dict[str, nn.Module] = {}
            for output, each in self.by_output.items():
                modules |= each.named_modules(f"{name}.{output}")
            return modules
        owner = self.function
        if isinstance(owner, types.MethodType):
            owner = owner.__self__
        return {name: owner} if isinstance(owner, nn.Module) else {}

    @property
    def is_assumed_mean(self) -> bool:
        """Whether a custom loss, or the model's own, is assumed to be a mean over samples."""
        if self.by_output:
            return any(each.is_assumed_mean for each in self.by_output.values())
        return not self.is_known and Weighting.SAMPLES in (self.weightings.values() or [self.weighting])

    @property
    def gives_pairs(self) -> bool:
        """Whether the user's function, the model, or one of several losses returns (sum, weight)."""
        own = self.function is None and Weighting.WEIGHTS in self.weightings.values()
        return bool(self._gives_pairs) or own or any(each.gives_pairs for each in self.by_output.values())

    def describe(self) -> str:
        """Return a description that ranks compare."""
        if self.by_output:
            losses = [
                f"{self._factors.get(f'{name}_loss', 1.0):g} x {name}: {each.describe()}"
                for name, each in self.by_output.items()
            ]
            return "; ".join(losses)
        own = type(self.function).__name__
        if self.factor != 1:
            own = f"{self.factor:g} x {own}"
        details = [f"{self._factors.get(name, 1.0):g} x {name}, {each.value}" for name, each in self.weightings.items()]
        if self.items is not None:
            details.append(f"by the number of {self.items.name}")
        if self.gathers:
            details.append(f"{len(self.gathers)} gathers of rows")
        if not details:
            return f"{own}, {self.weighting.value}"
        return "; ".join([own, *details])

    @property
    def has_weights(self) -> bool:
        """Whether the step needs the weights of the other ranks."""
        return Weighting.WEIGHTS in (self.weightings.values() or [self.weighting])

    def components(self, loss: BatchLoss) -> list[tuple[float, Weighting, BatchLoss]]:
        """Return (factor, weighting, loss) of each loss that a batch's loss is the sum of."""
        if not self.weightings:
            return [(1.0, self.weighting, loss)]
        return [(self._factors.get(name, 1.0), each, loss.parts[name]) for name, each in self.weightings.items()]

    def number_of(self, loss: BatchLoss) -> float:
        """Return a batch's loss as the history has it: a mean, 0 if nothing counts, or a sum."""
        if self.weighting is Weighting.NOTHING:
            return float(loss.value.detach())
        return float(loss.mean_or_zero.detach())

    def without_rows(self) -> BatchLoss:
        """Return the loss of no samples."""
        zero = BatchLoss(torch.zeros((), device="cpu"), 0.0, 0.0)
        return replace(zero, parts=dict.fromkeys(self.shown, zero))

    def combined(self, means: Mapping[str, float], weights: Mapping[str, float]) -> float:
        """Return the sum of several losses; a mean of weight 0 adds nothing, and NaN if all are."""
        counted = [name for name, each in self.weightings.items() if weights[name] or each is Weighting.NOTHING]
        if not counted:
            return math.nan
        return exact_sum([self._factors.get(name, 1.0) * means[name] for name in counted])

    def prepare_target(self, target: Tensor, dtype: torch.dtype) -> Tensor:
        """Return targets in the dtype that the loss needs: class indices, or the model's floats."""
        if self.used is not None:
            return self.used.prepare_target(target, dtype)
        if target.dtype is torch.int64 and isinstance(self.function, _CLASS_LOSSES):
            return target
        if target.is_floating_point():
            return target.to(dtype)
        if target.is_complex() or self.by_output:
            return target  # each of several losses prepares its own
        if self.is_known and not isinstance(self.function, _CLASS_LOSSES):
            return target.to(dtype)
        return target.to(torch.int64)

    def inspect(self, targets: Tree | None, *, are_all: bool = True, rows_have_weights: bool = False) -> None:
        """Set the weighting by the targets, of the same kind on every rank.

        Unless these `are_all`, other samples may have a class number that does not count.
        """
        if self.used is not None:
            if self.used.function is not None:
                self.used.inspect(targets, are_all=are_all, rows_have_weights=rows_have_weights)
            self.ignored = self.used.ignored
            return
        if self.by_output:
            parts = parts_by_name(targets)
            for name, each in self.by_output.items():
                each.inspect(parts.get(name), are_all=are_all, rows_have_weights=rows_have_weights)
            self._name_parts()
            return
        if rows_have_weights:
            self._weigh_rows()
        self.ignored = ignored_class(self.function, labels_in(targets), is_known=self.is_known, are_all=are_all)
        self._weigh_classes(targets)

    def _weigh_rows(self) -> None:
        require(
            self.function is not None,
            "sample_weight and class_weight weigh the loss of each sample, and this model computes its own: pass the "
            "weights to the model, as part of X.",
        )
        self._per_row = self.function
        if self.is_known:
            self._per_row = copy.copy(self.function)  # the program's own stays as it is
            self._per_row.reduction = "none"

    def _weigh_classes(self, targets: Tree | None) -> None:
        """Set the weighting by classes, if they have weights or one does not count."""
        function = self.function
        if self._reduction != "mean" or not isinstance(function, (nn.CrossEntropyLoss, nn.NLLLoss)):
            return
        if not isinstance(targets, Tensor) or targets.is_floating_point() or targets.is_complex():
            return  # probabilities: every row counts
        if function.weight is not None or self.ignored is not None:
            self.weighting = Weighting.WEIGHTS
            # Its own mean over a part without a valid target would be 0 / 0.
            self._summing = copy.copy(function)  # likewise
            self._summing.reduction = "sum"

    def first(self, output: Any, batch: Batch) -> BatchLoss:
        """Return the loss of the first batch, without the weights of its samples; find out its form and weighting."""
        batch = replace(batch, weights=None)
        if self.by_output:
            found = self._of_several(output, batch, is_first=True)
        elif self.function is None:
            self._inspect_model_losses(output)
            found = self._of_model(output, batch)
        else:
            found = self._of_function(output, batch, is_first=True)
        self.weight_per_row = float(found.weight) / (batch.rows or 1)
        if not 0 < self.weight_per_row < math.inf:
            self.weight_per_row = 1.0
        return found

    def _inspect_result(self, result: Any, rows: int) -> None:
        """Set the weighting by what the user's function returned for some samples."""
        if self._per_row is not None and not self.is_known:
            _check_one_per_row(result, rows)
        is_pair = isinstance(result, tuple) and len(result) == 2
        if is_pair:
            returned = result
            is_loss = isinstance(result[0], Tensor) and result[0].numel() == 1
        else:
            returned = type(result).__name__
            is_loss = isinstance(result, Tensor)
        if not is_loss:
            raise ConfigError(
                "loss_fn must return a tensor, the mean over samples, or (sum, weight) with one number each; it "
                f"returned {returned}."
            )
        if self.is_known:
            return
        weighting_of(result)  # refuses a weight that is not a count
        self._gives_pairs = is_pair
        if is_pair:
            self.weighting = Weighting.WEIGHTS

    def _inspect_model_losses(self, output: Any) -> None:
        """Find the losses and other scalars that a model returns."""
        own, scalars = loss_in_output(output)
        if own is None:
            self.weightings = {name: weighting_of(value) for name, value in scalars.items()}
            unknown = [name for name in self._factors if name not in scalars]
            if unknown:
                raise unknown_name("the model's output", unknown[0], list(scalars), "entry")
        else:
            self.weighting = weighting_of(own)
            self._gives_pairs = self.weighting is Weighting.WEIGHTS
            require(
                not self._factors,
                'loss_weights weigh several losses, and the model returns one, under "loss": weigh its parts there.',
            )
        for name in scalars:
            check_free(name, f"the model or the step returns {name!r}")
        self.shown = tuple(scalars)

    def join_names(self, names_by_rank: Sequence[Sequence[str]]) -> None:
        """Take the numbers of all ranks' dry runs for `shown`, in one order: what they return may depend on rows."""
        if self.function is None and not self.weightings:
            self.shown = tuple(dict.fromkeys(name for names in names_by_rank for name in names))

    def use_num_items(self, rule: ItemRule) -> None:
        """Take the model's loss for the sum of its terms, divided by what a rule counts."""
        self.items = rule
        self.uses_num_items = True
        self.weighting = Weighting.WEIGHTS

    def _name_parts(self) -> None:
        if self.by_output:
            self.weightings = {f"{name}_loss": each.weighting for name, each in self.by_output.items()}
            self.shown = tuple(self.weightings)

    def check_shapes(self, output: Any, target: Tree | None, column: str = "y.reshape(-1, 1)") -> None:
        """Refuse shapes that PyTorch would broadcast into a table of every sample against every other."""
        for name, each in self.by_output.items():
            with naming_output(name):
                each.check_shapes(*self.of_output(name, output, target), column)
        if self.function is None or not isinstance(output, Tensor) or not isinstance(target, Tensor):
            return
        if output.shape == target.shape or output.numel() == target.numel() == 1:  # one sample, whatever its shape
            return
        self._check_classes_first(output, target)
        remedy = _remedy_for_broadcast(output, target, column)
        if not isinstance(self.function, _ELEMENTWISE_LOSSES) and (self.is_known or not remedy):
            return
        remedy = remedy or "this loss needs one shape. Change the model's last layer, or y."
        raise ConfigError(f"the model's output has shape {_shape(output)} and y has {_shape(target)}: {remedy}")

    def _check_classes_first(self, output: Tensor, target: Tensor) -> None:
        """Refuse scores of tokens or pixels with the classes in the last dimension."""
        if not self.is_known or not isinstance(self.function, (nn.CrossEntropyLoss, nn.NLLLoss)):
            return
        if output.dim() < 3 or output.shape[:-1] != target.shape or output.shape[2:] == target.shape[1:]:
            return
        remedy = "transpose(1, 2)" if output.dim() == 3 else "movedim(-1, 1)"
        raise ConfigError(
            f"the model's output has shape {_shape(output)} and y has {_shape(target)}, and "
            f"{type(self.function).__name__} wants the classes in dimension 1: let the model return output.{remedy}."
        )

    def __call__(self, output: Any, batch: Batch) -> BatchLoss:
        """Return the loss of a batch."""
        if self.by_output:
            return self._of_several(output, batch)
        if self.function is None:
            return self._of_model(output, batch)
        return self._of_function(output, batch)

    def _of_function(self, output: Any, batch: Batch, *, is_first: bool = False) -> BatchLoss:
        target = batch.targets
        rows = batch.rows
        if batch.weights is not None:
            found = self._weighted(output, target, batch.weights)
        elif self._summing is not None and self.weighting is Weighting.WEIGHTS:
            assert isinstance(target, Tensor)
            found = BatchLoss(self._summing(output, target), 1, weight_of_classes(self.function, target))
        else:
            result = self.function(output, target)
            if is_first:
                self._inspect_result(result, rows)
            self._check_form(result)
            is_sum = self.weighting is Weighting.NOTHING
            found = BatchLoss(result, 1, rows) if is_sum else batch_loss_of(result, rows)
        if self.factor == 1:
            return found
        if found.value.is_leaf:  # a constant stays one
            found.value = found.value.detach()
        return replace(found, value=found.value * self.factor)

    def of_output(self, name: str, output: Any, target: Any) -> tuple[Any, Any]:
        """Return one of several outputs and its target, in the dtype that its loss needs; all if `name` is empty.

        A y that is one tensor is the target of each output.
        """
        if not name:
            return output, target
        own = _part_of(output, name, "the model's output")
        if not isinstance(target, Tensor):
            target = _part_of(target, name, "y")
        if isinstance(target, Tensor) and isinstance(own, Tensor) and own.is_floating_point():
            target = self.outputs[name].prepare_target(target, own.dtype)
        return own, target

    def _of_several(self, output: Any, batch: Batch, *, is_first: bool = False) -> BatchLoss:
        parts = {}
        for name, each in self.by_output.items():
            own, target = self.of_output(name, output, batch.targets)
            own_batch = replace(batch, targets=target)
            if is_first:
                with naming_output(name):
                    parts[f"{name}_loss"] = each.first(own, own_batch)
            else:
                parts[f"{name}_loss"] = each(own, own_batch)
        if is_first:
            self._name_parts()
        return self._sum_of_losses(parts, batch.rows)

    def _of_model(self, output: Any, batch: Batch) -> BatchLoss:
        """Return the loss and the other scalars that a model computed."""
        rows = batch.rows
        own, scalars = loss_in_output(output)
        if own is None and not self.weightings:  # the first result
            self._inspect_model_losses(output)
        parts = {name: batch_loss_of(value, rows) for name, value in scalars.items()}
        # Zeros for a number that this batch does not have; one that the dry run did not have is in `parts` alone.
        if any(name not in scalars for name in self.shown):
            parts = {**self.without_rows().parts, **parts}
        if own is None:
            self._check_all_losses(scalars)
            return self._sum_of_losses(parts, rows)
        self._check_form(own)
        if self.items is not None and self.uses_num_items:
            return BatchLoss(own.reshape(()), self.items.items(batch), self.items.count(batch), parts)
        return replace(batch_loss_of(own, rows), parts=parts)

    def _check_all_losses(self, scalars: Mapping[str, Any]) -> None:
        """Raise ConfigError unless a model returned the losses of its dry run."""
        if any(name not in scalars for name in self.weightings):
            raise ConfigError(NO_LOSS)
        for name in scalars:
            if name not in self.weightings:
                raise ConfigError(
                    f"the model returned the loss {name!r}, which it did not return in the dry run: return all losses "
                    "for every batch, as (sum, weight) with weight 0 where nothing counts."
                )

    def _sum_of_losses(self, parts: Mapping[str, BatchLoss], rows: int) -> BatchLoss:
        """Return the sum of several losses, weighted by samples; each part has its own weight."""
        components = self.components(BatchLoss(torch.zeros((), device="cpu"), 1, 1, parts))
        first = components[0][2].value
        if first.is_cpu:
            counted = [factor * each.mean for factor, _, each in components if each.weight]
            total = torch.stack(counted).sum() if counted else first * math.nan
        else:
            # The same without waiting for the accelerator.
            means = torch.stack([factor * each.mean.double() for factor, _, each in components])
            counts = vector_on([each.weight for _, _, each in components], first.device) != 0
            total = means.masked_fill(~counts, 0.0).sum().masked_fill(~counts.any(), math.nan)
        return BatchLoss(total, rows, rows, parts)

    def _check_form(self, result: Any) -> None:
        """Refuse (sum, weight) if the first batch had a mean, and the reverse: other ranks would wait."""
        forms = ("a mean", "(sum, weight)")
        pair = isinstance(result, tuple)
        if self._gives_pairs is not None and pair != self._gives_pairs:
            raise ConfigError(
                f"the loss was {forms[self._gives_pairs]} in the dry run, and is {forms[pair]} now: return "
                "(sum, weight) for every batch, with weight 0 where nothing counts."
            )

    def measured_part(self, output: Any) -> Any:
        """Return what metrics compare with targets; of what a step of the user's own returns, "output", or None."""
        if self.used is None:
            return output
        return output.get("output") if isinstance(output, Mapping) else None

    def without_own(self, output: Any) -> Any:
        """Return a model's output without its own loss and other scalars; in a dataclass they are None."""
        named = fields_of(output)
        if self.function is not None or self.used is not None or named is None or "loss" not in named:
            return output
        rows = {name: part for name, part in named.items() if name != "loss" and not is_scalar(part)}
        return with_fields(output, rows)

    def _weighted(self, output: Any, target: Any, weights: Tensor) -> BatchLoss:
        """Return the loss of rows with weights; the divisor is as without weights."""
        assert self._per_row is not None
        rows = len(weights)
        terms = self._per_row(output, target).reshape(rows, -1)
        adds = self._reduction in ("sum", "batchmean") or self.weighting is Weighting.WEIGHTS
        of_row = terms.sum(1) if adds else terms.mean(1)
        total = (of_row * weights).sum()
        if self.weighting is Weighting.WEIGHTS:
            return BatchLoss(total, 1, weight_of_classes(self.function, target))
        return BatchLoss(total, 1, rows)


def _shape(tensor: Tensor) -> str:
    return f"({', '.join(['n', *map(str, tensor.shape[1:])])})"


def _remedy_for_broadcast(output: Tensor, target: Tensor, column: str) -> str:
    """Return the remedy if one of two shapes has a last dimension of 1 more than the other, otherwise ""."""
    if output.shape == (*target.shape, 1):
        change = f"{column} as y, or return output.squeeze(-1) from the model"
    elif target.shape == (*output.shape, 1):
        change = "numpy.asarray(y).reshape(-1) as y, or return output.unsqueeze(-1) from the model"
    else:
        return ""
    return f"the loss would compare every sample with every other. Give {change}."


def _check_one_per_row(result: Any, rows: int) -> None:
    if isinstance(result, Tensor) and result.dim() > 0 and result.shape[0] == rows:
        return
    found = f"shape {list(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
    raise ConfigError(
        "sample_weight and class_weight weigh the loss of each sample: loss_fn must return one per sample, "
        f"shape ({rows},) for {rows} samples, not their mean; it returned {found}."
    )


def _part_of(value: Any, name: str, owner: str) -> Any:
    parts = value if isinstance(value, Mapping) else parts_by_name(value)
    found = parts.get(name)
    if found is None:
        has = ", ".join(each for each, part in parts_by_name(value).items() if part is not None)
        if not has:
            has = f"one, a {type(value).__name__}"
        raise ConfigError(
            f"{owner} has no part {name!r}, for which there is a loss or a metric; it has {has}. Use these names."
        )
    return found


@contextlib.contextmanager
def naming_output(name: str) -> Iterator[None]:
    """Name an output in errors."""
    try:
        yield
    except ConfigError as error:
        if not name:
            raise
        raise ConfigError(f"output {name!r}: {error}") from error


def _losses_by_output(loss_fn: Any) -> dict[str, Loss]:
    """Return the losses in a dictionary by output name; none if there is one loss."""
    if not isinstance(loss_fn, Mapping):
        return {}
    return {str(name): Loss(each) for name, each in loss_fn.items() if each is not None}


def _checked_factors(loss_fn: Any, given: Any) -> dict[str, float]:
    if isinstance(loss_fn, Mapping):
        return _factors_by_output(loss_fn, given)
    if loss_fn is not None and is_number(given):
        return {"loss": float(given)}
    if isinstance(loss_fn, (list, tuple)) or (loss_fn is not None and given):
        raise ConfigError(
            "several losses and their loss_weights go by output name: give loss_fn as a dictionary, such as "
            'loss_fn={"a": "mse", "b": "cross_entropy"}, loss_weights={"a": 0.1}; the model and y have these keys, and '
            "tuples have 0, 1, ..."
        )
    return _numbers_by_name(given)


def _factors_by_output(losses: Mapping[Any, Any], given: Any) -> dict[str, float]:
    factors = _numbers_by_name(given)
    has_any = any(each is not None for each in losses.values())
    require(has_any, "loss_fn is an empty dictionary: give a loss for each output, by name.")
    outputs = [str(each) for each in losses]
    for name in factors:
        if name not in outputs:
            raise unknown_name("loss_fn", name, outputs, "output")
    return {f"{name}_loss": factor for name, factor in factors.items()}


def _numbers_by_name(given: Any) -> dict[str, float]:
    right = isinstance(given, Mapping) and all(is_number(factor) for factor in given.values())
    require(right, f"loss_weights must be a dictionary of numbers by name, or a number for one loss_fn, got {given!r}.")
    return {str(name): float(factor) for name, factor in given.items()}
