"""Micro-batches of a single row, which batch norm cannot be trained on: found before the first step."""

from __future__ import annotations

import torch
from torch import nn

from cyxtrain import runtime, torch_compat
from cyxtrain.data.batches import Batch
from cyxtrain.errors import ConfigError, counted
from cyxtrain.training.dry_run import ONE_VALUE
from cyxtrain.training.modes import put_into_training
from cyxtrain.training.plan import Run, TriedRows
from cyxtrain.training.untouched import untouched


def check_single_rows(model: nn.Module, run: Run) -> None:
    """Refuse a model with batch norm where a rank would train it on a single row, such as that of the last step.

    Whether its batch norm can take one is asked of the model: images have many values per channel. All ranks come to
    the same answer, which depends on nothing but the numbers of rows, ranks and micro-batches.

    Args:
        model: Not wrapped.
        run: What is asked for.

    Raises:
        ConfigError: With the counts and what can be done.
    """
    feed, source = run.feed, run.data.source
    single = feed.single_row()
    if single is None or run.config.sync_batchnorm or not _fails_on_one_row(model, run.data):
        return
    rows = counted(single.joined_rows, "row")
    if single.joined_rows == 0:
        what, remedy = "the DataLoader's batch_sampler makes a batch of a single row", "Let it leave that out"
    elif single.is_tail:
        full = f"full ones have {feed.effective_batch_size:,}"
        what = f"the last step of an epoch has {rows} of {source.describe()} ({full})"
        remedy = "Set drop_last=True, or another batch_size"
    else:
        what, remedy = f"a step has {rows}", "Set a larger batch_size"
    where = (
        f"{counted(runtime.get_world_size(), 'rank')} with micro-batches of up to {counted(feed.rows_at_once, 'row')}"
    )
    raise ConfigError(
        f"{what}, so on {where} one is a single row: batch norm cannot be trained on one value per channel. {remedy}; "
        "or use nn.GroupNorm instead."
    )


def _fails_on_one_row(model: nn.Module, data: TriedRows) -> bool:
    norms = [module for module in model.modules() if isinstance(module, torch_compat.BatchNormModule)]
    if not norms or any(isinstance(module, nn.SyncBatchNorm) for module in norms):
        return False
    with untouched([model], data.placement.device, copies=True), torch.no_grad():
        put_into_training(model)
        try:
            data.call(model, Batch(0, *data.placement.place(data.source.first(1))))
        except ValueError as error:
            return ONE_VALUE in str(error)
        except Exception:
            return False  # what else is wrong shows in the dry run
    return False
