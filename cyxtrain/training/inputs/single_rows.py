"""Micro-batches of a single row, or none, on which batch norm cannot be trained: found before the first step."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from cyxtrain.environment import torch_compat
from cyxtrain.errors import ConfigError, counted
from cyxtrain.training.inputs.checked_data import EmptyBatch
from cyxtrain.training.inputs.plan import FitPlan


def with_batch_norm_checked(model: nn.Module, plan: FitPlan) -> FitPlan:
    """Return the plan when each rank's rows of a step are known; refuse rows that batch norm cannot train on."""
    _check_single_rows(model, plan)
    part = _part_without_rows(model, plan)
    return replace(plan, data=replace(plan.data, without_rows=part, num_micro_batches=plan.feed.micro_batches))


def _check_single_rows(model: nn.Module, plan: FitPlan) -> None:
    """Refuse a model with batch norm that would be trained on a single row, such as that of the last step.

    The dry run tells whether its batch norm can: images have many values per channel. The answer depends only on the
    numbers of rows, ranks and micro-batches, so all ranks have the same. For SyncBatchNorm the rows of all ranks count
    together.
    """
    feed, source, ranks = plan.feed, plan.data.source, plan.world.size
    norms = [module for module in model.modules() if isinstance(module, torch_compat.BatchNormModule)]
    together = ranks > 1 and len(_layers_together(model, converts=plan.config.sync_batchnorm)) == len(norms)
    single = feed.single_row(together=together) if norms else None
    if single is None or not plan.data.tried.has_one_value_per_row:
        return
    rows = counted(single.global_rows, "row")
    if single.global_rows == 0:
        what, remedy = "the DataLoader's batch_sampler makes a batch of a single row", "Let it leave that out"
    elif single.is_tail:
        full = f"full ones have {feed.effective_batch_size:,}"
        what = f"the last step of an epoch has {rows} of {source.describe()} ({full})"
        remedy = "Set drop_last=True, or another batch_size"
    else:
        what, remedy = f"a step has {rows}", "Set a larger batch_size"
    where = f"{counted(ranks, 'rank')} with micro-batches of up to {counted(feed.rows_at_once, 'row')}"
    one = "all ranks together have a single row in one" if together else "one is a single row"
    raise ConfigError(
        f"{what}, so on {where} {one}: batch norm cannot be trained on one value per channel. {remedy}; "
        "or use nn.GroupNorm instead."
    )


def _part_without_rows(model: nn.Module, plan: FitPlan) -> EmptyBatch | None:
    """Return what a rank that runs out of rows computes; None: nothing. Raise ConfigError if the model cannot."""
    layers = _layers_together(model, converts=plan.config.sync_batchnorm)
    uneven = plan.feed.uneven_step() if layers and plan.world.size > 1 else None
    if uneven is None:
        return None
    data = plan.data
    problem = "a train_step that calls optimize does not run on no rows."
    if data.source.no_rows is not None:
        problem = "batches of any form cannot be cut to no rows."
    elif not data.call.optimizes:
        part = EmptyBatch(data.source, data.placement, data.call, data.loss)
        problem = part.problem(model, layers)
        if not problem:
            return part
        problem = f"the model cannot compute on no rows: {problem}"
    rows, counts = counted(uneven.global_rows, "row"), ", ".join(map(str, uneven.counts))
    which, remedy = f"a step has {rows}", "set another batch_size or accumulation_steps"
    if uneven.is_tail:
        which = f"the last step of an epoch has {rows} of {data.source.describe()}"
        remedy = "set drop_last=True, or another batch_size"
    what = f"{which}, which are {counts} micro-batches by rank ({remedy})"
    if not uneven.counts:
        what = "ranks may be given different numbers of micro-batches (drop_last=True leaves out a tail)"
    raise ConfigError(f"SyncBatchNorm needs all ranks in each forward, {what}, and {problem}")


def _layers_together(model: nn.Module, *, converts: bool) -> list[nn.Module]:
    """Return the layers that ranks compute together; `converts`: all batch norms will become such."""
    kind = torch_compat.BatchNormModule if converts else nn.SyncBatchNorm
    return [module for module in model.modules() if isinstance(module, kind)]
