"""A step of a loop of the user's own, which brings its micro-batches one by one."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from cyxtrain.config.settings import require
from cyxtrain.data.batches.batch import Batch
from cyxtrain.metrics.weighting import BatchLoss, Weighting
from cyxtrain.training.step.loss_division import DivisionAfterExchange, DivisionByRows, LossDivision, kinds_of
from cyxtrain.training.step.training_step import TrainingStep


class LoopStep(TrainingStep):
    """A step that learns from each micro-batch what `fit` knows beforehand from its dry run and its data.

    Nobody knows how many rows the step will have, so that a mean over samples is divided as a weighted loss.
    """

    _is_fit = False

    @override
    def _loss_of(self, output: Any, batch: Batch) -> BatchLoss:
        self._loss.check_shapes(output, batch.targets)
        loss = super()._loss_of(output, batch)
        self._adopt_division_of_loss()
        return loss

    @override
    def _choose_division(self) -> LossDivision:
        is_sum = Weighting.NOTHING in kinds_of(self._loss)
        kind = DivisionByRows if is_sum else DivisionAfterExchange
        return kind(self._ddp, self._setup, self.clock)

    def _adopt_division_of_loss(self) -> None:
        """Divide as the forward has shown that the loss is weighted."""
        kinds = kinds_of(self._loss)
        if kinds != self._division.kinds:
            division = self._choose_division()
            if type(division) is type(self._division):
                # It keeps what it has counted in this step.
                self._division.kinds = kinds
            else:
                self._division = division
                self._division.begin()
        is_of_one_kind = len({*kinds}) == 1
        has_several_weights = self._loss.weightings and self._loss.has_weights
        require(
            is_of_one_kind and not has_several_weights,
            "DistributedAMPTrainer does not know what several losses count before a step is complete, unless all "
            "are means over samples, or sums: use fit, or return one loss as (sum, weight).",
        )
