"""The dry run: find what does not fit before anything has changed, on every rank alike.

Training is tried on one micro-batch, in training mode, with gradients; evaluation and prediction on two rows, in
evaluation mode. No rank waits for another, and nothing is changed.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from cyxtrain.data.batches.batch import Batch
from cyxtrain.data.batches.prefetch import Placement
from cyxtrain.data.batches.rows import Rows
from cyxtrain.data.batches.structure import Tree, leaves, map_tree, named_tensors, with_parts
from cyxtrain.data.sources.source import Source
from cyxtrain.environment import torch_compat
from cyxtrain.environment.accelerator import is_accelerator, remedy_for_devices
from cyxtrain.errors import ConfigError, counted, shortened, warn_together
from cyxtrain.metrics.find_accuracy import find_accuracy
from cyxtrain.metrics.loss import Loss
from cyxtrain.metrics.metric import Metrics
from cyxtrain.metrics.named_metrics import ACCURACY, NamedMetrics, make_metrics
from cyxtrain.metrics.weighting import Weighting, weight_of_classes
from cyxtrain.metrics.whole_set import WholeSet, tried_sets
from cyxtrain.parallel import gathering_alone
from cyxtrain.progress.flops import flops_of_step
from cyxtrain.training.inputs.checks import check_classes, warn_of_activation
from cyxtrain.training.inputs.weight_check import COMPARED_ROWS, WeightCheck, warning_of
from cyxtrain.training.model.forward import ModelCall
from cyxtrain.training.model.out_of_memory import is_full, memory_explained
from cyxtrain.training.model.snapshot import put_into_training, snapshot
from cyxtrain.world.world import World

_ROWS = 2
"""To try an evaluation or a prediction on."""
ONE_VALUE = "more than 1 value per channel"
"""PyTorch's words where batch norm is trained on a single value per channel."""
_ONE_ROW = "Give each of {} at least two rows at once: set a larger batch_size; or use nn.GroupNorm instead."
_REENTRANT = "Checkpointing is not compatible"
"""PyTorch's error if gradient checkpointing has use_reentrant=True and torch.autograd.grad is called."""


