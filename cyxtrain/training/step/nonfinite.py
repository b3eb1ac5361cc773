"""NaN or infinite losses and gradients: the step is refused or skipped, and the rank at fault named.

Gradients are averaged before they are checked, and one rank's NaN is in the average: all ranks reach the same verdict
without a message. Only then does each recompute its batches locally to find the rank at fault.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cyxtrain.data.batches.batch import Batch, Share
from cyxtrain.data.batches.rows import rows_not_finite
from cyxtrain.data.batches.structure import OpaqueBatch, named_tensors
from cyxtrain.data.rng import generators_kept
from cyxtrain.errors import NonFiniteError, counted, on_all_ranks, shortened, warn_together
from cyxtrain.parallel import DistributedDataParallel
from cyxtrain.parallel.finite import values_of
from cyxtrain.parallel.step_report import Report
from cyxtrain.training.state import Position, TrainingState
from cyxtrain.training.step.transaction import StepTransaction, Undo

MAX_SKIPPED = 10
"""Steps in a row that are not finite: the last of so many raises, though such steps are skipped."""
_SHOWN_RANKS = 4
_REPORT_SECONDS = 10.0
"""After an error the device may never send a report."""
_LOOK = (
    "Lower the learning rate (and start again, or load_checkpoint() an earlier one and fit() without resume, which "
    "would bring the old rate back), look for 0/0, log(0) and sqrt(0) in model and loss, look at the data"
)

_LOOK_IN_LOOP = "Look for 0/0, log(0) and sqrt(0) in model and loss, and at the data"


class Verdict(enum.Enum):
    """Whether a step is taken, from best to worst; the same on every rank."""

    TAKEN = "taken"
    OVERFLOW = "not taken, because the loss scale was too large: loss and metrics are right"
    SKIPPED = "not taken, because a loss or a gradient is not finite"


class _Pending(NamedTuple):
    """A step whose report has not reached the host, and what restores the state before it."""

    share: Share
    recompute: Callable[[], Sequence[Tensor]]
    report: Report
    undo: Undo


class FiniteGuard:
    """Refuses or skips steps whose loss or gradients are not finite, as `on_nonfinite` tells.

    Cost of a step: the gradients are read once, and the buffers are copied. On an accelerator the host does not wait
    for that: the device itself skips such a step (`report`), and the host learns of it when the next step's backward
    has been launched, or at `wait_for_verdict`.

    Args:
        transaction: What a step changes, to put it back.
        state: Its loss scale is updated here. An overflow that a smaller one may cure is not an error.
        ends_fit: Whether such a step ends the fit in good order.
        defers_verdicts: Whether the verdict on a step arrives in the next one, which must not depend on it.
        is_fit: Whether `fit` takes the steps, and not a user's own loop.
        part: Which part of the model `ddp` has, for messages, if a step has several updates; the guard of the whole
            model then updates the loss scale (`end_updates`).
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        state: TrainingState,
        device: torch.device,
        transaction: StepTransaction,
        *,
        ends_fit: bool = False,
        defers_verdicts: bool = False,
        is_fit: bool = True,
        part: str = "",
    ) -> None:
        self._ddp = ddp
        self._scale = state.loss_scale
        self._skips = state.config.on_nonfinite == "skip"
        self.defers_verdicts = defers_verdicts
        self._pending: _Pending | None = None
        self._transaction = transaction
        self._ends_fit = ends_fit
        self._is_fit = is_fit
        self._part = part
        self._state = state
        self._device = device
        self._used_scale = 1.0
        self._taken = 0
        self._overflows = 0

    @property
    def _position(self) -> Position:
        return self._state.position

    def verdict(self, share: Share, losses: Sequence[Tensor], recompute: Callable[[], Sequence[Tensor]]) -> Verdict:
        """Return whether to take the step, or restore the model and raise NonFiniteError. All ranks call it.

        `recompute` runs the share again, forward and backward, on this rank alone, and returns the losses; `.grad` then
        holds this rank's own gradients.
        """
        is_whole_model = not self._part
        finite = self._ddp.is_finite()
        scale_can_fall = self._scale is not None and self._scale.can_fall
        if self._scale is not None:
            # For the error: the update below changes it.
            self._used_scale = self._scale.value
            if is_whole_model:
                self._scale.update(overflowed=not finite)
        if finite:
            self._position.set(skipped=0)
            self._taken += 1
            return Verdict.TAKEN
        if scale_can_fall and self._ddp.losses_are_finite():
            # What the step has logged stays: loss and metrics are right.
            self._transaction.put_back_buffers()
            self._overflows += 1
            return Verdict.OVERFLOW
        nonfinite = self._nonfinite_gradients()
        # The share runs again from where the step began.
        self._transaction.roll_back()
        self._explain(share, losses, recompute, nonfinite, self._transaction.roll_back)
        return Verdict.SKIPPED

    def end_updates(self, verdicts: Collection[Verdict]) -> Verdict:
        """Return the verdict on a step with several updates; update the loss scale, once.

        If an update was not taken, the buffers are restored: its forward may have left NaN in them.
        """
        worst = max(verdicts, key=[*Verdict].index)
        if worst is Verdict.TAKEN:
            self._taken += 1
        elif worst is Verdict.OVERFLOW:
            self._transaction.put_back_buffers()
        else:
            self._transaction.roll_back()
        if self._scale is not None:
            self._scale.update(overflowed=worst is not Verdict.TAKEN)
        self._overflows += worst is Verdict.OVERFLOW
        return worst

    def report(
        self,
        share: Share,
        losses: Sequence[Tensor],
        recompute: Callable[[], Sequence[Tensor]],
    ) -> Report:
        """Start to send the verdict on a step to the host; then read that of the previous step.

        All ranks call it, after backward. The step may be launched so that the device skips it if the report is bad.
        Raises as `wait_for_verdict`.
        """
        report = self._ddp.report(losses)
        self.wait_for_verdict()
        self._pending = _Pending(share, recompute, report, self._transaction.kept_undo())
        return report

    def wait_for_verdict(self) -> None:
        """Wait for the report of the latest step; all ranks call it at the same point.

        Raises NonFiniteError if the step was skipped, and DistributedTrainingError if a parameter was unused in it.
        """
        pending = self._take_pending()
        if pending is None:
            return
        if pending.report.is_good():
            self._ddp.read_report(pending.report)  # for the ranks' signals
            self._position.set(skipped=0)
            self._taken += 1
            return
        pending.undo()
        # For the signals, too; after the undo, because it may refuse unused parameters.
        self._ddp.read_report(pending.report)
        names = {id(parameter): name for name, parameter in self._ddp.module.named_parameters()}
        nonfinite = [names[id(parameter)] for parameter in pending.report.nonfinite]
        self._explain(pending.share, pending.report.losses, pending.recompute, nonfinite, pending.undo)

    def abort(self) -> None:
        """Undo the latest step if it was skipped: an error ends the fit, on this rank."""
        pending = self._take_pending()
        if pending is None:
            return
        # The device may have failed.
        with contextlib.suppress(RuntimeError):
            if pending.report.arrives_within(_REPORT_SECONDS) and not pending.report.is_good():
                pending.undo()

    def _take_pending(self) -> _Pending | None:
        pending = self._pending
        self._pending = None
        return pending

    def _explain(
        self,
        share: Share,
        losses: Sequence[Tensor],
        recompute: Callable[[], Sequence[Tensor]],
        nonfinite: Sequence[str],
        undo: Callable[[], None],
    ) -> None:
        """Find the rank at fault; raise or warn. All ranks call it, with the parameters that are `nonfinite`."""
        facts: dict[str, Any] = {}
        with generators_kept(self._device), self._ddp.suspended():
            recomputed_losses = recompute()
            if share.rows:
                facts = self._facts(share, losses, recomputed_losses)
        undo()  # of what `recompute` has changed
        # As the next forward would, if there is one: until then the ranks' buffers differ.
        self._ddp.sync_buffers()
        self._raise_or_warn(share, self._ddp.world.gather_json(facts), nonfinite)

    def explain_epoch(self) -> str:
        """Return how many steps of the epoch overflowed, or ""; warn if no step changed the model."""
        if self._scale is None:
            return ""
        if self._overflows and not self._taken:
            self._warn_of_scale(
                f"no step was taken: the gradients of all {self._overflows:,} overflowed 16 bits",
                "Give AMPConfig a smaller initial_scale, backoff_factor or growth_factor",
            )
        elif self._taken and self._gradients_are_zero():
            self._warn_of_scale(
                "all gradients of its last step are 0: they may be too small for 16 bits",
                "Give AMPConfig a larger initial_scale or backoff_factor",
            )
        if not self._overflows:
            return ""
        return f"{counted(self._overflows, 'step')} overflowed, loss scale {self._scale.value:g}"

    def _warn_of_scale(self, problem: str, remedy: str) -> None:
        assert self._scale is not None
        warn_together(
            f"epoch {self._position.epoch}: {problem}, at a loss scale that is {self._scale.value:g} now. "
            f'{remedy}, or take precision="bf16", which has the range of float32.'
        )

    def _gradients_are_zero(self) -> bool:
        gradients = self._gradients().values()
        return bool(gradients) and not any(bool(each.any()) for each in gradients)

    def _raise_or_warn(self, share: Share, facts_by_rank: Sequence[dict[str, Any]], nonfinite: Sequence[str]) -> None:
        """Raise, or warn and continue with the next step."""
        position = self._position
        at_fault = {rank: facts for rank, facts in enumerate(facts_by_rank) if any(facts.values())}
        problem = _describe(at_fault, nonfinite, self._ddp.config.compression)
        where = f"step {position.step + 1}: {problem}."
        if self._is_fit:
            number = f"step {share.number + 1} ({position.step + 1} in all)"
            where = f"epoch {position.epoch + 1}, {number}{self._part}: {problem}."
        position.set(skipped=position.skipped + 1)
        if self._skips and position.skipped < MAX_SKIPPED:
            count = "" if position.skipped == 1 else f", {position.skipped} in a row"
            warn_together(f"{where} The step is skipped{count}.")
            return
        if self._ends_fit:
            position.set(stopped=1)
            warn_together(f"{where} The step is not taken, and a callback ends the fit.")
            return
        remedy = self._remedy(has_bad_data=any(facts["data"] for facts in at_fault.values()))
        only_rank: int | None = None
        if len(at_fault) == 1:
            (only_rank,) = at_fault
        raise on_all_ranks(NonFiniteError(f"{where} {remedy}", rank=only_rank, during=f"step {position.step + 1}"))

    def _remedy(self, *, has_bad_data: bool) -> str:
        """Return the rest of the error: what has become of the step, and the remedy."""
        in_a_row = f"That is {self._position.skipped} steps in a row. " if self._skips else ""
        kept = "The step was not taken: the model is as before."
        if self._part:
            kept = "The update was not taken: its parameters are as before."
        remedy = _LOOK if self._is_fit else _LOOK_IN_LOOP
        if has_bad_data:
            remedy = "Fix or drop those samples"
        if self._is_fit and not self._skips:
            remedy += ', or skip such steps with on_nonfinite="skip"'
        return f"{in_a_row}{kept} {remedy}.{self._range()}"

    def _range(self) -> str:
        if self._scale is None:
            return ""
        remedy = ""
        if not self._scale.is_dynamic:
            remedy = "give a smaller initial_scale, or use_dynamic_scaling=True; "
        return (
            f" With precision='fp16' numbers end at 65,504, and the loss was multiplied by {self._used_scale:g} before "
            f"backward: {remedy}precision='bf16' has the range of float32."
        )

    def _gradients(self) -> dict[str, Tensor]:
        """Return the gradients that there are, by the names of their parameters."""
        named = self._ddp.module.named_parameters()
        return {name: values_of(parameter.grad) for name, parameter in named if parameter.grad is not None}

    def _nonfinite_gradients(self) -> list[str]:
        return [name for name, gradient in self._gradients().items() if not _is_finite(gradient)]

    def _facts(self, share: Share, losses: Sequence[Tensor], recomputed_losses: Sequence[Tensor]) -> dict[str, Any]:
        """Return what is not finite on this rank, as JSON values."""
        parameters = self._ddp.module.named_parameters()
        loss = _first_not_finite(recomputed_losses)
        if loss is None:  # only then: each look at a loss makes the host wait for the device
            loss_before = _first_not_finite(losses)
            if loss_before is not None:
                by_chance = "and finite when its batch runs again: the computation is random, as with dropout"
                loss = f"{loss_before}, {by_chance}"
        return {
            "data": "; ".join(_describe_rows(share)),
            "parameters": shortened(name for name, value in parameters if not _is_finite(value)),
            "loss": loss,
            "gradients": shortened(self._nonfinite_gradients()),
        }


