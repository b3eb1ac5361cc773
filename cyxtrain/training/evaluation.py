"""A model's loss, metrics and outputs over all rows: each counted once, in order."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence
from typing_extensions import override

from cyxtrain.callbacks.callback import Callbacks, Trainer, checked_callbacks
from cyxtrain.data.batches.batch import Batch, BatchShare
from cyxtrain.data.batches.structure import leaves, with_parts
from cyxtrain.data.slices import Slices
from cyxtrain.data.sources.source import Source
from cyxtrain.environment.accelerator import HostCopy, is_accelerator
from cyxtrain.errors import ConfigError
from cyxtrain.metrics.logged import LoggedNumbers
from cyxtrain.metrics.sums import MetricSums, correct_of
from cyxtrain.metrics.whole_set import CheckedWholeSet
from cyxtrain.optim.precision import float32_products
from cyxtrain.parallel import gathering_alone
from cyxtrain.progress.display import Display, Measured, Verbosity, make_display, numbers, pace
from cyxtrain.training.inputs.checked_data import CheckedData
from cyxtrain.training.model.compile import marked_steps
from cyxtrain.training.model.out_of_memory import memory_explained
from cyxtrain.training.model.snapshot import modes_kept
from cyxtrain.training.outside_fit.saved_predictions import (
    Predictions,
    Shapes,
    ShardFolder,
    finished,
    joined_rows,
    longest_of,
)
from cyxtrain.world.agreement import ending_group_on_error, on_first, raise_together
from cyxtrain.world.world import World


class Evaluation:
    """Metrics over all rows, the same on every rank: `loss, accuracy = ...`, `.loss`, `["accuracy"]`, `dict(...)`.

    It unpacks as loss, accuracy, then the other metrics. A regression has no accuracy: it unpacks as loss, then its
    metrics; without any, as loss and None.

    Args:
        metrics: By name.
    """

    def __init__(self, **metrics: float) -> None:
        self._metrics = metrics

    # `float | Any`: the accuracy may be None, and `loss + accuracy` needs no check in your code.
    def __iter__(self) -> Iterator[float | Any]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, key: str | int) -> float | Any:
        return self._metrics[key] if isinstance(key, str) else self._values[key]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Evaluation):
            return self._metrics == other._metrics
        return list(self) == list(other) if isinstance(other, (tuple, list)) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    @property
    def _values(self) -> list[Any]:
        return [*self._metrics.values()] if len(self._metrics) > 1 else [self.loss, None]

    def keys(self) -> list[str]:
        """Return the names of the metrics."""
        return list(self._metrics)

    def to_dict(self) -> dict[str, float]:
        """Return the metrics by name."""
        return dict(self._metrics)

    @property
    def loss(self) -> float:
        """The loss."""
        return self._metrics["loss"]

    @property
    def accuracy(self) -> float | None:
        """The share of rows with the right class; NaN if none counted, None if targets are not classes."""
        return self._metrics.get("accuracy")

    def __repr__(self) -> str:
        return f"Evaluation({', '.join(f'{name}={value:.6g}' for name, value in self._metrics.items())})"


def evaluate(call: Call, logged: LoggedNumbers) -> Evaluation:
    """Return loss, accuracy, metrics and what is logged in a call of `DistributedTrainer.evaluate`."""
    world = call.world
    with call.running() as measured:
        found = evaluate_rows(world, call.trainer.model, call.rows, call.callbacks, call, logged)
        assert found is not None
        measured.update(found)
    return Evaluation(**{**measured, **logged.over_ranks(world)})


def evaluate_rows(
    world: World,
    model: nn.Module,
    rows: CheckedData,
    callbacks: Callbacks,
    display: Display,
    logged: LoggedNumbers,
    *,
    should_stop: Callable[[], bool] = lambda: False,
) -> dict[str, float] | None:
    """Return loss, accuracy and metrics over all rows, the same on any number of ranks; None: this rank stopped early.

    If a callback ends the evaluation, they are over the first batches: those that were done. `should_stop` is called
    after each batch; it returns whether to skip the rest.
    """
    loss = rows.loss
    logged.reserved |= {*loss.shown, *rows.metrics.names}
    batches = rows.source.num_batches(rows.batch_size)
    totals = MetricSums(batches or 1, loss, rows.metrics)
    run = BatchRun(world, model, rows, "test", callbacks, display)
    whole = [(each, _Outputs(each.structure, owner=f"the metric {each.name}")) for each in rows.metrics.whole_sets]

    def evaluate_batch(batch: Batch) -> None:
        with torch.no_grad(), gathering_alone():
            output = rows.call.without_graph(model, batch)
            loss.check_shapes(output, batch.targets)
            number = 0 if batches is None else batch.number
            found, output = loss(output, batch), loss.measured_part(output)
            totals.add(number, found, correct_of(output, batch.labels, loss))
            totals.metrics.add(output, batch.labels, batch.rows)
            logged.add_parts(found.parts, loss.shown)
            for each, kept in whole:
                kept.add(each.kept(output, batch.labels, loss), batch)
        run.end_batch(batch, totals.lazy_values, totals.cheap_values)

    is_stopped = run.all_batches(evaluate_batch, should_stop, begin=logged.begin)
    logged.rows = 1
    measured = totals.over_ranks(world)
    for each, kept in whole:
        kept.is_complete = not is_stopped
        measured |= _over_whole_set(world, each, kept, rows)
    measured |= logged.over_ranks(world)
    return None if is_stopped else measured


def _over_whole_set(world: World, tried: CheckedWholeSet, kept: _Outputs, data: CheckedData) -> dict[str, float]:
    """Return the numbers of a metric over all rows, which rank 0 computes; none if the fit stops on any rank."""
    found: dict[str, float] = {}
    rows = _gathered_rows(world, kept, data.source, only_first=True)
    on_first(world, lambda: found.update({} if rows is None else tried.results(rows, data.name)))
    return dict(world.gather_json(found)[0])


def predict(call: Call, pad_value: float | None = None) -> Any:
    """Return a model's output for all rows, in their order, on every rank: NumPy arrays if X is made of them.

    If a callback ends the prediction, these are the first rows: those that were done.

    Cost: the shapes of all batches, then the rows once in and once out of each rank.
    """
    rows, world = call.rows, call.world
    outputs = _Outputs(rows.loss.without_own(rows.tried.output), rows.tried.rows_second)
    with call.running():
        run = BatchRun(world, call.trainer.model, rows, "predict", call.callbacks, call)
        run.all_batches(partial(_predict_batch, call, outputs, run))
    return _gathered_rows(world, outputs, rows.source, pad_value=pad_value)


def _gathered_rows(
    world: World, outputs: _Outputs, source: Source, *, pad_value: float | None = None, only_first: bool = False
) -> Any:
    """Return the outputs of all ranks in the order of the data; None if any is not complete.

    `only_first`: return NumPy arrays on rank 0, and None on the others.
    """
    facts = {name: getattr(outputs, name) for name in ("kinds", "shapes", "numbers", "is_complete")}
    found = world.gather_json(facts)
    kinds = [each["kinds"] for each in found if each["kinds"]]  # a rank without a batch has none
    if not kinds or not all(each["is_complete"] for each in found):
        return None
    if any(other != kinds[0] for other in kinds):
        raise ConfigError(f"{outputs.owner} needs rows of one kind; outputs differ between ranks: {kinds}.")
    parts, numbers = {}, [number for each in found for number in each["numbers"]]
    for name, kind in kinds[0].items():
        batches: list[list[Shapes]] = [each["shapes"].get(name, []) for each in found]  # of each rank
        shapes = [[shape for batch in each for shape in batch] for each in batches]
        own = [piece for batch in outputs.batches for piece in batch[name]]
        dtype = getattr(torch, kind.split()[0])
        values = _gathered(world, own, shapes, dtype, only_first=only_first)
        if values is None:
            continue
        every = [shape for each in shapes for shape in each]
        sizes = [sum(shape[0] for shape in batch) for each in batches for batch in each]
        order = _places(numbers, sizes) if source.is_shared else None
        joined = joined_rows(values, every, order, pad_value, longest_of(every))
        if name in outputs.rows_second and isinstance(joined, Tensor):
            joined = joined.transpose(0, 1)
        parts[name] = finished(joined, as_array=source.is_numpy or only_first)
    return with_parts(outputs.structure, parts) if parts else None


def predict_to_folder(call: Call, path: str | os.PathLike[str], pad_value: float | None) -> Predictions:
    """Write a model's output for all rows to a folder, shard by shard; return its reader. Raises as `ShardFolder`."""
    rows, world, model = call.rows, call.world, call.trainer.model
    outputs = _Outputs(rows.loss.without_own(rows.tried.output), rows.tried.rows_second)
    folder = ShardFolder(world, path, model, rows, outputs.structure)

    def write(following: int = -1) -> None:
        """Write the shard of the latest batches, unless the following one belongs to it."""
        shard = outputs.numbers[0] // folder.group if outputs.numbers else following
        if shard != following:
            folder.write(shard, outputs.take())

    def predict_batch(batch: Batch) -> None:
        write(batch.number // folder.group)
        _predict_batch(call, outputs, run, batch)

    with call.running():
        shares = (folder.group, folder.done)
        run = BatchRun(world, model, rows, "predict", call.callbacks, call, *shares)
        if not folder.is_complete:
            run.all_batches(predict_batch, finish=write)
    return folder.finish(pad_value, is_ended=run.is_ended)


def _predict_batch(call: Call, outputs: _Outputs, run: BatchRun, batch: Batch) -> None:
    with torch.no_grad(), gathering_alone():
        given = call.rows.call.without_graph(call.trainer.model, batch, predicting=True)
    outputs.add(call.rows.loss.without_own(given), batch)
    run.end_batch(batch, lambda: {"outputs": lambda: given})


def _places(numbers: Sequence[int], sizes: Sequence[int]) -> Tensor | None:
    """Return where each row of some batches goes, by the batches' numbers and sizes; None: they are in order."""
    in_order = sorted(range(len(numbers)), key=numbers.__getitem__)
    if in_order == list(range(len(numbers))):
        return None
    firsts = dict(zip(in_order, itertools.accumulate((sizes[each] for each in in_order), initial=0), strict=False))
    return torch.cat([torch.arange(firsts[each], firsts[each] + size, device="cpu") for each, size in enumerate(sizes)])


@dataclass
class _Outputs:
    """The outputs of a model, batch by batch, on the CPU.

    Attributes:
        structure: The output of the dry run, which a rank without a batch has too; its tensors have no values.
        rows_second: Names of parts whose rows are in the second dimension; here they are in the first.
        owner: For whom they are kept, in errors.
        kinds: What all rows have in common: dtypes and numbers of dimensions, by part; empty before the first batch.
        numbers: Of the batches, in the data.
    """

    structure: Any
    rows_second: frozenset[str] = frozenset()
    owner: str = "predict"
    is_complete: bool = True
    kinds: dict[str, str] = field(default_factory=dict)
    numbers: list[int] = field(default_factory=list)
    _batches: list[dict[str, list[Tensor]]] = field(default_factory=list)
    _latest: dict[str, tuple[Tensor | HostCopy, list[int] | None]] = field(default_factory=dict)

    @property
    def batches(self) -> list[dict[str, list[Tensor]]]:
        """The parts of all outputs so far, by name, in pieces: one, or one for each row of a packed sequence."""
        self._read_latest()
        return self._batches

    @property
    def shapes(self) -> dict[str, list[Shapes]]:
        """The shapes of the pieces of each batch, by part."""
        return {name: [[list(each.shape) for each in batch[name]] for batch in self.batches] for name in self.kinds}

    def add(self, given: Any, batch: Batch) -> None:
        """Add a batch's output; from an accelerator it is read one batch later, while that computes the next."""
        output, lengths = _checked(given, batch.rows, self.rows_second, self.owner)
        kinds, expected = _kinds(output), self.kinds or _kinds(dict(leaves(self.structure)))
        if kinds.keys() != expected.keys() or (self.kinds and kinds != expected):
            raise ConfigError(f"{self.owner} needs rows of one kind; the model returned {expected}, then {kinds}.")
        self.kinds = kinds
        self.numbers.append(batch.number)
        copies = {
            name: HostCopy(tensor.contiguous()) if is_accelerator(tensor.device) else tensor.detach()
            for name, tensor in output.items()
        }
        self._read_latest()
        self._latest = {name: (copy, lengths.get(name)) for name, copy in copies.items()}

    def take(self) -> list[dict[str, list[Tensor]]]:
        """Return the outputs so far, and forget them."""
        found, self._batches, self.numbers = self.batches, [], []
        return found

    def _read_latest(self) -> None:
        """Keep the latest outputs in host memory that is not pinned."""
        latest, self._latest = self._latest, {}
        if latest:
            self._batches.append({})
        for name, (copy, lengths) in latest.items():
            rows = copy if isinstance(copy, Tensor) else copy.read().clone()
            pairs = [] if lengths is None else zip(rows.split(1), lengths, strict=True)
            self._batches[-1][name] = [rows] if lengths is None else [row[:, :length] for row, length in pairs]


def _checked(
    output: Any, rows: int, rows_second: frozenset[str], owner: str
) -> tuple[dict[str, Tensor], dict[str, list[int]]]:
    """Return the tensors of a model's output, and the lengths of rows of packed sequences, which are padded, by name.

    Raises ConfigError unless each has a row per input row.
    """
    found, lengths = dict(leaves(output)), {}
    for key, part in found.items():
        if isinstance(part, PackedSequence):
            found[key], counts = pad_packed_sequence(part, batch_first=True)
            lengths[key] = counts.tolist()
        elif key in rows_second and isinstance(part, Tensor) and part.dim() > 1:
            found[key] = part.transpose(0, 1)
    bad = (name for name, part in found.items() if not (isinstance(part, Tensor) and part.dim() and len(part) == rows))
    name = next(bad, None)
    if found and name is None:
        return found, lengths
    part = output if name is None else found[name]
    is_tensor = isinstance(part, Tensor)
    what = f"a tensor of shape {list(part.shape)}" if is_tensor else type(part).__name__
    what += "" if part is output else f" as {name}"
    remedy = "" if part is output else " Return only what you need."
    if "past_key_values" in what:
        remedy = " Set model.config.use_cache = False: then Hugging Face's models leave it out."
    if isinstance(output, (tuple, list)) and len(output) == rows and not isinstance(output[0], Tensor):
        remedy = " Let a predict_step pad the entries of such a list, one per row, and return how long each was."
    elif is_tensor and part.dim() > 1 and part.shape[1] == rows:
        remedy = (
            " Its rows are in the second dimension, as in the states of an LSTM: return it with the rows first "
            "(state.transpose(0, 1)), or return only what you need."
        )
    raise ConfigError(
        f"{owner} needs a model that returns a tensor with one output row per input row, or several in a dictionary, a "
        f"dataclass, a tuple or a list; for {rows} rows it returned {what}.{remedy}"
    )


def _kinds(parts: Mapping[str, Any]) -> dict[str, str]:
    """Return what all rows have in common, even if they are padded to different lengths."""
    return {
        name: f"{str(part.dtype).removeprefix('torch.')} of {part.dim()} dimensions"
        if isinstance(part, Tensor)
        else type(part).__name__
        for name, part in parts.items()
    }


def _gathered(
    world: World, own: Sequence[Tensor], shapes: Sequence[Shapes], dtype: torch.dtype, *, only_first: bool
) -> Tensor | None:
    """Return the values of all ranks' pieces as one vector, by rank; None if this rank only sends its own.

    `shapes`: of the pieces of each rank.
    """
    counts = [sum(map(math.prod, each)) for each in shapes]
    if only_first and not world.is_first:
        if counts[world.rank]:
            dist.send(torch.cat([batch.reshape(-1) for batch in own]), 0, group=world.cpu_group)
        return None
    values = torch.empty(sum(counts), dtype=dtype, device="cpu")
    for rank, part in enumerate(values.split(counts)):
        if rank == world.rank and own:
            torch.cat([batch.reshape(-1) for batch in own], out=part)
        if len(part) and not only_first:
            world.broadcast(part, rank)
        elif len(part) and rank != world.rank:
            dist.recv(part, rank, group=world.cpu_group)
    return values


class BatchRun:
    """A run of a model, in evaluation mode, over a rank's share of batches, with callbacks and a display.

    If any rank's callbacks have a hook of batches, the ranks take turns and agree after each batch, by a small
    all_reduce, whether to go on: so all end together, with the first batches done.

    `kind` is "test" or "predict", as in the names of hooks; `group` and `done` are those of `BatchShare`; `is_ended`
    tells whether a rank has ended the run before the last batch.
    """

    def __init__(
        self,
        world: World,
        model: nn.Module,
        rows: CheckedData,
        kind: str,
        callbacks: Callbacks,
        display: Display,
        group: int = 0,
        done: frozenset[int] = frozenset(),
    ) -> None:
        self._world, self._model, self._rows, self._kind = world, model, rows, kind
        self._callbacks, self._display = callbacks, display
        self._agrees = _any_rank(world, self._callbacks.may_end(kind))[0] and not world.sends_nothing
        self._share = BatchShare(Slices.of(world), group or int(self._agrees), done)
        batches = rows.source.num_batches(rows.batch_size)
        self._own = 0 if batches is None else len(self._share.of(batches))
        self._done = 0
        self.is_ended = False
        self._phase = {"test": "validating", "predict": "predicting"}[kind]

    def all_batches(
        self,
        step: Callable[[Batch], object],
        should_stop: Callable[[], bool] = lambda: False,
        finish: Callable[[], object] = lambda: None,
        begin: Callable[[int, int], object] = lambda rows, number: None,
    ) -> bool:
        """Call `step` with each of this rank's batches; return whether `should_stop` ended it on this rank.

        An error on any rank is raised on all. `step` calls `end_batch`; `finish` is called after the last batch,
        `begin` before each with its rows and number.
        """
        self._display.phase(self._phase, 0, self._own)
        problem, is_stopped = None, False
        rows, modules = self._rows, (self._model, *self._rows.loss.modules)
        try:
            with memory_explained(self._world, trains=False), modes_kept(*modules):
                for module in modules:
                    module.eval()
                batches = rows.source.whole_batches(rows.batch_size, rows.placement, self._share)
                for batch in self._until_end(marked_steps(batches, rows.placement.device)):
                    begin(batch.rows, batch.number)
                    self._callbacks.on_batch_begin(self._kind, self._done)
                    step(batch)
                    is_stopped = should_stop()
                    self.is_ended = is_stopped or self._callbacks.wants_end(self._kind)
                if not self.is_ended:
                    finish()
        except Exception as error:
            problem = error
            if self._agrees:
                _any_rank(self._world, True, False)
        raise_together(self._world, problem)
        return is_stopped

    def _until_end(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield batches until this rank ends the run or, if the ranks agree, any of them."""
        goes_on = True
        while goes_on and not self.is_ended:
            batch = next(batches, None)
            if batch is not None:
                yield batch
            goes_on = batch is not None
            if self._agrees:
                self.is_ended, goes_on = _any_rank(self._world, self.is_ended, goes_on)
        self._agrees = False

    def end_batch(self, batch: Batch, look: Callable[[], dict[str, Any]], measured: Measured = dict) -> None:
        """Call the hooks after a batch, with logs of `look`, and show the numbers that are `measured` so far."""
        self._callbacks.on_batch_end(self._kind, self._done, look)
        self._done += 1
        self._display.phase(self._phase, self._done, self._own, batch.rows, measured)


class Call(Display):
    """A call of `evaluate` or `predict`, shown as an epoch is: a bar, or with verbose=2 only a line at the end."""

    def __init__(
        self, name: str, trainer: Trainer, world: World, rows: CheckedData, callbacks: Any, verbose: Verbosity
    ) -> None:
        self.trainer, self.world, self.rows = trainer, world, rows
        self._hook = "on_test" if name == "evaluate" else f"on_{name}"
        self._name, self._verbose = name, verbose
        self.callbacks = Callbacks(checked_callbacks(callbacks))
        self._shown = make_display(bool(verbose) and world.is_first)
        self._batches = self._rows = 0

    @contextlib.contextmanager
    def running(self) -> Iterator[dict[str, Any]]:
        """Set up the call; yield a dictionary for the numbers that callbacks and the display get at its end."""
        measured: dict[str, Any] = {}
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.closing(self._shown))
            stack.enter_context(float32_products(self.trainer.config.float32_precision))
            stack.enter_context(ending_group_on_error(self.world))
            self.callbacks.set_trainer(self.trainer, self.rows.params(self._verbose))
            self.callbacks.call(f"{self._hook}_begin", {})
            began = time.perf_counter()
            yield measured
            took = pace(time.perf_counter() - began, self._batches, self._rows)
            if self._verbose == 2:
                self._shown.begin(self._name, self._batches)
            self._shown.end_epoch("  ".join(filter(None, (numbers(measured), took))))
            self.callbacks.call(f"{self._hook}_end", measured)

    @override
    def phase(self, name: str, done: int = 0, total: int = 0, rows: int = 0, measured: Measured = dict) -> None:
        rows *= self.world.size
        self._batches, self._rows = done, self._rows + rows
        if self._verbose != 2 and done:
            self._shown.step(rows, measured)
        elif self._verbose != 2:
            self._shown.begin(self._name, total or None)


def _any_rank(world: World, *flags: bool) -> list[bool]:
    """Return for each flag whether it is set on any rank; collective."""
    found = torch.tensor(flags, dtype=torch.uint8, device="cpu")
    return [bool(flag) for flag in world.reduce(found, dist.ReduceOp.MAX).tolist()]
