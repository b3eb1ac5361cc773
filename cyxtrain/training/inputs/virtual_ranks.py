"""What `virtual_ranks` excludes: refused before the first step, alike on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from cyxtrain.config import DDPConfig, DistributedTrainingConfig
from cyxtrain.config.settings import require
from cyxtrain.data.feed import Feed
from cyxtrain.environment import torch_compat
from cyxtrain.environment.accelerator import is_accelerator
from cyxtrain.errors import ConfigError, counted, shortened
from cyxtrain.optim.optimizers import needs_closure
from cyxtrain.parallel.sparse_gradients import makes_sparse_gradients
from cyxtrain.training.inputs.checked_data import CheckedData, TrainerArguments
from cyxtrain.training.inputs.training_data import raised_on_all_ranks
from cyxtrain.training.model.own_steps import SLICES_EXCLUDE_UPDATES
from cyxtrain.world.consensus import differing_types

_TIMED_COMPILE = ("max-autotune", "max-autotune-no-cudagraphs")


def check_settings(config: DistributedTrainingConfig, trainer: TrainerArguments, ddp_config: DDPConfig) -> None:
    """Refuse settings that would not give the same bits on any number of ranks, and more ranks than virtual ranks.

    Raises:
        ConfigError: With the setting and a remedy.
    """
    count = config.virtual_ranks
    if count is None:
        return
    ranks = trainer.world.size
    require(
        ranks <= count,
        f"virtual_ranks={count}, and there are {counted(ranks, 'rank')}: some would have nothing to compute. Start at "
        f"most {count}, or set virtual_ranks={ranks} or more, which trains with other numbers.",
    )
    refuse_first(count, _problems_of_settings(config, trainer, ddp_config))


def check_data_and_step(config: DistributedTrainingConfig, data: CheckedData, feed: Feed) -> None:
    """Refuse data, a step or a device, known after the dry run, that would not give the same bits; and too few rows.

    Raises:
        ConfigError: With the cause and a remedy.
    """
    count = config.virtual_ranks
    if count is None:
        return
    refuse_first(count, _problems_of_data(data, feed))
    rows = feed.rows_of(feed.steps_per_epoch)
    if rows is not None and count > rows:
        raise ConfigError(
            f"virtual_ranks={count:,}, and an epoch has {counted(rows, 'sample')}: some slices would never have one. "
            f"Set at most {rows:,}."
        )


def check_ranks(count: int, by_rank: Sequence[Mapping[str, str]]) -> None:
    """Refuse ranks that compute with different processors, libraries or settings; every rank raises.

    Args:
        count: The number of virtual ranks.
        by_rank: What `arithmetic_of_rank` returned on each rank.

    Raises:
        ConfigError: With what each rank has, and a remedy.
    """
    with raised_on_all_ranks():
        refuse_first(count, _problems_of_ranks(by_rank))


def refuse_first(count: int, problems: Iterator[str]) -> None:
    """Raise ConfigError for the first of the problems of a fit with so many virtual ranks, if there is one."""
    problem = next(problems, None)
    if problem is not None:
        raise ConfigError(
            f"virtual_ranks={count} gives the same bits on any number of ranks, and {problem}; or leave virtual_ranks "
            "out."
        )


def _problems_of_settings(
    config: DistributedTrainingConfig, trainer: TrainerArguments, ddp_config: DDPConfig
) -> Iterator[str]:
    """Yield why settings exclude virtual ranks, with a remedy."""
    if config.sharded_data:
        yield "sharded_data=True gives each rank its own data: give all ranks the same, or a function of readers"
    if ddp_config.compression is not None:
        yield f"compression={ddp_config.compression!r} rounds what each rank sends: leave it out of the ddp_config"
    if config.sync_batchnorm or any(isinstance(each, nn.SyncBatchNorm) for each in trainer.model.modules()):
        yield "SyncBatchNorm needs all samples of a step at once: use BatchNorm, without sync_batchnorm=True"
    if config.compile in _TIMED_COMPILE:
        yield f"compile={config.compile!r} chooses kernels by their time: use compile=True"
    if _has_compiled_parts(trainer.model):
        yield "a compiled model may choose kernels by the shapes before: give it as it is, with compile=True"
    if len(trainer.optimizers) > 1:
        yield "several optimizers update in turns, which is not divided into slices: use one"
    for optimizer in trainer.optimizers.values():
        if needs_closure(optimizer):
            kind = type(optimizer).__name__
            yield f"{kind} evaluates the loss several times per step: use an optimizer with one gradient per step"
    sparse = makes_sparse_gradients(trainer.model)
    if sparse:
        yield f"{shortened(sparse)} has sparse gradients: build the embedding with sparse=False"


def _problems_of_data(data: CheckedData, feed: Feed) -> Iterator[str]:
    """Yield why data, a step or a device exclude virtual ranks, with a remedy."""
    if feed.has_own_data:
        yield "each rank has its own data: give all ranks the same batches, or a function of readers"
    if data.loss.gathers:
        yield "all_gather_with_grad needs all samples of a step at once: use a loss without it"
    if data.call.optimizes:
        yield SLICES_EXCLUDE_UPDATES
    if is_accelerator(data.placement.device):
        if not torch.are_deterministic_algorithms_enabled():
            yield "kernels of an accelerator may add in any order: call torch.use_deterministic_algorithms(True) first"
        if torch.backends.cudnn.benchmark:
            yield "cuDNN chooses kernels by their time: set torch.backends.cudnn.benchmark = False"


def _has_compiled_parts(model: nn.Module) -> bool:
    """Return whether the user has compiled a model or parts of it, by torch.compile(part) or part.compile()."""
    named = [*model.named_modules()]
    return any("_orig_mod" in name or torch_compat.compiled_call(part) is not None for name, part in named)


def _problems_of_ranks(by_rank: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """Yield in what ranks differ, with a remedy."""
    for name in by_rank[0]:
        different = differing_types([found[name] for found in by_rank])
        if different:
            yield (
                f"ranks differ in {name} ({different}): start all on one kind of machine, with the same libraries, "
                "variables and settings"
            )
