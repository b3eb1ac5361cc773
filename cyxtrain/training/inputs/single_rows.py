"""Micro-batches of a single sample, or none: refused before the first step if batch norm trains."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from cyxtrain.data.sharding import UnevenStep
from cyxtrain.environment import torch_compat
from cyxtrain.errors import ConfigError, counted
from cyxtrain.training.inputs.checked_data import EmptyBatch
from cyxtrain.training.inputs.plan import FitPlan


def with_batch_norm_checked(model: nn.Module, plan: FitPlan) -> FitPlan:
    """Return the plan, once each rank's samples are known; refuse samples that batch norm cannot train on."""
    _check_single_rows(model, plan)
    without_rows = _empty_batch(model, plan)
    data = replace(plan.data, without_rows=without_rows, num_micro_batches=plan.feed.micro_batches)
    return replace(plan, data=data)


def _check_single_rows(model: nn.Module, plan: FitPlan) -> None:
    """Refuse a model with batch norm if a micro-batch, often one of the last step, is a single sample.

    The dry run finds whether that matters: images have many values per channel. The answer depends only on the numbers
    of samples, ranks and micro-batches, so it is the same on all ranks. SyncBatchNorm computes over all ranks.
    """
    feed = plan.feed
    norms = [module for module in model.modules() if isinstance(module, torch_compat.BatchNormModule)]
    if not norms or not plan.data.tried.has_one_value_per_row:
        return
    together = plan.world.size > 1 and len(_layers_together(model, converts=plan.config.sync_batchnorm)) == len(norms)
    single = feed.single_row(together=together)
    if single is None:
        return
    rows = counted(single.global_rows, "sample")
    where, size, instead = _parts_of_steps(plan)
    what = f"a step has {rows}"
    remedy = f"Set a larger {size}{instead}"
    if single.global_rows == 0:
        what = "the DataLoader's batch_sampler makes a batch of a single sample"
        remedy = "Let it leave that out"
    elif single.is_tail:
        full = f"full ones have {feed.effective_batch_size:,}"
        what = f"the last step of an epoch has {rows} of {plan.data.source.describe()} ({full})"
        remedy = f"Set drop_last=True, or another {size}"
    one = "all ranks together have a single sample in one" if together else "one is a single sample"
    raise ConfigError(
        f"{what}, so {where} {one}: batch norm cannot be trained on one value per channel. {remedy}; "
        "or use nn.GroupNorm instead."
    )


def _parts_of_steps(plan: FitPlan) -> tuple[str, str, str]:
    """Return where the samples of a step are, the setting of their number, and what may be changed instead of it."""
    at_once = counted(plan.feed.rows_at_once, "sample")
    size = "batch_size"
    if plan.config.effective_batch_size is not None:
        size = "effective_batch_size"
    if not plan.slices.is_virtual:
        return f"on {counted(plan.world.size, 'rank')} with micro-batches of up to {at_once}", size, ""
    slices = f"in {counted(plan.slices.count, 'slice')} (virtual_ranks) with up to {at_once} at once"
    return slices, size, ", or fewer virtual_ranks"


def _empty_batch(model: nn.Module, plan: FitPlan) -> EmptyBatch | None:
    """Return what a rank that runs out of samples computes, or None; refuse a model that cannot."""
    layers = _layers_together(model, converts=plan.config.sync_batchnorm)
    if not layers or plan.world.size == 1:
        return None
    uneven = plan.feed.uneven_step()
    if uneven is None:
        return None
    data = plan.data
    problem = "a train_step that calls optimize does not run without samples."
    if data.source.no_rows is not None:
        problem = "batches of any form cannot be cut to no samples."
    elif not data.call.optimizes:
        batch = EmptyBatch(data.source, data.placement, data.call, data.loss)
        problem = batch.problem(model, layers)
        if not problem:
            return batch
        problem = f"the model cannot compute without samples: {problem}"
    what = _describe_uneven(uneven, data.source.describe())
    raise ConfigError(f"SyncBatchNorm needs all ranks in each forward, {what}, and {problem}")


def _describe_uneven(step: UnevenStep, data: str) -> str:
    """Describe a step in which ranks have different numbers of micro-batches, with a remedy."""
    if not step.counts:
        return "ranks may be given different numbers of micro-batches (drop_last=True leaves out a tail)"
    rows = counted(step.global_rows, "sample")
    which = f"a step has {rows}"
    remedy = "set another batch_size or accumulation_steps"
    if step.is_tail:
        which = f"the last step of an epoch has {rows} of {data}"
        remedy = "set drop_last=True, or another batch_size"
    return f"{which}, which are {', '.join(map(str, step.counts))} micro-batches by rank ({remedy})"


def _layers_together(model: nn.Module, *, converts: bool) -> list[nn.Module]:
    """Return the layers that compute over all ranks; `converts`: batch norms will become such."""
    kind = torch_compat.BatchNormModule if converts else nn.SyncBatchNorm
    return [module for module in model.modules() if isinstance(module, kind)]
