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

import os
import sys
import warnings
from collections.abc import Callable, Sequence
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
_PRECISIONS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (lambda: torch.backends.cudnn.allow_tf32, partial(setattr, torch.backends.cudnn, "allow_tf32")),
)
"""Get and set float32 precision by PyTorch's old names. Once a new name below is set, PyTorch refuses to read the old
ones: workers set the old ones first, and the new ones only if they still differ."""
_FLAGS = (
    (torch.backends.cudnn, "benchmark"),
    (torch.backends.cudnn, "deterministic"),
    (torch.backends.cudnn.conv, "fp32_precision"),  # type: ignore[attr-defined]
    (torch.backends.cudnn.rnn, "fp32_precision"),
    (torch.backends.cuda.matmul, "fp32_precision"),
    (torch.backends.mkldnn.matmul, "fp32_precision"),  # type: ignore[attr-defined]
    (torch.backends.mkldnn.conv, "fp32_precision"),  # type: ignore[attr-defined]
)


@dataclass(frozen=True)
class SideEffects:
    """Global settings of a process on which results or messages depend."""

    folder: str
    path: list[str]
    dtype: torch.dtype
    device: str
    deterministic: tuple[bool, bool]
    precisions: list[Any]
    flags: list[Any]
    filters: list[Any]

    @classmethod
    def here(cls) -> SideEffects:
        """Return those of this process."""
        deterministic = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        made = torch.get_default_dtype(), torch.get_default_device().type
        precisions = [_known(read) for read, _ in _PRECISIONS]
        flags = [getattr(owner, name) for owner, name in _FLAGS]
        return cls(os.getcwd(), sys.path, *made, deterministic, precisions, flags, list(warnings.filters))

    def enter(self) -> None:
        """Apply them to this process."""
        os.chdir(self.folder)
        sys.path[:] = self.path
        torch.set_default_dtype(self.dtype)
        if self.device != torch.get_default_device().type:  # without a number: each rank has its own device
            torch.set_default_device(None if self.device == "cpu" else self.device)
        torch.use_deterministic_algorithms(self.deterministic[0], warn_only=self.deterministic[1])
        for (read_now, change), value in zip(_PRECISIONS, self.precisions, strict=True):
            if value is not None and _known(read_now) != value:
                change(value)
        for (owner, name), value in zip(_FLAGS, self.flags, strict=True):
            if getattr(owner, name) != value:
                setattr(owner, name, value)
        warnings.filters[:] = self.filters  # type: ignore[index]


def _known(read: Callable[[], Any]) -> Any:
    """Return a setting; None if PyTorch refuses to read it."""
    try:
        return read()
    except RuntimeError:
        return None


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
    0. `staying` are the names of callbacks that stay in the notebook, `not_sent` those of parts that the call does not
    need.
    """
    known: dict[str, Any] = {}
    try:
        is_first = runtime.current().is_first
        relays = {name: Relay(name, report if is_first else None) for name in staying}
        trainer: DistributedTrainer
        sent: dict[str, Any] = {}
        trainer, callbacks = read(trainer_path, {**dict.fromkeys(not_sent), **relays}, mapped=False, sent=sent)
        parts = parts_of(trainer, callbacks)
        for buffer in trainer.trained.buffers():  # what was read cannot grow, as buffers of a quantisation do
            if buffer.numel() <= 1 and is_plain(buffer):
                buffer.data = buffer.data.clone()
        known = {**sent, **parts}
        with_relays = {**known, **relays}
        side_effects, arguments, keywords = read(call_path, with_relays, mapped=True, is_data=True, sent=known)
        side_effects.enter()
        if method == FIT:
            keywords["callbacks"] = callbacks
        digests = AttributeDigests(trainer, parts, known) if method == FIT and is_first else None
    except BaseException as error:
        _announce(error)
        return CallResult(Failed.of(error, known)), False
    value, failed, can_continue = None, None, True
    try:
        with displays_by(partial(display_here, report)):
            # The base class's method: a subclass's override runs in the notebook.
            value = getattr(DistributedTrainer, method)(trainer, *arguments, **keywords)
    except BaseException as error:
        failed, can_continue = Failed.of(error, known), is_on_all_ranks(error)
        if not can_continue:
            _announce(error)
    try:
        if is_first:
            code = {name: each for name, each in known.items() if isinstance(each, CODE)}
            result, named = (value, code) if digests is None else digests.changes()
            write(result, result_path, named)
        return CallResult(failed, has_result=is_first), can_continue
    except Exception as error:  # a bug of ours: values are tensors, and attributes were checked
        return CallResult(failed or Failed.of(error)), False


def _announce(error: BaseException) -> None:
    """Inform the other ranks of an error of this one."""
    told = DistributedTrainingError("sys.exit was called") if isinstance(error, SystemExit) else error
    runtime.end_group(told, in_training=True)
