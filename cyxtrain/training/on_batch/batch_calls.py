"""One batch at a time, by every rank: without epochs, callbacks or checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from cyxtrain.callbacks.callback import Callbacks
from cyxtrain.config import DDPConfig, DistributedTrainingConfig
from cyxtrain.config.settings import names_checked, require
from cyxtrain.data.batches.rows import as_rows
from cyxtrain.data.batches.structure import num_rows
from cyxtrain.data.feed import Place
from cyxtrain.data.rng import generators_kept, seed_generators
from cyxtrain.data.sources.open import open_source, yields_batches
from cyxtrain.data.sources.source import Source
from cyxtrain.optim.optimizers import fused
from cyxtrain.optim.precision import float32_products
from cyxtrain.parallel import DistributedDataParallel
from cyxtrain.training.inputs.plan import FitPlan
from cyxtrain.training.model.modes import modes_kept, put_into_training
from cyxtrain.training.model.out_of_memory import memory_explained
from cyxtrain.training.model.own_steps import TrainerSteps
from cyxtrain.training.nonfinite import FiniteGuard
from cyxtrain.training.resume.start_or_resume import with_batch_norm_checked
from cyxtrain.training.state import TrainingState
from cyxtrain.training.step import TrainingStep
from cyxtrain.training.trained import trained_with
from cyxtrain.world import runtime
from cyxtrain.world.agreement import agree_on, ending_group_on_error

_KEPT = (
    *("seed", "on_nonfinite", "clip_norm", "clip_value", "clip_adaptive", "precision", "amp", "sync_batchnorm"),
    *("fused_optimizer", "float32_precision", "channels_last"),
)
"""The settings of the latest fit that hold for a step outside it."""


class _Form(NamedTuple):
    """What batches have in common that need no other plan: types and shapes, and the settings."""

    tensors: dict[str, Any]
    config: DistributedTrainingConfig


class BatchTraining:
    """Takes steps outside `fit` on batches of one form.

    Args:
        form: Of the batches.
        state: Of the trainer.
        plan: Of a fit of one such batch.
        wrappers: The user's own of the model.
        ddp_config: How gradients are averaged.
    """

    def __init__(
        self,
        form: _Form,
        state: TrainingState,
        plan: FitPlan,
        wrappers: list[DistributedDataParallel],
        ddp_config: DDPConfig,
    ) -> None:
        self.form = form
        self._state = state
        self._plan = plan
        self._wrappers = wrappers
        self._ddp = DistributedDataParallel(trained_with(state.model, state.loss, plan.data.call.step), ddp_config)
        # Between two calls, a backward is the user's own.
        self._between_calls = contextlib.ExitStack()
        self._between_calls.enter_context(self._ddp.no_sync())
        state.begin_loop(Callbacks(), state.data)

    def step(self, source: Source) -> dict[str, float]:
        """Take a step on a batch; return what was measured, over all ranks."""
        state, plan, rank = self._state, self._plan, runtime.get_rank()
        config, data, device = plan.config, plan.data, plan.data.placement.device
        modules = (state.model, *data.loss.modules)
        with contextlib.ExitStack() as stack:
            stack.enter_context(ending_group_on_error())
            stack.enter_context(memory_explained())
            stack.enter_context(torch.enable_grad())
            stack.enter_context(modes_kept(*modules))
            stack.enter_context(generators_kept(device))
            stack.enter_context(float32_products(config.float32_precision))
            stack.enter_context(fused(state.optimizer) if plan.uses_fused_optimizer else contextlib.nullcontext())
            for wrapper in self._wrappers:
                stack.enter_context(wrapper.suspended())
            self._between_calls.close()
            stack.callback(lambda: self._between_calls.enter_context(self._ddp.no_sync()))
            stack.callback(state.trained.zero_grad)
            put_into_training(*modules)
            seed_generators(config.seed, 0, state.position.step, rank, device)
            guard = FiniteGuard(self._ddp, config.on_nonfinite, state.position, device, state.loss_scale)
            step = TrainingStep(self._ddp, state, data, guard)
            feed = source.feed(config, rank, runtime.get_world_size())
            with contextlib.closing(feed.shares(Place(0, 0, 0), data.placement, 1)) as shares:  # type: ignore[type-var]
                step(next(shares))
            self._ddp.sync_buffers()
            state.position.count_step()
            return step.totals.over_ranks(runtime.cpu_group())

    def close(self) -> None:
        """Release the model, which can then be wrapped again."""
        self._between_calls.close()
        self._ddp.close()


class BatchCalls(TrainerSteps):
    """The calls of a trainer for single batches."""

    _state: TrainingState
    _wrappers: list[DistributedDataParallel]
    _batches: BatchTraining | None = None
    ddp_config: DDPConfig

    # The trainer has these:
    def _begin_batch(self, call: str) -> None:
        raise NotImplementedError

    def _agreed_plan(
        self, arguments: tuple[Any, ...], keywords: dict[str, Any], *, has_all_rows: bool = True
    ) -> FitPlan:
        raise NotImplementedError

    def evaluate(self, *arguments: Any, **keywords: Any) -> Any:  # noqa: D102
        raise NotImplementedError

    def predict(self, *arguments: Any, **keywords: Any) -> Any:  # noqa: D102
        raise NotImplementedError

    def get_world_size(self) -> int:  # noqa: D102
        raise NotImplementedError

    @names_checked
    def train_on_batch(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        class_weight: Mapping[int, float] | None = None,
        return_dict: bool = False,
    ) -> Any:
        """Take one step on a batch, in training mode: Keras's call, for loops of your own.

        Every rank passes the same batch and trains on its share, as in `fit`. Precision, clipping and other settings of
        a step are those of the latest fit. Callbacks are not called, and epochs are not counted.

        Args:
            x: Inputs, one entry per sample, or several by name.
            y: Targets, one entry per sample.
            sample_weight: How much the loss of each sample counts, shape (n,).
            class_weight: How much the samples of each class count, by class index.
            return_dict: Return a dictionary with names.

        Returns:
            The loss of this batch, over all ranks, before the step; with accuracy or metrics a list of all. NaN for a
            step that is skipped.

        Raises:
            ConfigError: The input is wrong, on any rank, or a callback calls it.
            NonFiniteError: A loss or a gradient is NaN or infinite, with `on_nonfinite="raise"`.
        """
        self._begin_batch("train_on_batch")
        (source, form), _ = agree_on(lambda: self._open_batch(x, y, sample_weight, class_weight))
        if self._batches is None or self._batches.form != form:
            self._close_batches()
            weights = {"sample_weight": sample_weight, "class_weight": class_weight}
            plan = with_batch_norm_checked(
                self._state, self._agreed_plan((x, y, form.config), weights, has_all_rows=False)
            )
            self._batches = BatchTraining(form, self._state, plan, self._wrappers, self.ddp_config)
        try:
            return _returned(self._batches.step(source), return_dict)
        except BaseException:
            self._close_batches()
            raise

    @names_checked
    def test_on_batch(self, x: Any, y: Any = None, sample_weight: Any = None, return_dict: bool = False) -> Any:
        """Return loss, accuracy and metrics of a batch, in evaluation mode: `evaluate` of a single batch.

        Args:
            x: As in `train_on_batch`, divided among the ranks.
            y: As in `train_on_batch`.
            sample_weight: As in `train_on_batch`.
            return_dict: As in `train_on_batch`.
        """
        rows = self._rows_per_rank("test_on_batch", x)
        return _returned(dict(self.evaluate(x, y, sample_weight=sample_weight, batch_size=rows)), return_dict)

    @names_checked
    def predict_on_batch(self, x: Any) -> Any:
        """Return the model's output for a batch, on every rank: `predict` of a single batch.

        Args:
            x: As in `train_on_batch`, divided among the ranks.
        """
        return self.predict(x, batch_size=self._rows_per_rank("predict_on_batch", x))

    def _rows_per_rank(self, call: str, x: Any) -> int:
        """Return how many rows of a batch the first rank has."""
        _require_batch(call, x)
        return max(1, -(-num_rows(as_rows(x).inputs) // self.get_world_size()))

    def _open_batch(
        self, x: Any, y: Any, weights: Any, class_weights: Any
    ) -> tuple[tuple[Source, _Form], dict[str, Any]]:
        """Return a batch and its form, and what must be the same on every rank."""
        _require_batch("train_on_batch", x)
        require(
            not self._state.rates.ends_with_fit,
            "the schedule of this trainer ends with a fit, which train_on_batch has not: pass a scheduler of "
            "torch.optim.lr_scheduler, or set the rate with trainer.set_learning_rates.",
        )
        rows, kept = num_rows(as_rows(x).inputs), {name: getattr(self._state.config, name) for name in _KEPT}
        config = DistributedTrainingConfig(epochs=1, effective_batch_size=rows, shuffle=False, verbose=False, **kept)
        source = open_source(x, y, weights, config, 0, trains=True)
        if class_weights is not None:
            source = source.weighted_by_class(class_weights, None)
        facts = source.facts("the batch's")
        form = {name: value for name, value in facts.items() if not name.endswith("hash of its values")}
        return (source, _Form(form, config)), facts

    def _close_batches(self) -> None:
        """Release what `train_on_batch` keeps between calls."""
        if self._batches is not None:
            self._batches.close()
            self._batches = None


def _require_batch(call: str, x: Any) -> None:
    require(
        not yields_batches(x),
        f"{call} takes one batch, as arrays, and X is a {type(x).__name__}, which gives batches: pass each of them, or "
        "call fit, evaluate or predict.",
    )


def _returned(measured: Mapping[str, float], as_dictionary: bool) -> Any:
    values = list(measured.values())
    return dict(measured) if as_dictionary else values if len(values) > 1 else values[0]