class DryRun:
    """Tries a model, its loss and its metrics on some rows; `is_of_fit`: then parameters are restored, too."""

    def __init__(
        self,
        world: World,
        model: nn.Module,
        loss: Loss,
        call: ModelCall,
        placement: Placement,
        metrics: NamedMetrics,
        *,
        is_of_fit: bool,
    ) -> None:
        self._world = world
        self._model = model
        self._loss = loss
        self._call = call
        self._placement = placement
        self._metrics = metrics
        self._is_of_fit = is_of_fit
        self.flops_per_row: float | None = None
        """Of forward and backward, where they have been counted."""
        self.rows_second: frozenset[str] = frozenset()
        """Names of the parts of a prediction whose rows are in the second dimension."""

    def train(self, source: Source, rows: Rows, *, counts_flops: bool = False) -> Metrics:
        """Try a step of training on copies of a micro-batch's `rows`; return the metrics, which have seen nothing.

        Cost: that of one micro-batch, and a copy of what is trained; twice that if operations are counted, which
        `counts_flops` asks for on a CPU, too.
        """
        batch = self._placed(rows)
        if batch.rows == 0:
            return self.evaluate(source)
        few = batch if batch.rows >= COMPARED_ROWS else self._placed(source.first(COMPARED_ROWS))
        if batch.rows == 1 and any(isinstance(each, torch_compat.BatchNormModule) for each in self._model.modules()):
            batch = few  # what batch norm cannot be trained on, `with_batch_norm_checked` refuses with the counts
        check = WeightCheck(self._model, self._loss, self._call, few)
        with memory_explained(self._world), self._without_trace(), torch.enable_grad():
            put_into_training(self._model, *self._loss.modules)
            for module in self._model.modules():
                if isinstance(module, nn.SyncBatchNorm):
                    module.eval()  # in training mode it waits for the other ranks
            output, value = self._forward(source, batch)
            warn_of_activation(output, batch.targets, self._loss, self._model)
            self._loss.first_value = float(value.detach())
            if self._call.optimizes:
                return self._measuring(output, batch, value)
            with _described_error(
                self._world, f"there is no gradient of the loss, tried on shape {_shapes(batch.inputs)}"
            ):
                self._backward(value)
            measures = self._measuring(output, batch, value)
            if counts_flops or is_accelerator(self._placement.device):
                with contextlib.suppress(Exception):  # training continues without it
                    flops = flops_of_step(lambda: self._gradients(self._forward(source, batch)[1]))
                    self.flops_per_row = flops / batch.rows
            self._find_weights(check)
            return measures

    def check_weights(self, rows: Rows) -> None:
        """Find out by a few rows what the loss is a mean over; set `Loss.warning` if that is unknown."""
        check = WeightCheck(self._model, self._loss, self._call, self._placed(rows))
        with self._without_trace():
            self._find_weights(check)

    def _find_weights(self, check: WeightCheck) -> None:
        with torch.no_grad(), gathering_alone():
            self._put_into_evaluation()
            self._loss.warning = warning_of(check.find_items) or warning_of(check.find_weights)

    def evaluate(self, source: Source) -> Metrics:
        """Try an evaluation of a source's first rows; return the metrics."""
        batch = self._placed(source.first(_ROWS))
        check = WeightCheck(self._model, self._loss, self._call, self._placed(source.first(COMPARED_ROWS)))
        with memory_explained(self._world, trains=False), self._without_trace(), torch.no_grad():
            self._put_into_evaluation()
            with gathering_alone():
                warning_of(check.find_items)
            output, value = self._forward(source, batch)
            measures = self._measuring(output, batch, value)
            output = self._loss.measured_part(output)
            given = (self._metrics, self._metrics.outputs)
            measures.whole_sets = tried_sets(*given, self._loss, output, batch.answers, batch.rows)
            return measures

    def predict(self, source: Source) -> Any:
        """Try a prediction for a source's first rows; return the output without its values."""
        batch = self._placed(source.first(_ROWS))
        own = self._loss.function is None and self._loss.used is None
        missing = self._call.missing(self._model, batch.inputs) if own else []
        if missing:
            raise ConfigError(
                f"the forward of {type(self._model).__name__} requires {', '.join(missing)}{self._call.names_differ}, "
                f"and predict passes the inputs alone: give {missing[0]} a default, as in {missing[0]}=None."
            )
        with memory_explained(self._world, trains=False), self._without_trace(), torch.no_grad():
            self._model.eval()
            output = self._output(batch, predicting=True)
            self.rows_second = self._find_rows_second(source, output, batch.rows)
        parts = dict(leaves(output))
        for name, part in parts.items():
            rows = pad_packed_sequence(part, batch_first=True)[0] if isinstance(part, PackedSequence) else part
            parts[name] = torch.empty_like(rows, device="meta") if isinstance(rows, Tensor) else rows
        return with_parts(output, parts)

    def _find_rows_second(self, source: Source, output: Any, rows: int) -> frozenset[str]:
        """Return the names of parts of three dimensions or more whose second one is as long as a batch, also of one."""

        def shapes(output: Any) -> dict[str, torch.Size]:
            return {name: part.shape for name, part in leaves(output) if isinstance(part, Tensor)}

        found = {name: shape for name, shape in shapes(output).items() if len(shape) > 2 and shape[1] == rows}
        found = {name: shape for name, shape in found.items() if shape[:2] != (1, 1)}
        one: dict[str, torch.Size] = {}
        if found:
            with contextlib.suppress(Exception):  # a model that takes no single row
                one = shapes(self._output(self._placed(source.first(1)), predicting=True))
        return frozenset(name for name, shape in found.items() if one.get(name, ())[:2] == (shape[0], 1))

    def _put_into_evaluation(self) -> None:
        for module in (self._model, *self._loss.modules):
            module.eval()

    def _placed(self, rows: Rows) -> Batch:
        return Batch(0, *self._placement.place(rows))

    def _forward(self, source: Source, batch: Batch) -> tuple[Any, Tensor]:
        loss, output = self._loss, self._output(batch)
        if loss.function is None:
            return output, self._own_loss(output, batch)
        loss.check_shapes(output, batch.targets, source.column)
        check_classes(source.targets, output, loss)
        with _described_error(
            self._world,
            f"the loss cannot take the model's output and y, tried on {_described(output)} and "
            f"{_described(batch.targets)}",
        ):
            result = loss.function(output, batch.targets)
        loss.inspect_result(result, batch.rows)
        if isinstance(result, tuple):
            loss.note_weight(result[1], batch.rows)
        elif loss.weighting is Weighting.TERMS and isinstance(batch.targets, Tensor):
            loss.note_weight(weight_of_classes(loss.function, batch.targets), batch.rows)
        return output, _total(result)

    def _output(self, batch: Batch, *, predicting: bool = False) -> Any:
        """Return the model's output; find out whether it needs gradients outside training."""
        call = self._call
        what = call.describe_failure(_shapes(batch.inputs))  # asked for now: a model may change its input
        with _described_error(self._world, what, batch.inputs):
            if torch.is_grad_enabled():
                return call(self._model, batch)
            try:
                return call.without_graph(self._model, batch, predicting=predicting)
            except RuntimeError as error:
                if is_full(error):
                    raise
                call.differentiates = True
                with contextlib.suppress(Exception):
                    return call.without_graph(self._model, batch, predicting=predicting)
                raise

    def _own_loss(self, output: Any, batch: Batch) -> Tensor:
        try:
            self._loss.inspect_result(output, batch.rows)
            found = self._loss(output, batch)
            self._loss.note_weight(found.weight, batch.rows)
            return found.value
        except ConfigError as error:
            if self._model.training:
                raise
            raise ConfigError(
                f"in evaluation mode the model returned {_described(output)}, and no loss: {error} A model that has a "
                "loss in training mode only trains without validation data, and predicts."
            ) from error

    def _backward(self, value: Tensor) -> None:
        """Compute the gradients without accumulating them, so that hooks of other wrappers do not run."""
        if not value.requires_grad:
            raise ConfigError(
                "the loss does not depend on the model's parameters: compute it from the model's output by PyTorch's "
                "operations, without detach(), item() or argmax(). If the first batch has nothing to compare, such "
                "as no pair of rows, return output.sum() * 0."
            )
        _warn_of_others(value, self._trained)
        try:
            self._gradients(value)
        except RuntimeError as error:
            if _REENTRANT not in str(error):
                raise

    @property
    def _trained(self) -> list[nn.Parameter]:
        modules = (self._model, *self._loss.modules)
        return [each for module in modules for each in module.parameters() if each.requires_grad]

    def _gradients(self, value: Tensor) -> None:
        torch.autograd.grad(value, self._trained, allow_unused=True)

    def _measuring(self, output: Any, batch: Batch, value: Tensor) -> Metrics:
        own, output = self._metrics.get(ACCURACY), self._loss.measured_part(output)
        if output is None and self._loss.used is not None:
            return self._without_output()
        if (own is None or isinstance(own, str)) and ACCURACY not in self._loss.shown:
            asked = own is not None
            self._loss.accuracy = find_accuracy(self._loss, output, batch.answers, value.detach(), asked=asked)
        is_own = self._loss.function is None and self._loss.used is None
        if is_own and self._loss.accuracy is None and not self._metrics.outputs:
            return make_metrics(self._metrics, self._loss, None, None, 0)
        with torch.no_grad():  # they see what they see in training: no graph
            output = map_tree(Tensor.detach, output)
            return make_metrics(self._metrics, self._loss, output, batch.answers, batch.rows)

    def _without_output(self) -> Metrics:
        """Return no metrics, for a step of the user's own; refuse those that it does not return itself."""
        trains = self._model.training  # then metrics over whole sets are not computed
        given = [name for name, each in self._metrics.items() if not (trains and isinstance(each, WholeSet))]
        missing = [name for name in given if name not in self._loss.shown]
        if missing:
            raise ConfigError(
                f"the metrics {shortened(missing)} compare outputs with y, and the dictionary that the step returns "
                'has no "output": add it, as in {"loss": loss, "output": scores}, or the metric itself, as a number.'
            )
        return Metrics()

    @contextlib.contextmanager
    def _without_trace(self) -> Iterator[None]:
        owners = [self._model, *self._call.owners, *self._loss.functions, *self._metrics.values()]
        kept = snapshot(owners, self._placement.device, copies=self._is_of_fit)
        with kept, gathering_alone() as self._loss.gathers:
            yield


