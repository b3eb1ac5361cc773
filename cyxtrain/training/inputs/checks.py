"""Checks before training, of what would fail later or give wrong results silently."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cyxtrain.checkpoint.format.names import plain_parameters
from cyxtrain.config import DDPConfig, DistributedTrainingConfig
from cyxtrain.config.settings import require, unknown_name
from cyxtrain.data.batches.collate import TARGET_NAMES
from cyxtrain.data.batches.stored import StoredTensor
from cyxtrain.data.batches.structure import Tree, named_tensors, parts_by_name
from cyxtrain.data.sources.source import Source
from cyxtrain.environment.torch_compat import version_of
from cyxtrain.errors import ConfigError, brief, counted, shortened, warn_together
from cyxtrain.metrics.loss import Loss
from cyxtrain.optim.optimizers import ONLY, needs_closure, parameters_of
from cyxtrain.parallel.reducer import trained_parameters
from cyxtrain.parallel.sparse_gradients import makes_sparse_gradients
from cyxtrain.tensors.layouts import is_plain
from cyxtrain.training.model.snapshot import inputs_seen
from cyxtrain.training.trained import params_without_optimizer

# What these losses apply to the scores themselves.
_APPLIED = {"CrossEntropyLoss": "softmax", "BCEWithLogitsLoss": "sigmoid"}
_PROBABILITIES = "end the model with Sigmoid(), or take loss_fn='bce_with_logits'"
_MOVES = {
    *("Alias", "Cat", "Clamp", "Clone", "Expand", "Index", "Permute", "ReshapeAlias", "Select", "Slice", "Split"),
    *("Squeeze", "Stack", "T", "ToCopy", "Transpose", "UnsafeView", "Unsqueeze", "View"),
}
"""Operations that only move or limit values, by the names of their nodes in the autograd graph."""
_CLIPS = ("clip_norm", "clip_value", "clip_adaptive")
_TAKE_SPARSE_GRADIENTS = (torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam)
# Of the numbers of an input that an embedding looks up, this many are checked: all of a table, not all of a corpus.
_CHECKED_CODES = 1 << 24


def check_trained(
    trained: nn.Module, optimizers: Mapping[str, torch.optim.Optimizer], config: DistributedTrainingConfig
) -> None:
    """Refuse a model without trainable parameters, and optimizers or settings that do not fit it."""
    parameters = trained_parameters(trained)
    if not parameters:
        raise ConfigError("the model has no parameters to train: none has requires_grad=True.")
    for optimizer in optimizers.values():
        _check_optimizer(optimizer, trained)
        if needs_closure(optimizer):
            _check_closure(optimizer, config)
    _check_owners(trained, optimizers)
    _check_clips(config, optimizers)
    halves = [name for name, each in parameters if each.dtype in (torch.float16, torch.bfloat16)]
    if config.precision == "fp16" and halves:  # their gradients could not be unscaled
        raise ConfigError(
            f"precision='fp16' computes in 16 bits and keeps parameters in 32, and {shortened(halves)} are of 16: "
            "give the model as float32."
        )


def _check_closure(optimizer: torch.optim.Optimizer, config: DistributedTrainingConfig) -> None:
    """Refuse settings that would change the loss between evaluations by `step(closure)`."""
    excluded = [name for name in _CLIPS if getattr(config, name) is not None]
    if config.precision == "fp16":
        excluded.append("precision='fp16'")
    if excluded:
        raise ConfigError(
            f"{type(optimizer).__name__} evaluates the loss several times per step, which {excluded[0]} would "
            f"change between two evaluations: leave {excluded[0]} out, or use Adam or SGD."
        )


def _check_clips(config: DistributedTrainingConfig, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
    """Refuse a limit of clipping for an optimizer that the trainer does not have."""
    for name in _CLIPS:
        limits = getattr(config, name)
        if not isinstance(limits, Mapping):
            continue
        for own in limits:
            if own not in optimizers:
                raise unknown_name(f"{name}={dict(limits)!r}: the trainer", str(own), [*optimizers], "optimizer")


def _check_owners(trained: nn.Module, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
    """Refuse a parameter in two optimizers; if there are several, also one that none trains."""
    owners: dict[int, str] = {}
    names = {id(parameter): name for name, parameter in plain_parameters(trained)}
    for own, optimizer in optimizers.items():
        for parameter in {id(each) for each in parameters_of(optimizer)}:
            if owners.setdefault(parameter, own) != own:
                raise ConfigError(
                    f"{names.get(parameter, 'a parameter')} is in the optimizers {owners[parameter]!r} and {own!r}: "
                    "build each with its own parameters."
                )
    left = params_without_optimizer(trained, optimizers.values())
    if left and optimizers.keys() != {ONLY}:
        raise ConfigError(
            f"none of the optimizers {', '.join(map(repr, optimizers))} has {shortened(left)}: add the parameters to "
            "one of them, or freeze them with requires_grad_(False)."
        )


def checked_ddp_config(config: DDPConfig | None) -> DDPConfig:
    """Return a valid config of gradients; for None the defaults, with unused parameters allowed."""
    if config is None:
        config = DDPConfig(find_unused_parameters=True)
    require(isinstance(config, DDPConfig), f"ddp_config must be a cyxtrain.DDPConfig(...), got {brief(config)}.")
    config.validate()
    return config


def _check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Refuse learning rates that are not finite, and sparse gradients that PyTorch does not take."""
    kind = type(optimizer)
    rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
    require(all(map(math.isfinite, rates)), f"{kind.__name__} has the learning rates {rates}: give finite numbers.")
    refuses_all = kind.__module__.startswith("torch.optim") and not isinstance(optimizer, _TAKE_SPARSE_GRADIENTS)
    for name, parameter in makes_sparse_gradients(model).items():
        groups = [group for group in optimizer.param_groups if any(each is parameter for each in group["params"])]
        if groups and refuses_all:
            raise _sparse_error(name, kind.__name__, "SGD or Adagrad")
        if any(group.get("weight_decay") for group in groups):
            raise _sparse_error(name, "weight_decay", "no weight_decay for it")


