"""Steps in which every rank must run as many forwards and backwards as the others."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from cyxtrain.config.settings import require
from cyxtrain.data.batches.batch import Batch, Share
from cyxtrain.parallel import backward_alike, gather_no_rows, gathers_kept
from cyxtrain.training.step.training_step import Result, TrainingStep


class EqualForwardsStep(TrainingStep):
    """A step whose loss gathers rows, or whose model has a layer such as SyncBatchNorm, which needs all ranks at once.

    Where ranks have different numbers of micro-batches, those with fewer run the rest on no rows. All gradients are
    then averaged at the end, not while the last backward runs.
    """

    @override
    def _accumulate(self, share: Share) -> list[Result]:
        most = self._uneven_micro_batches(share) if self._setup.needs_all_ranks else None
        if most is None:
            return super()._accumulate(share)
        self._items = self._division.before_forward(share, most)
        self._ddp.share_buffers_once()
        results: list[Result] = []
        with self._ddp.no_sync():
            batches = iter(share)
            for _ in range(most):
                batch = next(batches, None)
                if batch is None:
                    self._join_micro_batch(share)
                else:
                    batch.items = self._items
                    results.append(self._run_micro_batch(batch, share))
                share.prefetch_next(self.clock.data)
        self._division.attach_weight(share, self._sync)
        self._ddp.average_accumulated(others_run_backward=False)
        self.clock.communicated(self.clock.backward, self._ddp.seconds_communicated())
        return results

    def _run_micro_batch(self, batch: Batch, share: Share) -> Result:
        with gathers_kept() as gathers:
            result = self._forward(batch)
            divisors = self._division.learn_divisors(result.loss, share)
            value = self._scaled_loss(result.loss, divisors)
        backward_alike(self._world, value, gathers)
        return result

    def _join_micro_batch(self, share: Share) -> None:
        """Take part in a micro-batch of other ranks, on no rows."""
        with gathers_kept() as gathers:
            value = self._forward_without_rows()
            self._division.learn_divisors(self._loss.without_rows(), share)
        backward_alike(self._world, value, gathers)

    def _uneven_micro_batches(self, share: Share) -> int | None:
        """Return the most micro-batches of any rank if ranks have different numbers. All ranks call it."""
        counts = torch.tensor([len(share), -len(share)], device="cpu")
        self._world.reduce(counts, dist.ReduceOp.MAX)
        most = int(counts[0])
        least = -int(counts[1])
        if most == least:
            return None
        require(
            not self._setup.call.optimizes,
            f"step {share.number + 1} has no rows for some rank, and its train_step needs those of all ranks at "
            "once (SyncBatchNorm or gathered rows) and calls optimize: set drop_last=True.",
        )
        return most

    def _forward_without_rows(self) -> Tensor | None:
        """Join a forward that needs all ranks, on no rows; return what its backward begins from, if anything."""
        if self._setup.without_rows is None:
            gather_no_rows(self._world, self._loss.gathers, self._device)
            return None
        self._ddp.expect_rows(0)
        with self._logged.repeating():
            return self._setup.without_rows(self._ddp.forward)
