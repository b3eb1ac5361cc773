"""What `virtual_ranks` excludes: refused before the first step, alike on every rank."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from cyxtrain.config import DDPConfig
from cyxtrain.config.settings import require
from cyxtrain.environment.accelerator import is_accelerator
from cyxtrain.errors import ConfigError, counted, shortened
from cyxtrain.optim.optimizers import needs_closure
from cyxtrain.parallel.sparse_gradients import makes_sparse_gradients
from cyxtrain.training.inputs.checked_data import TrainerArguments
from cyxtrain.training.inputs.plan import FitPlan
from cyxtrain.training.inputs.slice_orders import difference_by_order
from cyxtrain.training.model.own_steps import SLICES_EXCLUDE_UPDATES

_TIMED_COMPILE = ("max-autotune", "max-autotune-no-cudagraphs")


def check_virtual_ranks(plan: FitPlan, trainer: TrainerArguments, ddp_config: DDPConfig, epoch: int) -> None:
    """Refuse what would not give the same bits on any number of ranks; `epoch`: where the fit is likely to begin.

    Cost: as `difference_by_order`.

    Raises:
        ConfigError: There are more ranks than virtual ranks, or the model, its data or a setting excludes them.
    """
    count = plan.config.virtual_ranks
    if count is None:
        return
    ranks = plan.world.size
    require(
        ranks <= count,
        f"virtual_ranks={count}, and there are {counted(ranks, 'rank')}: some would have nothing to compute. Start at "
        f"most {count}, or set virtual_ranks={ranks} or more, which trains with other numbers.",
    )
    problem = next(_problems(plan, trainer, ddp_config, epoch), None)
    if problem is not None:
        raise ConfigError(
            f"virtual_ranks={count} gives the same bits on any number of ranks, and {problem}; or leave virtual_ranks "
            "out."
        )


def _problems(plan: FitPlan, trainer: TrainerArguments, ddp_config: DDPConfig, epoch: int) -> Iterator[str]:
    """Yield why virtual ranks are excluded, with a remedy."""
    yield from _problems_of_settings(plan, ddp_config)
    yield from _problems_of_steps(plan, trainer)
    difference = difference_by_order(plan, trainer, epoch)
    if difference:
        yield (
            f"{difference}: something is kept from call to call, such as in an attribute that forward changes or in a "
            "generator of the model's own, or a kernel adds in any order. Begin anew in each forward; or keep it in a "
            "buffer (register_buffer), which each slice of a step finds alike"
        )


def _problems_of_settings(plan: FitPlan, ddp_config: DDPConfig) -> Iterator[str]:
    config = plan.config
    if config.sharded_data or plan.feed.has_own_data:
        yield "each rank has its own data: give all ranks the same, or a function of readers"
    if ddp_config.compression is not None:
        yield f"compression={ddp_config.compression!r} rounds what each rank sends: leave it out of the ddp_config"
    if config.compile in _TIMED_COMPILE:
        yield f"compile={config.compile!r} chooses kernels by their time: use compile=True"
    if is_accelerator(plan.data.placement.device) and not torch.are_deterministic_algorithms_enabled():
        yield "kernels of an accelerator may add in any order: call torch.use_deterministic_algorithms(True) first"


def _problems_of_steps(plan: FitPlan, trainer: TrainerArguments) -> Iterator[str]:
    if plan.config.sync_batchnorm or any(isinstance(each, nn.SyncBatchNorm) for each in trainer.model.modules()):
        yield "SyncBatchNorm needs all samples of a step at once: use BatchNorm, without sync_batchnorm=True"
    if plan.data.loss.gathers:
        yield "all_gather_with_grad needs all samples of a step at once: use a loss without it"
    if len(trainer.optimizers) > 1:
        yield f"{len(trainer.optimizers)} optimizers may step at different times: use one for all parameters"
    if plan.data.call.optimizes:
        yield SLICES_EXCLUDE_UPDATES
    names = [name for name, each in trainer.optimizers.items() if needs_closure(each)]
    if names:
        kind = type(trainer.optimizers[names[0]]).__name__
        yield f"{kind} evaluates the loss several times per step: use an optimizer with one gradient per step"
    sparse = makes_sparse_gradients(trainer.model)
    if sparse:
        yield f"{shortened(sparse)} has sparse gradients: build the embedding with sparse=False"
