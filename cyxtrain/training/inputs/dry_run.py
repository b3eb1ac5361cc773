"""The dry run: a trial of a model, its loss and its metrics on a few samples, before they are used.

Training is tried on one micro-batch, in training mode, with gradients; evaluation and prediction on two samples, in
evaluation mode. No rank waits for another, and afterwards everything is as it was.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
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
from cyxtrain.metrics.weighting import BatchLoss
from cyxtrain.metrics.whole_set import WholeSet, checked_whole_sets
from cyxtrain.parallel import gathering_alone
from cyxtrain.progress.flops import flops_of_step
from cyxtrain.training.inputs.checks import check_classes, lookups_checked, warn_of_activation
from cyxtrain.training.inputs.weight_check import COMPARED_ROWS, WeightCheck
from cyxtrain.training.model.forward import ModelCall
from cyxtrain.training.model.out_of_memory import is_full, memory_explained
from cyxtrain.training.model.snapshot import inputs_seen, put_into_training, snapshot
from cyxtrain.world.world import World

# Samples to try an evaluation or a prediction on.
_ROWS = 2
# Part of PyTorch's error for batch norm that is trained on a single value per channel.
_ONE_VALUE = "more than 1 value per channel"
# Part of PyTorch's error if gradient checkpointing has use_reentrant=True and torch.autograd.grad is called.
_REENTRANT = "Checkpointing is not compatible"


@dataclass(kw_only=True)
class Tried:
    """The results of a dry run.

    Attributes:
        metrics: The user's metrics, still empty.
        first_loss: Loss of a micro-batch, before training.
        warning: A warning that the loss is weighted wrongly; "" if nothing suggests it.
        flops_per_row: Operations of forward and backward; None: not counted.
        has_one_value_per_row: Whether a batch norm in training mode gets a single value per channel of a row.
        rows: Rows of a prediction.
        output: The output of a prediction, with tensors on the meta device.
        rows_second: Names of the output's parts whose rows are in the second dimension, as in the states of an LSTM.
    """

    metrics: Metrics = field(default_factory=Metrics)
    first_loss: float = math.inf
    warning: str = ""
    flops_per_row: float | None = None
    has_one_value_per_row: bool = False
    rows: int = 0
    output: Any = None
    rows_second: frozenset[str] = frozenset()


class DryRun:
    """A trial of a model, its loss and its metrics on some samples; `is_of_fit`: restore parameters, too."""

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

    def train(self, source: Source, rows: Rows, *, counts_flops: bool = False) -> Tried:
        """Try a step of training on copies of a micro-batch's `rows`.

        `counts_flops`: count operations on a CPU, too; on an accelerator they are always counted.

        Cost: one micro-batch, and a copy of what is trained. A custom loss is also computed for a few single samples; a
        model that computes its own loss gets them one by one.
        """
        batch = self._placed(rows)
        if batch.rows == 0:
            return self.evaluate(source)
        few = batch
        if batch.rows < COMPARED_ROWS:
            few = self._placed(source.first(COMPARED_ROWS))
        if batch.rows == 1 and self._batch_norms():
            batch = few  # batch norm cannot train on one sample; `with_batch_norm_checked` refuses it, with the counts
        check = None if self._loss.is_known else WeightCheck(self._model, self._loss, self._call, few)
        with memory_explained(self._world), self._without_trace(), torch.enable_grad():
            put_into_training(self._model, *self._loss.modules)
            with self._values_per_channel() as values, lookups_checked(self._model, batch.inputs, source):
                output, loss, flops = self._counted_step(source, batch, counts_flops=counts_flops)
            tried = Tried(metrics=self._measuring(output, batch, loss), first_loss=self._loss.number_of(loss))
            tried.has_one_value_per_row = batch.rows in values
            if flops:
                tried.flops_per_row = flops / batch.rows
            if check is not None and not self._call.optimizes:
                tried.warning = self._problem(check)
            return tried

    def _batch_norms(self) -> list[nn.Module]:
        return [module for module in self._model.modules() if isinstance(module, torch_compat.BatchNormModule)]

    @contextlib.contextmanager
    def _values_per_channel(self) -> Iterator[set[int]]:
        """Collect the numbers of values per channel that batch norms in training mode get within."""
        found: set[int] = set()
        norms = self._batch_norms()
        training = [norm for norm in norms if norm.training]
        for norm in norms:
            if isinstance(norm, nn.SyncBatchNorm):
                norm.eval()  # in training mode it waits for the other ranks
        with inputs_seen(training, lambda inputs: found.add(_values_of_channel(inputs))):
            yield found

    def _counted_step(self, source: Source, batch: Batch, *, counts_flops: bool) -> tuple[Any, BatchLoss, int | None]:
        """Return the output of a step, its loss and its operations; None: not counted, or it has no backward."""
        flops: int | None = None
        results: list[tuple[Any, BatchLoss, bool]] = []
        if counts_flops or is_accelerator(self._placement.device):
            with contextlib.suppress(Exception):  # what cannot be counted is tried without counting
                flops = flops_of_step(lambda: results.append(self._step(source, batch)))
        if not results:
            results.append(self._step(source, batch))
        output, loss, has_gradients = results[0]
        if not has_gradients:
            flops = None
        return output, loss, flops

    def _step(self, source: Source, batch: Batch) -> tuple[Any, BatchLoss, bool]:
        """Return the output of a forward and its loss, and whether its gradients have been computed."""
        self._loss.gathers.clear()
        output, loss = self._forward(source, batch)
        warn_of_activation(output, batch.targets, self._loss, self._model)
        if self._call.optimizes:
            return output, loss, False
        with described_error(self._world, f"there is no gradient of the loss, tried on shape {_shapes(batch.inputs)}"):
            return output, loss, self._backward(loss.value)

    def problem_of_weights(self, rows: Rows) -> str:
        """Find out on a few samples what the loss is a mean over; return a warning if that is unknown, or ""."""
        check = WeightCheck(self._model, self._loss, self._call, self._placed(rows))
        with self._without_trace():
            return self._problem(check)

    def _problem(self, check: WeightCheck) -> str:
        with torch.no_grad(), gathering_alone():
            self._put_into_evaluation()
            return check.problem()

    def evaluate(self, source: Source) -> Tried:
        """Try an evaluation of a source's first samples."""
        batch = self._placed(source.first(_ROWS))
        few = self._placed(source.first(COMPARED_ROWS)) if self._loss.function is None else None
        with memory_explained(self._world, trains=False), self._without_trace(), torch.no_grad():
            self._put_into_evaluation()
            if few is not None:
                with gathering_alone(), contextlib.suppress(Exception):
                    WeightCheck(self._model, self._loss, self._call, few).find_items()
            with lookups_checked(self._model, batch.inputs, source):
                output, loss = self._forward(source, batch)
            metrics = self._measuring(output, batch, loss)
            measured = self._loss.measured_part(output)
            metrics.whole_sets = checked_whole_sets(
                self._metrics, self._metrics.outputs, self._loss, measured, batch.labels, batch.rows
            )
            return Tried(metrics=metrics)

    def predict(self, source: Source) -> Tried:
        """Try a prediction for a source's first samples."""
        batch = self._placed(source.first(_ROWS))
        if self._loss.function is None and self._loss.used is None:
            self._refuse_required_targets(batch)
        with memory_explained(self._world, trains=False), self._without_trace(), torch.no_grad():
            self._model.eval()
            with lookups_checked(self._model, batch.inputs, source):
                output = self._output(batch, predicting=True)
            rows_second = self._find_rows_second(source, output, batch.rows)
        parts = {name: _on_meta(part) for name, part in leaves(output)}
        return Tried(rows=batch.rows, output=with_parts(output, parts), rows_second=rows_second)

    def _refuse_required_targets(self, batch: Batch) -> None:
        """Refuse a model that computes its own loss and whose forward requires more than the inputs."""
        missing = self._call.missing(self._model, batch.inputs)
        if missing:
            raise ConfigError(
                f"the forward of {type(self._model).__name__} requires {', '.join(missing)}{self._call.names_differ}, "
                f"and predict passes the inputs alone: give {missing[0]} a default, as in {missing[0]}=None."
            )

    def _find_rows_second(self, source: Source, output: Any, rows: int) -> frozenset[str]:
        """Return the names of parts whose rows are in the second of three or more dimensions."""
        lengths: dict[str, int] = {}  # of the first dimension
        for name, shape in _tensor_shapes(output).items():
            # (1, 1, ...) fits both layouts, and the first one needs no change.
            if len(shape) > 2 and shape[1] == rows and shape[:2] != (1, 1):
                lengths[name] = shape[0]
        if not lengths:
            return frozenset()
        # The dimension of the rows is the one that shrinks with their number.
        of_one_row: dict[str, torch.Size] = {}
        with contextlib.suppress(Exception):  # a model may not take a single sample
            of_one_row = _tensor_shapes(self._output(self._placed(source.first(1)), predicting=True))
        return frozenset(name for name, length in lengths.items() if of_one_row.get(name, ())[:2] == (length, 1))

    def _put_into_evaluation(self) -> None:
        for module in (self._model, *self._loss.modules):
            module.eval()

    def _placed(self, rows: Rows) -> Batch:
        return Batch(0, *self._placement.place(rows))

    def _forward(self, source: Source, batch: Batch) -> tuple[Any, BatchLoss]:
        """Return the model's output and its loss; `Loss.first` adapts the loss object to this output."""
        output = self._output(batch)
        if self._loss.function is None:
            return output, self._own_loss(output, batch)
        self._loss.check_shapes(output, batch.targets, source.column)
        check_classes(source.targets, output, self._loss)
        described = f"{_described(output)} and {_described(batch.targets)}"
        with described_error(self._world, f"the loss cannot take the model's output and y, tried on {described}"):
            return output, self._loss.first(output, batch)

    def _output(self, batch: Batch, *, predicting: bool = False) -> Any:
        """Return the model's output; find out whether it needs gradients outside training."""
        call = self._call
        what = call.describe_failure(_shapes(batch.inputs))  # before the call: a model may change its input
        with described_error(self._world, what, batch.inputs):
            if torch.is_grad_enabled():
                return call(self._model, batch)
            try:
                return call.without_graph(self._model, batch, predicting=predicting)
            except RuntimeError as error:
                if is_full(error):
                    raise
                # A forward that computes derivatives fails without a graph. If a graph does not help, the first error
                # is raised.
                call.differentiates = True
                with contextlib.suppress(Exception):
                    return call.without_graph(self._model, batch, predicting=predicting)
                raise

    def _own_loss(self, output: Any, batch: Batch) -> BatchLoss:
        try:
            return self._loss.first(output, batch)
        except ConfigError as error:
            if self._model.training:
                raise
            raise ConfigError(
                f"in evaluation mode the model returned {_described(output)}, and no loss: {error} A model that has a "
                "loss in training mode only trains without validation data, and predicts."
            ) from error

    def _backward(self, value: Tensor) -> bool:
        """Compute the gradients; return False if PyTorch cannot compute them without accumulating them."""
        if not value.requires_grad:
            raise ConfigError(
                "the loss does not depend on the model's parameters: compute it from the model's output by PyTorch's "
                "operations, without detach(), item() or argmax(). If the first batch has nothing to compare, such "
                "as no pair of samples, return output.sum() * 0."
            )
        trained = trained_by(self._model, self._loss)
        _warn_of_others(value, trained)
        return gradients_of(value, trained) is not None

    def _measuring(self, output: Any, batch: Batch, loss: BatchLoss) -> Metrics:
        """Return the metrics to compute in training or evaluation; decide whether accuracy is among them."""
        output = self._loss.measured_part(output)
        if output is None and self._loss.used is not None:
            return self._without_output()
        asked = self._metrics.get(ACCURACY)
        if (asked is None or isinstance(asked, str)) and ACCURACY not in self._loss.shown:
            is_asked = asked is not None
            self._loss.accuracy = find_accuracy(self._loss, output, batch.labels, loss.value.detach(), asked=is_asked)
        is_own_loss = self._loss.function is None and self._loss.used is None
        if is_own_loss and self._loss.accuracy is None and not self._metrics.outputs:
            return make_metrics(self._metrics, self._loss, None, None, 0)
        with torch.no_grad():  # metrics get the output without its graph, as in training
            output = map_tree(Tensor.detach, output)
            return make_metrics(self._metrics, self._loss, output, batch.labels, batch.rows)

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
        """Restore within what the trial changes, in the model and in the user's other objects."""
        owners = [self._model, *self._call.owners, *self._loss.functions, *self._metrics.values()]
        with snapshot(owners, self._placement.device, copies=self._is_of_fit) as self._loss.gathers:
            yield