@contextlib.contextmanager
def _described_error(world: World, what: str, inputs: Tree | None = None) -> Iterator[None]:
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        if is_full(error):
            raise
        remedy = f". {_ONE_ROW.format(counted(world.size, 'rank'))}" if ONE_VALUE in str(error) else ""
        remedy = remedy or remedy_for_devices(error) or _remedy_for_dtype(error, inputs)
        raise ConfigError(f"{what}: {type(error).__name__}: {error}{remedy}") from error


def _remedy_for_dtype(error: Exception, inputs: Tree | None) -> str:
    """Return what to do if a layer of floats got whole numbers, or an embedding got floats; "" for other errors."""
    text = str(error)
    if "scalar types: Long, Int" in text:
        return ". An embedding takes whole numbers: convert them with .long(), or .astype('int64') in NumPy."
    if not ("same dtype" in text or "should be the same" in text) or not re.search(r"(?i)\b(long|int|short)", text):
        return ""
    given = named_tensors(inputs, "X")
    whole = [name for name, each in given if not (each.is_floating_point() or each.dtype is torch.bool)]
    what = shortened(whole)
    return f". {what} holds whole numbers: convert it with .float(), or .astype('float32') in NumPy." if whole else ""


def _warn_of_others(value: Tensor, trained: Sequence[Tensor]) -> None:
    """Warn of parameters on which the loss depends and that are part of neither model nor loss."""
    known, seen, queue = {id(each) for each in trained}, set(), [value.grad_fn]
    others: dict[int, list[int]] = {}
    while queue:
        node = queue.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        queue += [following for following, _ in node.next_functions]
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, nn.Parameter) and id(leaf) not in known:
            others[id(leaf)] = list(leaf.shape)
    if others:
        warn_together(
            f"the loss depends on {counted(len(others), 'parameter')} of shape {shortened(map(str, others.values()))} "
            "that belong neither to the model nor to loss_fn: nothing trains, saves or averages them. Give a loss_fn "
            "that is a torch.nn.Module and has them, or make them part of the model."
        )


def _total(result: Any) -> Tensor:
    """Return one number for a loss's result: a tensor, (sum, weight), or several by name."""
    if isinstance(result, dict):
        return torch.stack([_total(each) for each in result.values()]).sum()
    found: Tensor = result[0] if isinstance(result, tuple) else result
    return found.mean()


def _shapes(tree: Tree) -> str:
    if isinstance(tree, Tensor):
        return str(list(tree.shape))
    return ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in named_tensors(tree, "X"))


def _described(value: Any) -> str:
    if isinstance(value, (dict, tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