def _sparse_error(name: str, refusing: str, remedy: str) -> ConfigError:
    return ConfigError(
        f"{name} makes sparse gradients, which PyTorch's {refusing} does not take: use {remedy}, or build the "
        "embedding with sparse=False."
    )


def check_targets(source: Source, loss: Loss) -> None:
    """Refuse data without the targets that the loss needs."""
    if source.targets is None and loss.function is not None:
        if source.no_rows is not None:
            raise source.no_rows
        inputs = source.inputs
        if isinstance(inputs, dict) and not source.is_whole:
            raise ConfigError(
                f"y is missing: the batches have {', '.join(inputs)}, and y must be called one of "
                f"{', '.join(TARGET_NAMES)}; or give (x, y)."
            )
        hint = " X and y are two arguments: fit(X, y)." if isinstance(inputs, (tuple, list)) else ""
        raise ConfigError(
            "y is missing: the loss compares the model's output with it. Only a model that computes its own "
            f"loss (loss_fn=None) does without.{hint}"
        )
    targets = parts_by_name(source.targets)
    missing = [name for name in loss.by_output if name not in targets]
    has = f"the parts {[*targets]!r}" if targets else "one part"
    require(not missing, f"loss_fn has a loss for {missing!r}, and y has {has}: y must have the keys of loss_fn.")
    for name, each in loss.by_output.items():
        _check_target(targets[name], each)
    _check_target(source.targets, loss)


def _check_target(targets: Tree | None, loss: Loss) -> None:
    """Refuse a y of several parts, and class numbers as floats or columns, for PyTorch's losses."""
    if loss.is_known and isinstance(targets, (dict, tuple, list)):
        raise ConfigError(
            f"{type(loss.function).__name__} compares one output with one y, and y has {len(targets)} parts: give a "
            "loss_fn of your own, which is called with the model's output and y as they are, or, if the model returns "
            "a dictionary, one loss for each output: loss_fn={...}."
        )
    if not isinstance(targets, Tensor) or not isinstance(loss.function, (nn.CrossEntropyLoss, nn.NLLLoss)):
        return
    name = type(loss.function).__name__
    shape = [*targets.shape[1:]]
    if targets.is_floating_point() and not shape:
        dtype = str(targets.dtype).removeprefix("torch.")
        missing = targets.isnan().nonzero().reshape(-1)
        remedy = "give y.long(), or numpy.asarray(y).astype('int64')"
        if len(missing):
            dtype += f", with NaN in {counted(len(missing), 'sample')} (first in sample {int(missing[0])})"
            remedy = "drop such samples, or give them a class of their own, as in y.fillna(number).astype('int64')"
        raise ConfigError(f"{name} wants class indices of an integer dtype, and y has dtype {dtype}: {remedy}.")
    if shape == [1] and not targets.is_floating_point():
        raise ConfigError(
            f"{name} wants one class number per sample, and y has shape (n, 1): give numpy.asarray(y).reshape(-1), or "
            "the column of a table, as in df['class']."
        )