def trained_by(model: nn.Module, loss: Loss) -> list[nn.Parameter]:
    """Return the parameters of a model and its loss that are trained."""
    return [each for module in (model, *loss.modules) for each in module.parameters() if each.requires_grad]


def gradients_of(value: Tensor, parameters: Sequence[Tensor]) -> Sequence[Tensor] | None:
    """Return gradients, zeros of what is not used; None: PyTorch cannot compute them without accumulating them.

    They are not accumulated, so that hooks of other wrappers do not run.
    """
    try:
        return torch.autograd.grad(value, parameters, allow_unused=True, materialize_grads=True)
    except RuntimeError as error:
        if _REENTRANT not in str(error):
            raise
        return None


@contextlib.contextmanager
def described_error(world: World, what: str, inputs: Tree | None = None) -> Iterator[None]:
    """Describe an error of the user's code within, with a remedy: `what` failed, on which `inputs`."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        if is_full(error):
            raise
        remedy = remedy_for_devices(error) or _remedy_for_dtype(error, inputs)
        if _ONE_VALUE in str(error):
            remedy = (
                f". Give each of {counted(world.size, 'rank')} at least two samples at once: set a larger batch_size; "
                "or use nn.GroupNorm instead."
            )
        raise ConfigError(f"{what}: {type(error).__name__}: {error}{remedy}") from error


def _remedy_for_dtype(error: Exception, inputs: Tree | None) -> str:
    """Return the remedy for whole numbers in a layer of floats, or floats in an embedding, or ""."""
    message = str(error)
    if "scalar types: Long, Int" in message:  # PyTorch's words for an embedding that gets floats
        return (
            ". An embedding takes whole numbers: convert them with .long(), or .astype('int64') in NumPy and pandas; "
            "missing values (NaN) need a number of their own first."
        )
    if "index out of range in self" in message:  # PyTorch's words for an embedding that does not have a number
        return (
            ". An embedding looks up numbers from 0 to num_embeddings - 1; missing values (NaN, or -1 in pandas' "
            ".cat.codes) need a number of their own first."
        )
    differ = "same dtype" in message or "should be the same" in message
    if not differ or not re.search(r"(?i)\b(long|int|short)", message):
        return ""
    given = named_tensors(inputs, "X")
    whole = [name for name, each in given if not (each.is_floating_point() or each.dtype is torch.bool)]
    if not whole:
        return ""
    return f". {shortened(whole)} holds whole numbers: convert it with .float(), or .astype('float32') in NumPy."


def _warn_of_others(value: Tensor, trained: Sequence[Tensor]) -> None:
    """Warn of parameters on which the loss depends and that are part of neither model nor loss."""
    known = {id(each) for each in trained}
    others: dict[int, list[int]] = {}
    seen: set[Any] = set()
    queue = [value.grad_fn]
    while queue:
        node = queue.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        queue += [following for following, _ in node.next_functions]
        # AccumulateGrad nodes, the leaves of the graph, have their parameter in it.
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, nn.Parameter) and id(leaf) not in known:
            others[id(leaf)] = list(leaf.shape)
    if others:
        warn_together(
            f"the loss depends on {counted(len(others), 'parameter')} of shape {shortened(map(str, others.values()))} "
            "that belong neither to the model nor to loss_fn: nothing trains, saves or averages them. Give a loss_fn "
            "that is a torch.nn.Module and has them, or make them part of the model."
        )


def _values_of_channel(tensor: Tensor) -> int:
    channels = tensor.shape[1:2].numel()
    return tensor.numel() // (channels or 1)


def _tensor_shapes(output: Any) -> dict[str, torch.Size]:
    return {name: part.shape for name, part in leaves(output) if isinstance(part, Tensor)}


def _on_meta(part: Any) -> Any:
    """Return a tensor of an output without its values, packed rows as padded ones; other parts unchanged."""
    if isinstance(part, PackedSequence):
        part, _ = pad_packed_sequence(part, batch_first=True)
    return torch.empty_like(part, device="meta") if isinstance(part, Tensor) else part


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