def _describe(at_fault: Mapping[int, dict[str, Any]], nonfinite: Iterable[str], compression: str | None) -> str:
    """Describe which rank has what that is not finite."""
    if not at_fault:
        too_large = "to be added" if compression is None else f"for compression={compression!r}"
        return (
            f"the gradients of {shortened(nonfinite)} are not finite in the average over ranks; those that each rank "
            f"makes when it runs its batch once more are finite: they are too large {too_large}, or chance decides, as "
            "in dropout"
        )
    descriptions = []
    for rank, facts in [*at_fault.items()][:_SHOWN_RANKS]:
        parts = [facts["data"]]
        if facts["parameters"]:
            parts.append(f"parameters are not finite ({facts['parameters']})")
        if facts["loss"]:
            parts.append(f"the loss is {facts['loss']}")
        if facts["gradients"]:
            parts.append(f"gradients are not finite ({facts['gradients']})")
        descriptions.append(f"on rank {rank}, {', '.join(filter(None, parts))}")
    if len(at_fault) > _SHOWN_RANKS:
        descriptions.append("the same on more ranks")
    return "; ".join(descriptions)


def _first_not_finite(losses: Sequence[Tensor]) -> str | None:
    return next((str(loss.item()) for loss in losses if not _is_finite(loss)), None)


def _describe_rows(share: Share) -> list[str]:
    """Describe which rows of the data in this share are not finite."""
    found: dict[str, list[int]] = {}
    before = 0
    for batch in share:
        for prefix, part in (("X", batch.inputs), ("y", batch.targets), ("sample_weight", batch.weights)):
            for name, values in named_tensors(part, prefix):
                if not _is_finite(values):
                    found.setdefault(name, []).extend(before + row for row in _rows_at_fault(batch, values))
        before += batch.rows
    return [f"{name} holds NaN or infinities ({share.describe(rows)})" for name, rows in found.items()]


def _rows_at_fault(batch: Batch, values: Tensor) -> Iterable[int]:
    """Return the rows of a batch that are not finite: any may be, if its tensors have no row per sample."""
    if isinstance(batch.inputs, OpaqueBatch):
        return range(batch.rows)
    return rows_not_finite(values)


def _is_finite(tensor: Tensor) -> bool:
    return bool(tensor.isfinite().all())
