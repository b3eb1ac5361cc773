"""A step of the user's own, which may update parameters itself by `self.optimize`."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor
from typing_extensions import override

from cyxtrain.data.batches.batch import Batch, Share
from cyxtrain.parallel import gathers_kept
from cyxtrain.training.step.equal_forwards import EqualForwardsStep
from cyxtrain.training.step.nonfinite import Verdict
from cyxtrain.training.step.training_step import Result
from cyxtrain.training.step.updates import Updates


class StepWithUpdates(EqualForwardsStep):
    """A step that runs its forward as `train_step`: what that has updated by `self.optimize` is not updated again.

    A train_step may decide anew in each step whether it calls `optimize` or returns a loss.
    """

    def __init__(self, updates: Updates, *args: Any, **settings: Any) -> None:
        self._updates = updates
        super().__init__(*args, **settings)

    @override
    def begin(self, share: Share, signals: Sequence[float] = ()) -> None:
        super().begin(share, signals)
        self._updates.begin(share, self.guard, self._transaction, self._sync)

    @override
    def accumulate_micro_batch(self, batch: Batch, share: Share, *, is_last: bool) -> Result:
        with contextlib.nullcontext() if is_last else self._ddp.no_sync():
            with self.clock.forward, gathers_kept() as gathers:
                result = self._updates.run(partial(self._forward, batch), batch.rows, is_last=is_last)
            # `optimize` has run backward and stepped within the forward.
            if not self._updates.has_updated:
                self._accumulate_loss(result.loss, gathers, share, is_last=is_last)
        return result

    @override
    def join_without_rows(self, share: Share) -> None:
        with self.clock.backward:
            self._ddp.share_buffers_once()
            self._updates.follow()
            if not self._updates.has_updated:
                self._join_backward(share)

    @override
    def finish(self, share: Share, results: Sequence[Result]) -> Verdict:
        if not self._updates.has_updated:
            return super().finish(share, results)
        self.clock.communicated(self.clock.forward, self._updates.seconds_communicated())
        for norms in self._updates.norms:
            self._logged.add_norms(norms, may_be_skipped=False)
        return self._updates.finish()

    @property
    @override
    def received(self) -> Sequence[float]:
        if self._updates.received is not None:
            return self._updates.received
        return super().received

    @property
    @override
    def _others_run_backward(self) -> bool:  # type: ignore[override]
        return not self._updates.parts

    @override
    def _run_backward(self, value: Tensor) -> None:
        """Run a backward whose gradients the wrappers of the updates leave to that of the whole model."""
        with self._updates.suspended():
            value.backward()
