"""Keras's `fit` for any module, on any number of ranks.

fit -> FitLoop (`fit_loop.py`), which runs the epochs -> TrainingStep (`step/training_step.py`).
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
from torch import nn
from typing_extensions import Unpack

from cyxtrain.callbacks.callback import Callback, Callbacks, checked_callbacks
from cyxtrain.checkpoint.checkpoint_file import CheckpointState, write_checkpoint
from cyxtrain.config import DDPConfig, DistributedTrainingConfig
from cyxtrain.config.settings import names_checked, nearest, require_choice, require_constructed, require_integer
from cyxtrain.environment import loader_workers
from cyxtrain.environment.standard_streams import show
from cyxtrain.errors import CollectiveMismatchError, ConfigError, brief, counted
from cyxtrain.metrics.logged import LoggedNumbers, NumberLogger
from cyxtrain.metrics.loss import Loss, WeightedLosses
from cyxtrain.metrics.named_losses import name_of_loss
from cyxtrain.metrics.named_metrics import metrics_by_name
from cyxtrain.optim.learning_rates import LearningRates, check_rates
from cyxtrain.optim.optimizers import OptimizerLike, fused, make_optimizers
from cyxtrain.optim.precision import float32_products
from cyxtrain.optim.schedules import SchedulerLike, make_schedulers, scheduler_facts
from cyxtrain.parallel import DistributedDataParallel, unwrap
from cyxtrain.progress.display import Verbosity
from cyxtrain.progress.history import TrainingHistory
from cyxtrain.progress.summary import OutputShapes, summary_of
from cyxtrain.training.delegation import delegated
from cyxtrain.training.evaluation import Call, Evaluation, evaluate, predict, predict_to_folder
from cyxtrain.training.fit_loop import FitLoop
from cyxtrain.training.header import explain, numerics_of
from cyxtrain.training.inputs.arguments import Data, FitArguments, FitSettings, parse_fit
from cyxtrain.training.inputs.checked_data import CheckedData, LossLike, TrainerArguments, check_rows
from cyxtrain.training.inputs.checks import checked_ddp_config
from cyxtrain.training.inputs.facts import value_facts
from cyxtrain.training.inputs.plan import FitPlan, plan_fit, warn_of_data
from cyxtrain.training.inputs.training_data import Sources, open_fit, open_rows
from cyxtrain.training.inputs.virtual_ranks import check_settings
from cyxtrain.training.model.compile import compiled, layers_of, recomputed
from cyxtrain.training.model.own_steps import StepLike, check_names
from cyxtrain.training.model.placement import checked_device
from cyxtrain.training.model.snapshot import modes_kept
from cyxtrain.training.on_batch.batch_calls import BatchCalls
from cyxtrain.training.resume.resumption import Resumption
from cyxtrain.training.resume.start_or_resume import start_or_resume
from cyxtrain.training.state import TrainingState, output_names
from cyxtrain.training.stopping import exit_for, stopping_signals
from cyxtrain.training.trained import trained_with
from cyxtrain.world import runtime
from cyxtrain.world.agreement import agree_on, ending_group_on_error, on_first
from cyxtrain.world.world import World

_numbers = itertools.count(1)
"""Numbers trainers so that a restarted program matches them up."""


@names_checked
class DistributedTrainer(BatchCalls, NumberLogger):
    """Trains, evaluates and predicts on every rank of the world; a single process is a world of one rank.

    It can be made before `cyxtrain.init()`; `fit`, `evaluate` and `predict` join the world by themselves.

    Args:
        model: Any `nn.Module`; a wrapped one is unwrapped.
        loss_fn: A module of torch.nn, a callable of (output, target) that returns the mean over samples or (sum,
            weight), a name, or None: the model returns its loss. A dictionary of these by output name: the losses are
            added, and the history has each; None: no loss.
        optimizer: From torch.optim, a factory, or a name.
        optimizers: Instead of `optimizer`, several by name, each built with its own parameters.
        loss_weights: Factors of several losses, by name in loss_fn or in the dictionary of losses that the model
            returns; 1 for others. A number if loss_fn is one loss.
        metrics: What is measured besides the loss, in each epoch and in `evaluate`, over all ranks: names, such as
            "f1", "top_5" or "mae" (docs/data.md lists them), functions of (output, target) that return a number per
            sample or their mean, torchmetrics objects, and `cyxtrain.metrics.WholeSet` for functions of all samples; or
            several by name, or lists of them by output name. Accuracy is measured if targets are class indices;
            "accuracy" requires it.
        scheduler: Learning-rate scheduler: "constant", "linear", "cosine" or "one_cycle", which end with each fit; one
            of `torch.optim.lr_scheduler`, or of another package, such as timm's; a function of the optimizer that
            returns one; or a function of `(optimizer, total_steps)`, called in each fit with the number of times that
            it steps the schedule.
        schedulers: Instead of `scheduler`, one per optimizer, by the optimizer's name.
        scheduler_interval: The schedule is stepped after each optimizer "step", or each "epoch".
        callbacks: Called in each fit, before those passed to `fit` (`cyxtrain.callbacks`).
        ddp_config: How gradients are averaged; None: the defaults, with unused parameters allowed.
        device: "auto": where the model is, if that is an accelerator; otherwise this rank's visible one, unless
            DISTRIBUTED_BACKEND=cpu asks for CPUs; otherwise the CPU. "cuda" is this rank's own GPU.
        train_step: A function of (trainer, batch) that returns the loss, instead of the method `train_step`.
        test_step: Likewise, for `evaluate` and validation; without it, model and loss_fn, or `train_step` if there is
            no loss_fn.
        predict_step: Likewise; it returns what `predict` gathers.

    Attributes:
        model: The unwrapped model.
        loss_fn, loss_weights, metrics: As given; metrics by name. They and `callbacks` may be replaced between fits.
        ddp_config: How gradients are averaged.
        callbacks: Called in each fit.
        stop_evaluating: Set by a callback on any rank during a batch, ends `evaluate` or a validation after it.
        stop_predicting: Likewise, of `predict`.

    Raises:
        ConfigError: A loss, an optimizer, a scheduler, a callback, a step or a device that cannot be used.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossLike = None,
        optimizer: OptimizerLike = "adam",
        *,
        optimizers: Mapping[str, torch.optim.Optimizer] | None = None,
        loss_weights: Mapping[str, float] | float | None = None,
        metrics: Any = None,
        scheduler: SchedulerLike = None,
        schedulers: Mapping[str, SchedulerLike] | None = None,
        scheduler_interval: Literal["step", "epoch"] = "step",
        callbacks: Sequence[Callback] = (),
        ddp_config: DDPConfig | None = None,
        device: str | torch.device = "auto",
        train_step: StepLike = None,
        test_step: StepLike = None,
        predict_step: StepLike = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            what = f"{brief(model)} (a {type(model).__name__})"
            raise ConfigError(f"model must be a torch.nn.Module object, got {what}. Layers are nn.Sequential(*layers).")
        self._wrappers, self.model = unwrap(model)
        self.loss_fn = loss_fn
        self.loss_weights = loss_weights
        loss = Loss(self._loss)
        named = make_optimizers(optimizer, optimizers, trained_with(self.model, loss))
        self.ddp_config = checked_ddp_config(ddp_config)
        self._device = checked_device(device, self.model)
        self.callbacks = checked_callbacks(callbacks)
        self.metrics = metrics_by_name(metrics, output_names(loss_fn))
        require_choice("DistributedTrainer", "scheduler_interval", scheduler_interval, ("step", "epoch"))
        self._scheduler_interval = scheduler_interval
        made = make_schedulers(scheduler, schedulers, named)
        rates = {name: LearningRates(each, made[name]) for name, each in named.items()}
        self._state = TrainingState(self.model, next(_numbers), rates, loss=loss)
        self.stop_evaluating = self.stop_predicting = False
        self._fit: FitLoop | None = None
        self._recomputed: list[nn.Module] = []
        super().__init__(train_step, test_step, predict_step)

    def __repr__(self) -> str:
        world = counted(runtime.current().size, "rank") if runtime.is_initialized() else "not joined yet"
        parts = {
            "model": type(self.model).__name__,
            "loss": name_of_loss(self.loss_fn),
            **{name: type(each).__name__ for name, each in self.optimizers.items()},
            "world": world,
        }
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in parts.items())})"

    if not TYPE_CHECKING:  # a type checker knows the attributes

        def __getattr__(self, name: str) -> Any:
            """Answer a name of another library, which a trainer does not have, by its meaning."""
            require_constructed("_state" in self.__dict__ or name.startswith("__"), self, "DistributedTrainer")
            known = [each for each in (*dir(type(self)), *self.__dict__) if not each.startswith("_")]
            if name.startswith("_") or name in known:
                return object.__getattribute__(self, name)
            if name != "compile":  # Keras's call
                known += [f"config.{name}" for each in fields(self.config) if each.name == name]
            meant = nearest(name, known, "attribute")
            raise AttributeError(f"the trainer has no {name!r}. {meant}", name=name, obj=self)

        def __call__(self, *_: Any, **__: Any) -> NoReturn:
            """Refuse a call of Keras, whose trainer is the model."""
            raise TypeError("the trainer is not the model: call self.model(x), without training=, which fit sets.")

    def __getstate__(self) -> dict[str, Any]:
        return {
            # What belongs to this process alone stays here: hooks, the running fit, the locks of a folder.
            **vars(self),
            "_wrappers": [],
            "_fit": None,
            "_batch_plan": None,
            "_state": replace(self._state, callbacks=Callbacks(), data=dict, claim=contextlib.ExitStack()),
        }

    @property
    def _loss(self) -> Any:
        if self.loss_weights is None:
            return self.loss_fn
        return WeightedLosses(self.loss_fn, self.loss_weights)

    def _arguments(self, world: World) -> TrainerArguments:
        logged = self._logged or LoggedNumbers()
        return TrainerArguments(
            world, self.model, self._loss, self.optimizers, self._device, self.metrics, self._own_steps, logged
        )

    @property
    def trained(self) -> nn.Module:
        """The model and, as one module with it, a loss that has its own parameters or buffers."""
        return self._state.trained

    @property
    def epoch(self) -> int:
        """Number of completed epochs."""
        return self._state.position.epoch

    @property
    def step(self) -> int:
        """Number of steps over all calls of `fit`, skipped ones included."""
        return self._state.position.step

    @property
    def config(self) -> DistributedTrainingConfig:
        """Settings of the latest call of `fit`; `load_checkpoint` restores those of a step, and the batch size."""
        return self._state.config

    def enable_gradient_checkpointing(self, *layers: type[nn.Module] | str) -> None:
        """Recompute activations of layers in backward instead of keeping them: less memory, a third more time.

        The results are bit-identical.

        Args:
            *layers: Their classes or names; none: the layers in the model's Sequentials and ModuleLists.

        Raises:
            ConfigError: The model has no such layers.
        """
        self._recomputed = layers_of(self.model, layers)

    def fit(
        self,
        X: Data | None = None,  # noqa: N803
        y: Data | DistributedTrainingConfig | None = None,
        *more: Data | DistributedTrainingConfig | None,
        X_val: Data | None = None,  # noqa: N803
        y_val: Data | None = None,
        config: DistributedTrainingConfig | None = None,
        validation_data: Data | None = None,
        validation_groups: Any = None,
        sample_weight: Any = None,
        class_weight: Mapping[int, float] | None = None,
        callbacks: Callback | Sequence[Callback] | None = None,
        initial_epoch: int | None = None,
        resume: str | os.PathLike[str] | None = None,
        **settings: Unpack[FitSettings],
    ) -> TrainingHistory:
        """Train: `fit(X, y, config)`, `fit(X, y, X_val, y_val, config)`, `fit(loader, val_loader, config)`.

        Every rank passes the same data and trains on its share. Calling `fit` again continues training.

        Args:
            X: Inputs, one entry per sample, or several by name: arrays, tensors, or tables of numbers; or a Dataset, a
                DataLoader, or an iterable of batches.
            y: Targets, one entry per sample; or validation data if `X` yields batches.
            *more: X_val, y_val and the config, or the config.
            X_val: Inputs to validate with.
            y_val: Targets to validate with.
            config: Settings; keywords take precedence.
            validation_data: (X_val, y_val), (X_val, y_val, sample_weight), or an iterable of batches; or several of
                these by name: metrics are then "val_name_loss" and so on, and "val_loss" is the first one's.
            validation_groups: What each sample belongs to, such as a patient, shape (n,): `validation_split` then
                keeps the samples of a group together, and `seed` draws the groups.
            sample_weight: How much the loss of each sample counts, shape (n,).
            class_weight: How much the samples of each class count, by class index.
            callbacks: For this fit, called after the trainer's own.
            initial_epoch: Number of epochs that count as completed; `epochs` is then the number of the last one.
            resume: "auto" (the newest intact checkpoint, if there is one) or the path of a checkpoint to continue from.
            **settings: Fields of `DistributedTrainingConfig`; and `group_by_length`, to train on samples of similar
                length in each step: True, the lengths, shape (n,), or a function of a sample that returns its length.

        Returns:
            The numbers of each epoch, the same on every rank.

        Raises:
            ConfigError: The input is wrong, on any rank; nothing has started.
            PeerLostError, PeerSilentError: A rank died, or is suspended.
            CollectiveMismatchError, CollectiveTimeoutError: A rank fell out of step.
            CheckpointError: A checkpoint could not be read, or with `on_save_error="raise"`, written.
            NonFiniteError: A loss or a gradient is NaN or infinite, with `on_nonfinite="raise"`, or ten in a row.
            ReplicasDifferError: Ranks hold different parameters.
            DistributedTrainingError: Another rank failed, with its traceback.
        """
        keywords = {
            "X_val": X_val,
            "y_val": y_val,
            "config": config,
            "validation_data": validation_data,
            "validation_groups": validation_groups,
            "sample_weight": sample_weight,
            "class_weight": class_weight,
            "callbacks": callbacks,
            "initial_epoch": initial_epoch,
            "resume": resume,
            **settings,
        }
        history: TrainingHistory | None = delegated(self, "fit", (X, y, *more), keywords)
        if history is not None:
            return history
        with self._state.claim, loader_workers.ignoring_signals(stopping_signals()):  # a killed worker ends its rank
            self._fit_here((X, y, *more), keywords)
        return self._state.history

    def _fit_here(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        plan, ddp, resumption, header_lines = self._plan_fit(arguments, keywords)
        with self._fit_context(plan, ddp) as logged:
            # What is wrong on one rank, such as a warning that is an error there, must not let the others wait.
            with ending_group_on_error(plan.world):
                plan.display.header([*explain(self._state, plan, self.ddp_config), *header_lines])
                self._fit = FitLoop(self._state, plan, ddp, resumption, logged)
            del resumption  # the checkpoint would stay in memory after the fit loop lets go of it
            exit_for(self._fit.fit())

    def _plan_fit(
        self, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[FitPlan, DistributedDataParallel, Resumption | None, list[tuple[str, str]]]:
        """Check `fit`'s arguments on all ranks; return plan, wrapped model, resumption and header lines."""
        world = self._join("fit")
        plan = self._agreed_plan(world, arguments, keywords)
        with ending_group_on_error(world), self._logging():
            numerics = numerics_of(self.model, plan, self.ddp_config)
            plan, resumption, header_lines = start_or_resume(self._state, plan, numerics)
            if plan.config.sync_batchnorm:
                nn.SyncBatchNorm.convert_sync_batchnorm(self.model)
            return plan, self._wrapped(plan), resumption, header_lines

    def _wrapped(self, plan: FitPlan) -> DistributedDataParallel:
        """Return the model, or a user's own step, so that backward averages gradients."""
        trained = trained_with(self.model, self._state.loss, plan.data.call.step)
        return DistributedDataParallel(trained, self.ddp_config)

    def _agreed_plan(
        self, world: World, arguments: tuple[Any, ...], keywords: dict[str, Any], *, has_all_rows: bool = True
    ) -> FitPlan:
        """Return the plan of a fit; `has_all_rows`: whether it will train on no other samples. All ranks call it."""
        parsed, sources = open_fit(world, lambda: self._parse_arguments(arguments, keywords), self._loss, self.epoch)
        sources[0].is_whole &= has_all_rows
        plan, facts_by_rank = agree_on(world, lambda: self._plan(world, parsed, sources))
        plan = plan.merged_with(facts_by_rank)
        with ending_group_on_error(world):
            warn_of_data(facts_by_rank)  # with `python -W error` on one rank, the others must not wait for it
        return plan

    def _join(self, call: str) -> World:
        """Join the world, check that all ranks make the same call, outside a fit, and return that world."""
        if self._fit is not None:
            raise ConfigError(f"{call} was called within fit, by a callback: call it when the fit has ended.")
        return self._world_of(call, works_alone=False)

    @contextlib.contextmanager
    def _fit_context(self, plan: FitPlan, ddp: DistributedDataParallel) -> Iterator[LoggedNumbers]:
        """Set modes, precision and kernels for a fit, and restore them; yield the numbers that it logs."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(modes_kept(self.model, *plan.data.loss.modules))
            stack.enter_context(torch.enable_grad())
            logged = stack.enter_context(self._logging())
            stack.enter_context(float32_products(plan.config.float32_precision))
            for name in plan.fused_optimizers:
                stack.enter_context(fused(self.optimizers[name]))
            stack.enter_context(recomputed(self._recomputed))
            stack.enter_context(compiled(self.model, plan.config, by_layer=plan.compiles_layers))
            for wrapper in self._wrappers:
                stack.enter_context(wrapper.suspended())
            try:
                yield logged
            finally:
                self._fit = None
                for rates in self._state.rates.values():
                    rates.note_rates()
                plan.display.close()
                ddp.close()
                self._state.trained.zero_grad()  # between two fits, nobody needs their memory

    def evaluate(
        self,
        X: Data,  # noqa: N803
        y: Data | None = None,
        *,
        batch_size: int | None = None,
        distributed: bool = True,
        sample_weight: Any = None,
        callbacks: Callback | Sequence[Callback] | None = None,
        steps: int | None = None,
        verbose: Verbosity = 0,
        return_dict: bool = False,
    ) -> Evaluation | Any:
        """Return loss and accuracy over all samples, each counted once; the same on any number of ranks.

        Args:
            X: Inputs, shape (n, ...).
            y: Targets, shape (n, ...).
            batch_size: Samples at once; None: as in the last fit, also that of a loaded checkpoint.
            distributed: Share the work with the other ranks, which must call it too; if they wait in another call,
                rank 0 does it alone. False: this rank alone.
            sample_weight: How much the loss of each sample counts, shape (n,); None: equally.
            callbacks: For this call, without the trainer's own; with `num_processes`, it then runs here alone.
            steps: Number of batches over all ranks: the first ones. None: all.
            verbose: 1 or "auto" shows a progress bar on rank 0 and then one line, 2 only the line, 0 nothing.
            return_dict: Return a dictionary with each metric by name.

        Raises:
            ConfigError: The input is wrong: two samples of it are tried first.
            CollectiveMismatchError: Ranks make different calls.
        """
        options: dict[str, Any] = {"distributed": distributed, "steps": steps, "verbose": verbose}
        given = {"batch_size": batch_size, "sample_weight": sample_weight, **options}
        evaluation: Evaluation | None = None
        # Callbacks are called in this process, and with them this process does the work.
        if not callbacks:
            evaluation = delegated(self, "evaluate", (X, y), given)
        if evaluation is None:
            call = self._call("evaluate", (X, y, sample_weight), batch_size, callbacks=callbacks, **options)
            with self._logging() as logged:
                evaluation = evaluate(call, logged)
        return evaluation.to_dict() if return_dict else evaluation

    def predict(
        self,
        X: Data,  # noqa: N803
        *,
        batch_size: int | None = None,
        distributed: bool = True,
        output_dir: str | os.PathLike[str] | None = None,
        pad_value: float | None = None,
        callbacks: Callback | Sequence[Callback] | None = None,
        steps: int | None = None,
        verbose: Verbosity = 0,
    ) -> Any:
        """Return the model's output for all samples, in their order, on every rank.

        Args:
            X: Inputs, shape (n, ...).
            batch_size: Samples at once; None: as in the last fit.
            distributed: As in `evaluate`.
            output_dir: A folder or URL that all ranks see: each rank writes the rows that it predicts there by shards,
                and the result is what `cyxtrain.open_predictions` returns. If it was killed, the same call continues.
            pad_value: If rows differ in shape between batches, as with padding to the longest of a batch, pad them at
                their ends with this number and return one tensor. None: return a list of rows.
            callbacks: As in `evaluate`.
            steps: As in `evaluate`: the outputs of the first batches are returned.
            verbose: As in `evaluate`.

        Returns:
            Shape (n, ...), a NumPy array if X is one or a table, otherwise a tensor on the CPU; of several outputs, one
            for each, in a dictionary, dataclass, tuple or list as the model returns it (a dictionary if the dataclass
            cannot be made of them). None stays None. Without a loss_fn, the "loss" that the model returns is left out.

        Raises:
            ConfigError: The input is wrong (two samples are tried first), the model does not return tensors with one
                row per sample, or its forward requires the targets, which are not passed.
            CollectiveMismatchError: Ranks make different calls.
        """
        options: dict[str, Any] = {"distributed": distributed, "steps": steps, "verbose": verbose}
        options |= {"pad_value": pad_value, "output_dir": output_dir}
        given = {"batch_size": batch_size, **options}
        if not callbacks:
            output = delegated(self, "predict", (X,), given)
            if output is not None:
                return output
        call = self._call("predict", (X,), batch_size, callbacks=callbacks, predicting=True, **options)
        with self._logging():
            if output_dir is None:
                return predict(call, pad_value)
            return predict_to_folder(call, output_dir, pad_value)

    def _call(
        self, name: str, data: tuple[Any, ...], batch_size: int | None, *, distributed: bool, **options: Any
    ) -> Call:
        """Return a call of `evaluate` or `predict`; `distributed`: asked for. `options`: of `check_rows`."""
        world = self._world_of(name, works_alone=True, distributed=distributed)
        rows = self._rows(world, data, batch_size, **options)
        return Call(name, self, world, rows, options["callbacks"], options["verbose"])

    def _rows(self, world: World, data: tuple[Any, ...], batch_size: int | None, **options: Any) -> CheckedData:
        """Return checked rows, agreed over the ranks that share the work; `options`: of `check_rows`."""
        source = open_rows(world, data, batch_size, self.config, self._state.columns)
        with self._logging():
            check = partial(check_rows, source, batch_size, self.config, self._arguments(world), **options)
            rows, facts_by_rank = agree_on(world, check)
            rows.loss.join_names([facts["_shown"] for facts in facts_by_rank])
            return rows

    def summary(self, X: Any = None, *, depth: int | None = None) -> str:  # noqa: N803
        """Print the model's layers and their numbers of parameters, on rank 0; return them as a string.

        Args:
            X: Inputs. Two samples are tried, to show the shapes of outputs, such as (2, 10). None: no shapes.
            depth: How many levels of layers within layers to show, from 1; 0: the model alone; None: all.

        Raises:
            ConfigError: The model cannot take the inputs, or depth is not a whole number.
        """
        if depth is not None:
            require_integer("summary", "depth", depth, 0)
        world = runtime.join_if_nobody_has()
        with contextlib.closing(OutputShapes(self.model)) as outputs:
            if X is not None:
                self._rows(world.alone(), (X,), None, predicting=True)
        text = summary_of(self.model, outputs.shapes, depth)
        if world.is_first:
            show(text)
        return text

    def save_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Save model, optimizer, position and history in one file. All ranks or only rank 0 may call it.

        Args:
            path: The file to write, on rank 0; other ranks' values are ignored.

        Raises:
            CheckpointError: It could not be written; the previous file, if any, is intact.
            CollectiveMismatchError: Ranks make different calls.
        """
        world = self._world_of("save_checkpoint", works_alone=True)
        if self._fit is not None and not world.sends_nothing:
            # A callback calls this.
            self._fit.prepare_to_save()
        on_first(world, lambda: write_checkpoint(path, self._to_checkpoint()))

    def _to_checkpoint(self) -> CheckpointState:
        if self._fit is not None:
            return self._fit.to_checkpoint()
        return self._state.to_checkpoint(runtime.current())

    def load_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Load a checkpoint. All ranks call it; rank 0 reads, the others receive.

        Args:
            path: The file to read, on rank 0; other ranks' values are ignored.

        Raises:
            CheckpointError: It does not exist, is corrupt, or belongs to another model, optimizer or scheduler.
            ConfigError: A callback calls it.
        """
        self._take_settings(self._state.load_file(self._join("load_checkpoint"), path), f"checkpoint {path}")

    def _world_of(self, call: str, *, works_alone: bool, distributed: bool = True) -> World:
        """Join the world, and check that all ranks make the same call; return them, or this rank alone."""
        if distributed and self._fit is None:
            world = runtime.join_for_all(works_alone=works_alone)
        else:
            world = runtime.join_if_nobody_has()
        try:
            # Rank 0 works alone if the others wait in another call: `if trainer.is_master(): trainer.evaluate()`.
            together = distributed and world.check_same_call(call, works_alone=works_alone)
        except CollectiveMismatchError as error:
            if self._fit is None:
                raise
            raise CollectiveMismatchError(
                f"{call} was called by a callback on some ranks only, while the others continue fit: in a callback all "
                "ranks call it (rank 0 writes), or rank 0 evaluates and predicts with distributed=False.",
                rank=error.rank,
                during=error.during,
            ) from error
        if together and self._fit is not None:
            self._fit.prepare_to_evaluate()
        return world if together else world.alone()

    def is_master(self) -> bool:
        """Return whether this is rank 0; join the world if this process has not."""
        return runtime.join_if_nobody_has().is_first

    def get_rank(self) -> int:
        """Return this rank; join the world if this process has not."""
        return runtime.join_if_nobody_has().rank

    def get_world_size(self) -> int:
        """Return the number of ranks; join the world if this process has not."""
        return runtime.join_if_nobody_has().size

    def _parse_arguments(self, data: tuple[Any, ...], keywords: dict[str, Any]) -> FitArguments:
        """Return a fit's arguments; the schedule's interval is the trainer's unless the config sets it."""
        arguments = parse_fit(*data, **keywords)
        interval = arguments.config.scheduler_interval or self._scheduler_interval
        return replace(arguments, config=replace(arguments.config, scheduler_interval=interval))

    def _plan(self, world: World, arguments: FitArguments, sources: Sources) -> tuple[FitPlan, dict[str, Any]]:
        """Return this rank's plan, and what must be the same on every rank."""
        check_names(type(self), self.model, self._own_steps)
        arguments.callbacks = [*checked_callbacks(self.callbacks), *arguments.callbacks]
        first = self.epoch if arguments.initial_epoch is None else arguments.initial_epoch
        with recomputed(self._recomputed), self._logging():
            own = self._arguments(world)
            check_settings(arguments.config, own, self.ddp_config)
            plan, facts = plan_fit(arguments, own, sources, first)
        for name, rates in self._state.rates.items():
            facts |= scheduler_facts(check_rates(rates, plan.config, plan.length.scheduled(rates)), name)
        plan.callbacks.set_trainer(self, plan.params(first + plan.length.epochs))
        must_match = {f"ddp_config.{name}": value for name, value in asdict(self.ddp_config).items()}
        if not self.ddp_config.broadcast_parameters:
            # Rank 0's values are not sent then, so the ranks' own values must already be equal.
            must_match |= value_facts(self._state.trained)
        return plan, {**facts, **must_match, "the number of epochs trained before": self.epoch}
