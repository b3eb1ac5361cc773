"""One batch at a time, by every rank: without epochs, callbacks or checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from cyxtrain.callbacks.callback import Callbacks
from cyxtrain.checkpoint.checkpoint_file import CheckpointState
from cyxtrain.config import AMPConfig, DistributedTrainingConfig
from cyxtrain.config.settings import names_checked, require
from cyxtrain.data.batches.rows import as_rows
from cyxtrain.data.batches.structure import num_rows
from cyxtrain.data.batches.tables import check_order
from cyxtrain.data.feed import Place
from cyxtrain.data.rng import generators_kept, seed_generators
from cyxtrain.data.sources.open import open_source, yields_batches
from cyxtrain.data.sources.source import Source
from cyxtrain.metrics.logged import GRAD_NORM, LoggedNumbers
from cyxtrain.optim.precision import make_loss_scale
from cyxtrain.parallel import DistributedDataParallel
from cyxtrain.training.inputs.plan import FitPlan
from cyxtrain.training.inputs.single_rows import with_batch_norm_checked
from cyxtrain.training.inputs.training_data import weighted_by_class
from cyxtrain.training.model.out_of_memory import memory_explained
from cyxtrain.training.model.own_steps import TrainerSteps
from cyxtrain.training.model.snapshot import put_into_training
from cyxtrain.training.state import TrainerView, TrainingState
from cyxtrain.training.step.session import Session
from cyxtrain.world.agreement import agree_on, ending_group_on_error
from cyxtrain.world.world import World

_RESTORED = (
    *("seed", "on_nonfinite", "clip_norm", "clip_value", "clip_adaptive", "precision", "amp", "fused_optimizer"),
    *("float32_precision", "channels_last", "virtual_ranks", "num_threads"),
)
# For sync_batchnorm `fit` changes the model, which `load_checkpoint` does not.
_KEPT = (*_RESTORED, "sync_batchnorm")
"""The settings of the latest fit that hold for a step outside it."""


@names_checked
class BatchCalls(TrainerView, TrainerSteps):
    """The calls of a trainer for single batches; `self` is the trainer."""

    _batch_plan: tuple[Any, FitPlan] | None = None
    """Types and shapes of the latest batch, and the plan of a fit of it, which holds for others of the same form."""

    def train_on_batch(
        self: Any,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        class_weight: Mapping[int, float] | None = None,
        return_dict: bool = False,
    ) -> Any:
        """Take one step on a batch, in training mode: Keras's call, for your own loop.

        Every rank passes the same batch and trains on its share, as in `fit`. Precision, clipping, `virtual_ranks` and
        other settings of a step are those of the latest fit, also of a loaded checkpoint's. Callbacks are not called,
        and epochs are not counted.

        Args:
            x: Inputs, one entry per sample, or several by name.
            y: Targets, one entry per sample.
            sample_weight: How much the loss of each sample counts, shape (n,).
            class_weight: How much the samples of each class count, by class index.
            return_dict: Return a dictionary with names.

        Returns:
            The loss of this batch, over all ranks, before the step; with accuracy or metrics a list of all.

        Raises:
            ConfigError: The input is wrong, on any rank, or a callback calls it.
            NonFiniteError: A loss or a gradient is NaN or infinite, with `on_nonfinite="raise"`.
        """
        world = self._join("train_on_batch")
        given = (x, y, sample_weight, class_weight)
        (source, config, form), _ = agree_on(world, lambda: _opened(world, self, *given))
        known_form, plan = self._batch_plan or (None, None)
        if plan is None or known_form != form or plan.world.group is not world.group:
            weights = {"sample_weight": sample_weight, "class_weight": class_weight}
            plan = self._agreed_plan(world, (x, y, config), weights, has_all_rows=False)
            with self._logging():
                plan = with_batch_norm_checked(self.model, plan)
            self._batch_plan = (form, plan)
        with ending_group_on_error(world), memory_explained(world):
            ddp = self._wrapped(plan)
            with self._fit_context(plan, ddp) as logged:
                return _returned(_step(self._state, plan, ddp, source, logged), return_dict)

    def test_on_batch(self: Any, x: Any, y: Any = None, sample_weight: Any = None, return_dict: bool = False) -> Any:
        """Return loss, accuracy and metrics of a batch, in evaluation mode: `evaluate` of a single batch.

        Args:
            x: As in `train_on_batch`, divided among the ranks.
            y: As in `train_on_batch`.
            sample_weight: As in `train_on_batch`.
            return_dict: As in `train_on_batch`.
        """
        rows = _rows_of("test_on_batch", x)
        batch_size = -(-rows // (self.config.virtual_ranks or self.get_world_size()))
        return _returned(dict(self.evaluate(x, y, sample_weight=sample_weight, batch_size=batch_size)), return_dict)

    def predict_on_batch(self: Any, x: Any) -> Any:
        """Return the model's output for a batch, on every rank: `predict` of a single batch.

        Args:
            x: As in `train_on_batch`, divided among the ranks.
        """
        rows = _rows_of("predict_on_batch", x)
        return self.predict(x, batch_size=-(-rows // (self.config.virtual_ranks or self.get_world_size())))

    def _take_settings(self, saved: CheckpointState, source: str) -> None:
        """Let calls outside fits use the settings of the latest fit of a checkpoint, named `source`."""
        # A checkpoint that is older than a setting was made with its default.
        known = asdict(DistributedTrainingConfig()) | saved.config
        taken = {name: known[name] for name in (*_RESTORED, "batch_size")}
        if taken["amp"] is not None:
            taken["amp"] = AMPConfig(**taken["amp"])
        config = replace(self._state.config, **taken)
        scale = make_loss_scale(config)
        if scale is not None and saved.others.get("loss_scale"):
            scale.load_state_dict(saved.others["loss_scale"], source)
        self._state.set(config=config, loss_scale=scale)


def _opened(
    world: World, trainer: Any, x: Any, y: Any, weights: Any, class_weights: Any
) -> tuple[tuple[Source, DistributedTrainingConfig, Any], dict[str, Any]]:
    """Return a batch, its settings and its form, and what must be the same on every rank."""
    rows = _rows_of("train_on_batch", x)
    state = trainer._state
    kept = {name: getattr(state.config, name) for name in _KEPT}
    require(
        not any(rates.ends_with_fit for rates in state.rates.values()),
        "the schedule of this trainer ends with a fit, and train_on_batch is not one: pass a scheduler of "
        "torch.optim.lr_scheduler, or set the rate with trainer.set_learning_rates.",
    )
    config = DistributedTrainingConfig(epochs=1, effective_batch_size=rows, shuffle=False, verbose=False, **kept)
    source = open_source(x, y, weights, config, 0, world, trains=True)
    if class_weights is not None:
        source = weighted_by_class(source, class_weights, trainer._loss)
    facts = source.facts("the batch's")
    # A batch of the same form has other values, and so another hash.
    form = {name: value for name, value in facts.items() if "hash" not in name}
    return (source, config, (form, config)), facts


def _step(
    state: TrainingState, plan: FitPlan, ddp: DistributedDataParallel, source: Source, logged: LoggedNumbers
) -> dict[str, float]:
    """Take a step on a batch; return what was measured, over all ranks."""
    world = plan.world
    config = plan.config
    data = plan.data
    device = data.placement.device
    check_order(state.columns, source.columns)
    state.set(callbacks=Callbacks(), stop_training=False, columns=dict(source.columns))
    with generators_kept(device):
        # By the step: each batch draws other numbers, and a resumed program the same ones.
        seed_generators(config.seed, 0, state.position.step, plan.own_generators, device)
        put_into_training(state.model, *data.loss.modules)
        shares = source.feed(config, world).shares(Place(0, 0, 0), data.placement, 1)
        with contextlib.closing(shares), Session(state, data, ddp, logged) as session:
            step = session.begin_epoch()
            share = next(shares)
            session.begin_step(share)
            session.take_step(share)
        ddp.sync_buffers()
        state.position.set(step=state.position.step + 1)
        numbers = {name: each for name, each in logged.over_ranks(world).items() if not name.startswith(GRAD_NORM)}
        return {**step.totals.over_ranks(world), **numbers}


def _rows_of(call: str, x: Any) -> int:
    require(
        not yields_batches(x),
        f"{call} takes one batch, as arrays, and X is a {type(x).__name__}, which gives batches: pass each of them, or "
        "call fit, evaluate or predict.",
    )
    return max(1, num_rows(as_rows(x).inputs))


def _returned(measured: Mapping[str, float], as_dictionary: bool) -> Any:
    """Return numbers as Keras does: a single one alone, several as a list."""
    if as_dictionary:
        return dict(measured)
    values = [*measured.values()]
    return values if len(values) > 1 else values[0]