def warn_of_activation(output: Any, targets: Any, loss: Loss, model: nn.Module) -> None:
    """Warn of probabilities where the loss takes scores, and of scores where it does not."""
    for part, each in loss.by_output.items():
        own, answer = loss.of_output(part, output, targets)
        warn_of_activation(own, answer, each, model)
    if not isinstance(output, Tensor) or not output.is_floating_point() or output.dim() < 1:
        return
    name = type(loss.function).__name__
    scores = output.detach().float()
    operation = _last_operation(output, scores, model)
    if name in _APPLIED and operation in ("Sigmoid", "Softmax"):
        problem = f"probabilities, and {name} applies a {_APPLIED[name]} itself: leave the {operation} out of the model"
    elif isinstance(loss.function, (nn.NLLLoss, nn.KLDivLoss)) and bool((scores > 0.001).any()):
        problem = f"not log-probabilities, which {name} takes: end the model with LogSoftmax(1)"
    elif isinstance(loss.function, nn.BCELoss) and operation in ("Addmm", "Mm", "Convolution"):
        problem = f"scores of a linear layer, and {name} takes probabilities: {_PROBABILITIES}"
    else:
        return
    warn_together(f"the outputs for all {len(output):,} samples that were tried are {problem}.")


def _last_operation(output: Tensor, scores: Tensor, model: nn.Module) -> str:
    """Return the name of the model's last operation, by its values and the autograd graph."""
    operation = _made_by(output)
    if not bool(((scores >= 0) & (scores <= 1)).all()):
        return operation
    if scores.dim() > 1 and scores.shape[1] > 1 and bool(((scores.sum(1) - 1).abs() < 0.01).all()):
        return "Softmax"
    # A compiled or checkpointed model is one node of the graph.
    if operation in ("CompiledFunction", "CheckpointFunction") and isinstance([*model.modules()][-1], nn.Sigmoid):
        return "Sigmoid"
    return operation


def _made_by(output: Tensor) -> str:
    """Return the operation that made a tensor, skipping those that only move or limit values."""
    name = ""
    node = output.grad_fn
    while node is not None:
        name = node.name().rpartition("Backward")[0]
        if name not in _MOVES:
            break
        node = node.next_functions[0][0]  # the first of several joined tensors
    return name


def check_classes(targets: Tree | None, output: Any, loss: Loss) -> None:
    """Refuse targets and outputs that the loss does not take, such as classes without an output."""
    for part, each in loss.by_output.items():
        own, answer = loss.of_output(part, output, targets)
        check_classes(answer, own, each)
    if loss.is_binary:
        wrong = _beyond_0_and_1(targets)
        if wrong:  # not refused: a row of weight 0 may hold anything
            warn_together(f"y is {wrong}, and the loss takes 0 and 1, or probabilities: convert it, as in y > 0.")
    if isinstance(loss.function, nn.BCELoss):
        wrong = _beyond_0_and_1(output)
        require(not wrong, f"the model's output is {wrong}, and BCELoss takes probabilities: {_PROBABILITIES}.")
    if not isinstance(loss.function, (nn.CrossEntropyLoss, nn.NLLLoss)):
        return
    if isinstance(targets, Tensor) and isinstance(output, Tensor) and not targets.is_floating_point():
        _check_class_numbers(targets, output, loss.function.ignore_index)


def _check_class_numbers(targets: Tensor, output: Tensor, ignored: int) -> None:
    """Refuse class numbers for which the model has no output, apart from the `ignored` one."""
    if output.dim() > 1 and output.shape[1:] == targets.shape[1:]:
        raise ConfigError("y has one-hot rows of whole numbers: give class numbers, y.argmax(1), or y as floats.")
    if output.dim() != targets.dim() + 1:
        return
    classes = output.shape[1]
    numbers = targets.to(torch.int64)
    wrong = ((numbers < 0) | (numbers >= classes)) & (numbers != ignored)
    if bool(wrong.any()):
        row = int(wrong.reshape(len(numbers), -1).any(1).nonzero()[0])
        value = int(numbers[wrong][0])
        remedy = "Number the classes from 0, or give the model's last layer more outputs."
        if classes == 1:
            remedy += " For two classes, one output takes loss_fn='bce_with_logits' and y as floats."
        elif value == -1:
            remedy = (
                "Number the classes from 0. If -1 is a missing value, as in pandas' .cat.codes, drop such samples, "
                "give them a class of their own, or ignore them with nn.CrossEntropyLoss(ignore_index=-1)."
            )
        raise ConfigError(
            f"y holds class {value} (sample {row}), and the model has outputs for classes 0 to {classes - 1}. {remedy}"
        )


