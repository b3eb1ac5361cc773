"""A trainer's call in a notebook's worker, one rank among others, and what is sent back.

notebook                                  each worker
the trainer, by value            ->       its own, with the notebook's weights
arguments and data, mapped       ->       the call
progress, for callbacks there    <-       rank 0: reports of `relay.py`
weights, optimizer, history      <-       rank 0: what the call has changed (`state_transfer.py`)
the call's value                 <-       rank 0
an error                         <-       any rank, with its class (`failures.py`)
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from cyxtrain.errors import DistributedTrainingError, is_on_all_ranks
from cyxtrain.notebook.failures import Failed
from cyxtrain.notebook.relay import Relay, display_here
from cyxtrain.notebook.sharing import CODE, read, write
from cyxtrain.notebook.state_transfer import AttributeDigests, parts_of
from cyxtrain.progress.display import displays_by
from cyxtrain.tensors.layouts import is_plain
from cyxtrain.training.trainer import DistributedTrainer
from cyxtrain.world import runtime

FIT = "fit"


def _attribute(owner: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    return partial(getattr, owner, name), partial(setattr, owner, name)


def _set_default_device(kind: str) -> None:
    # Without a number: each rank has its own device.
    torch.set_default_device(None if kind == "cpu" else kind)


_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (os.getcwd, os.chdir),
    _attribute(sys, "path"),
    (torch.get_default_dtype, torch.set_default_dtype),
    (lambda: torch.get_default_device().type, _set_default_device),
    (
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda chosen: torch.use_deterministic_algorithms(chosen[0], warn_only=chosen[1]),
    ),
    # PyTorch's old names of float32 precision come first: once a new one is set, it refuses to read the old ones.
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    _attribute(torch.backends.cudnn, "allow_tf32"),
    _attribute(torch.backends.cudnn, "benchmark"),
    _attribute(torch.backends.cudnn, "deterministic"),
    _attribute(torch.backends.cudnn.conv, "fp32_precision"),  # type: ignore[attr-defined]
    _attribute(torch.backends.cudnn.rnn, "fp32_precision"),
    _attribute(torch.backends.cuda.matmul, "fp32_precision"),
    _attribute(torch.backends.mkldnn.matmul, "fp32_precision"),  # type: ignore[attr-defined]
    _attribute(torch.backends.mkldnn.conv, "fp32_precision"),  # type: ignore[attr-defined]
    _attribute(warnings, "filters"),
)
"""Get and set each global setting of a process on which results or messages depend."""


def settings_here() -> list[Any]:
    """Return the settings of this process; None for one that PyTorch refuses to read."""
    found = []
    for read_here, _ in _SETTINGS:
        try:
            found.append(read_here())
        except RuntimeError:
            found.append(None)
    return found


def enter(settings: Sequence[Any]) -> None:
    """Apply the settings of another process to this one."""
    for (read_here, change), value in zip(_SETTINGS, settings, strict=True):
        # Not if it is the same already: use_deterministic_algorithms imports PyTorch's compiler.
        with contextlib.suppress(OSError, RuntimeError):  # OSError: this process's folder was removed
            if value is None or read_here() == value:
                continue
        change(value)


@dataclass(frozen=True)
class CallResult:
    """The result of a call on one rank."""

    failed: Failed | None
    has_result: bool = False
    """Whether this is rank 0, and has written the call's value or, after a fit, however it ended, the `Changes` of its
    trainer."""


def run_call(
    method: str,
    trainer_path: str,
    call_path: str,
    result_path: str,
    staying: Sequence[str],
    not_sent: Sequence[str],
    report: Callable[[Any], None],
) -> tuple[CallResult, bool]:
    """Run a trainer's call on this rank; return its result, and whether this rank can take another job.

    The file at `call_path` holds (settings, arguments, keyword arguments); the empty one at `result_path` is for rank
    0. `staying` names the callbacks that stay in the notebook, and `not_sent` the parts that the call does not need.
    """
    known: dict[str, Any] = {}
    try:
        is_first = runtime.current().is_first
        report_of_hooks = report if is_first else None
        relays = {name: Relay(name, report_of_hooks) for name in staying}
        sent: dict[str, Any] = {}
        trainer, callbacks = _read_trainer(trainer_path, {**dict.fromkeys(not_sent), **relays}, sent)
        parts = parts_of(trainer, callbacks)
        known = {**sent, **parts}
        settings, arguments, keywords = read(call_path, {**known, **relays}, mapped=True, is_data=True, sent=known)
        enter(settings)
        if method == FIT:
            keywords["callbacks"] = callbacks
        digests = AttributeDigests(trainer, parts, known) if method == FIT and is_first else None
    except BaseException as error:
        _announce(error)
        return CallResult(Failed.of(error, known)), False
    # The base class's method: a subclass's override runs in the notebook.
    call = partial(getattr(DistributedTrainer, method), trainer, *arguments, **keywords)
    value, failed, can_continue = _outcome_of(call, known, report)
    try:
        if is_first:
            _write_result(value, digests, known, result_path)
        return CallResult(failed, has_result=is_first), can_continue
    except Exception as error:  # a bug of ours: values are tensors, and attributes were checked
        return CallResult(failed or Failed.of(error)), False


def _outcome_of(
    call: Callable[[], Any], known: Mapping[str, Any], report: Callable[[Any], None]
) -> tuple[Any, Failed | None, bool]:
    """Return a call's value, its error, and whether this rank can take another job."""
    try:
        with displays_by(partial(display_here, report)):
            return call(), None, True
    except BaseException as error:
        failed = Failed.of(error, known)
        can_continue = is_on_all_ranks(error)
        if not can_continue:
            _announce(error)
        return None, failed, can_continue


def _read_trainer(path: str, known: Mapping[str, Any], sent: dict[str, Any]) -> tuple[DistributedTrainer, Any]:
    """Return the trainer and the callbacks that the notebook has written, as `read`."""
    trainer, callbacks = read(path, known, mapped=False, sent=sent)
    for buffer in trainer.trained.buffers():  # what was read cannot grow, as buffers of a quantisation do
        if buffer.numel() <= 1 and is_plain(buffer):
            buffer.data = buffer.data.clone()
    return trainer, callbacks


def _write_result(value: Any, digests: AttributeDigests | None, known: Mapping[str, Any], path: str) -> None:
    """Write what a fit has changed, or another call's value with the notebook's own code by name."""
    if digests is not None:
        changes, parts = digests.changes()
        write(changes, path, parts)
    else:
        code = {name: each for name, each in known.items() if isinstance(each, CODE)}
        write(value, path, code)


def _announce(error: BaseException) -> None:
    """Inform the other ranks of an error of this one."""
    if isinstance(error, SystemExit):
        error = DistributedTrainingError("sys.exit was called")
    runtime.end_group(error, in_training=True)
