"""What steps are taken with: all that follows from a world, a model, a state and a setup; made anew with them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial

from cyxtrain.data.batches.batch import Share
from cyxtrain.metrics.logged import LoggedNumbers
from cyxtrain.metrics.sums import MetricSums
from cyxtrain.optim.precision import threads_used
from cyxtrain.parallel import DistributedDataParallel
from cyxtrain.training.inputs.checked_data import ModelSetup
from cyxtrain.training.state import TrainingState
from cyxtrain.training.step.equal_forwards import EqualForwardsStep
from cyxtrain.training.step.hash_log import HashLog
from cyxtrain.training.step.loop_step import LoopStep
from cyxtrain.training.step.step_with_updates import StepWithUpdates
from cyxtrain.training.step.training_step import TrainingStep
from cyxtrain.training.step.updates import Updates, make_updates
from cyxtrain.world.slices import Slices


class Session:
    """The steps of a fit, of single batches, or of a loop of the user's own. Opening one changes nothing else.

    Args:
        ddp: The model, wrapped in the world whose ranks take the steps together.
        logged: Where numbers of the user's own go.
        hashes: Where hashes of gradients and parameters go; None: nowhere.
        ends_fit: Whether a step that is not finite ends the fit in good order.
        may_defer: Whether all ranks compute on accelerators: the verdict on a step may come with the next one.
        is_fit: Whether `fit` takes the steps, and not a loop of the user's.

    Attributes:
        step: That of the running epoch; None between two.
    """

    def __init__(
        self,
        state: TrainingState,
        setup: ModelSetup,
        ddp: DistributedDataParallel,
        logged: LoggedNumbers,
        hashes: HashLog | None = None,
        *,
        ends_fit: bool = False,
        may_defer: bool = False,
        is_fit: bool = True,
    ) -> None:
        self._logged = logged
        self._hashes = hashes
        self._is_virtual = state.config.virtual_ranks is not None
        self._threads = threads_used(state.config.threads_of_fit)
        if state.config.virtual_ranks is not None:
            ddp.use_slices(Slices.of(ddp.world, state.config.virtual_ranks))
            logged.use_slices(ddp.slices)
        if may_defer:
            ddp.use_reports()
        self.updates: Updates | None = make_updates(state, setup, ddp, logged, ends_fit=ends_fit)
        # PowerSGD keeps error feedback, so a step cannot be undone once the next has begun.
        may_undo = may_defer and ddp.config.compression != "powersgd"
        kind = _kind_of_step(setup, self.updates, is_fit=is_fit)
        self._make_step = partial(kind, ddp, state, setup, logged, ends_fit=ends_fit, may_defer=may_undo)
        self.step: TrainingStep | None = None

    def __enter__(self) -> Session:
        if self._hashes is not None:
            self._hashes.open()
        self._threads.__enter__()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._threads.__exit__(None, None, None)
        if self._hashes is not None:
            self._hashes.close()
        if self.updates is not None:
            self.updates.close(error)

    def begin_epoch(self) -> TrainingStep:
        """Return the step of an epoch, whose sums are empty; callbacks may have changed what is trained before."""
        self.step = self._make_step()
        return self.step

    def begin_step(self, share: Share) -> None:
        """Begin a step on a share of the rows: numbers that are logged belong to it."""
        self._logged.begin(self._rows_of(share), share.number)

    def take_step(self, share: Share, signals: Sequence[float] = ()) -> None:
        """Take a step; `signals` travel with the gradients.

        Raises NonFiniteError with everything as before the step.
        """
        assert self.step is not None
        with contextlib.nullcontext() if self._hashes is None else self._hashes.of_step():
            self.step(share, signals)
        self._logged.rows = self._rows_of(share)
        self.step.clock.steps += 1

    def _rows_of(self, share: Share) -> int:
        """Return the weight of what is logged outside of slices, which with virtual ranks counts once."""
        return share.global_rows if self._is_virtual else share.rows

    def received(self) -> Sequence[float]:
        """Return, for each signal of the latest step, a number above 0 if any rank gave it.

        Where the verdict on a step comes late, so do its signals.
        """
        assert self.step is not None
        return self.step.received

    @property
    def totals(self) -> MetricSums | None:
        """The sums of the running epoch; None between two epochs."""
        return None if self.step is None else self.step.totals

    @property
    def running(self) -> MetricSums:
        """The sums of the running epoch."""
        assert self.step is not None
        return self.step.totals

    def wait_for_verdict(self) -> None:
        """Wait for the verdict on the latest step; all ranks call it at the same point."""
        if self.step is not None:
            self.step.guard.wait_for_verdict()

    def abort(self) -> None:
        """Put back the latest step if it was skipped: an error ends the fit, on this rank."""
        if self.step is not None:
            self.step.guard.abort()


def _kind_of_step(setup: ModelSetup, updates: Updates | None, *, is_fit: bool) -> Callable[..., TrainingStep]:
    if not is_fit:
        return LoopStep
    if updates is not None:
        return partial(StepWithUpdates, updates)
    return EqualForwardsStep if setup.needs_all_ranks else TrainingStep
