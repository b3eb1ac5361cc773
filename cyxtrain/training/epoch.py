"""What training, evaluation and prediction share: a step with each batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import nn

from cyxtrain.data.batches.batch import Batch
from cyxtrain.training.inputs.plan import CheckedData
from cyxtrain.training.model.compile import steps_marked
from cyxtrain.training.model.modes import modes_kept
from cyxtrain.training.model.out_of_memory import memory_explained
from cyxtrain.world import runtime
from cyxtrain.world.agreement import raise_together

_Batch = TypeVar("_Batch")


def run_epoch(
    batches: Iterable[_Batch],
    step: Callable[[_Batch], object],
    device: torch.device,
    give_up: Callable[[], bool] = lambda: False,
) -> bool:
    """Takes a step with each batch, in training and in evaluation alike; returns whether it took them all.

    Args:
        batches: Of this rank; in training, its shares of them.
        step: What is done with each.
        device: That computes.
        give_up: Asked after each whether to leave the others.
    """
    with steps_marked(device) as mark:
        for batch in batches:
            if mark is not None:
                mark()
            step(batch)
            if give_up():
                return False
    return True


def run_whole_batches(
    model: nn.Module,
    rows: CheckedData,
    step: Callable[[Batch], object],
    *,
    distributed: bool,
    give_up: Callable[[], bool] = lambda: False,
) -> bool:
    """Takes a step with each of this rank's batches, in evaluation mode; a rank that fails tells the others.

    Args:
        model: Not wrapped.
        rows: All of them.
        step: What is done with each batch.
        distributed: Whether the ranks share the work; else this one does it all.
        give_up: As `run_epoch`.

    Returns:
        Whether it took them all.
    """
    rank, world_size = (runtime.get_rank(), runtime.get_world_size()) if distributed else (0, 1)
    problem, complete = None, False
    try:
        with memory_explained(trains=False), modes_kept(model, *rows.loss.modules):
            for module in (model, *rows.loss.modules):
                module.eval()
            batches = rows.source.whole_batches(rows.batch_size, rows.placement, rank, world_size)
            complete = run_epoch(batches, step, rows.placement.device, give_up)
    except Exception as error:
        problem = error
    if distributed:
        raise_together(problem)
    elif problem is not None:
        raise problem
    return complete