@contextlib.contextmanager
def lookups_checked(model: nn.Module, inputs: Tree, source: Source) -> Iterator[None]:
    """Refuse samples of a source with a number that an embedding of the model looks up and does not have.

    Within, the model is tried on some `inputs`. What an embedding gets of them as they are, it will get of all samples.
    """
    # Subclasses and replaced forwards may take other numbers.
    plain = [(name, each) for name, each in model.named_modules() if "forward" not in vars(each)]
    layers = {name: each for name, each in plain if type(each) in (nn.Embedding, nn.EmbeddingBag)}
    tensors = [(name, each) for name, each in named_tensors(inputs, "X") if is_plain(each) and not each.is_inference()]
    given = [(name, each, version_of(each)) for name, each in tensors]
    seen: list[tuple[str, Any, Tensor]] = []
    with contextlib.ExitStack() as stack:
        for name, layer in layers.items():
            stack.enter_context(inputs_seen([layer], partial(_note_lookup, seen, name, layer)))
        try:
            yield
        finally:  # after an error, too: PyTorch's names neither the number nor the sample
            problem = ""
            # Tensors of vmap have no memory, and after a failed lookup a GPU computes nothing.
            with contextlib.suppress(RuntimeError):
                problem = _problem_of_lookups(seen, given, source)
            require(not problem, problem)


def _note_lookup(seen: list[tuple[str, Any, Tensor]], name: str, layer: nn.Module, codes: Any) -> None:
    # A compiled model would note the codes of every later call. PyTorch refuses other types than tensors.
    if isinstance(codes, Tensor) and not torch.compiler.is_compiling():
        seen.append((name, layer, codes))


def _problem_of_lookups(
    seen: Sequence[tuple[str, Any, Tensor]], given: Iterable[tuple[str, Tensor, float]], source: Source
) -> str:
    """Return which number of a source's samples an embedding does not have, or "".

    `seen`: names and embeddings, and what they got of the inputs `given`: names, tensors and versions before.
    """
    samples = dict(named_tensors(source.inputs, "X"))
    for name, tensor, version in given:
        whole = samples.get(name)
        # Rows in an HDF5 file are not read before they are used; and the model may have changed its input in place.
        if whole is None or isinstance(whole, StoredTensor) or version_of(tensor) != version:
            continue
        if whole.shape[1:] != tensor.shape[1:]:  # padded differently: the same numbers are in other places
            continue
        for label, layer, codes in seen:
            part = _part_looked_up(codes, tensor)
            if part.stop == 0:
                continue
            rows = whole[: _CHECKED_CODES // part.stop]
            found = rows.reshape(len(rows), -1)[:, part].to(codes.dtype)
            problem = _problem_of_codes(name, source.columns.get(name, ())[part], found, label, len(layer.weight))
            if problem:
                return problem
    return ""


def _part_looked_up(codes: Tensor, tensor: Tensor) -> slice:
    """Return which numbers of each sample an embedding got; none, unless it got a part of the tensor itself."""
    is_part = codes.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    has_rows = codes.shape[:1] == tensor.shape[:1] and codes.stride()[:1] == tensor.stride()[:1]
    holds_any = codes.dim() > 0 and codes.numel() > 0
    if is_part and has_rows and holds_any and codes[0].is_contiguous() and tensor[0].is_contiguous():
        first = codes.storage_offset() - tensor.storage_offset()
        return slice(first, first + codes[0].numel())
    return slice(0, 0)


def _problem_of_codes(name: str, columns: Sequence[str], codes: Tensor, label: str, size: int) -> str:
    wrong = codes.isnan()
    if not codes.is_floating_point():
        wrong = (codes < 0) | (codes >= size)
    places = wrong.nonzero()
    if len(places) == 0:
        return ""
    row, column = places[0].tolist()
    if columns:
        name = f"column {columns[column]!r} of {name}"
    return (
        f"{name} holds {codes[row, column].item()} (sample {row}, the first of {int(wrong.any(1).sum()):,}), and the "
        f"embedding {label or 'model'!r} looks up 0 to {size - 1}. Number categories from 0, and make the embedding as "
        "large (num_embeddings). Missing values (NaN, or -1 in pandas' .cat.codes) need a number of their own, as in "
        "codes + 1; or drop such samples."
    )


def _beyond_0_and_1(values: Any) -> str:
    """Return the range of the first values, such as "from -1 to 1", if it leaves 0 to 1; otherwise ""."""
    if not isinstance(values, Tensor) or values.numel() == 0 or values.is_complex():
        return ""
    low, high = values.detach()[:1024].double().aminmax()
    if low < 0 or high > 1:
        return f"from {low:.3g} to {high:.3g}"
    return ""
