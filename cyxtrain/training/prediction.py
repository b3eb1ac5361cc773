"""A model's outputs for all rows, put together in their order."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cyxtrain import runtime
from cyxtrain.errors import ConfigError
from cyxtrain.training.epoch import run_whole_batches
from cyxtrain.training.plan import Rows
from cyxtrain.training.step import PredictionStep


def predict_rows(model: nn.Module, rows: Rows, *, distributed: bool) -> Any:
    """Returns a model's output for all rows, in their order, on every rank: NumPy arrays where X is of such.

    Args:
        model: Not wrapped.
        rows: All of them.
        distributed: Whether the ranks share the work; else this one does it all.

    Raises:
        ConfigError: The model does not return one tensor with a row per row.
    """
    step = PredictionStep(model, rows.call)
    run_whole_batches(model, rows, step, distributed=distributed)
    output = _gathered(rows, step) if distributed else torch.cat(step.outputs)
    if not rows.source.is_numpy:
        return output
    return (output.float() if output.dtype is torch.bfloat16 else output).numpy()  # NumPy has no bfloat16


def _gathered(rows: Rows, step: PredictionStep) -> Tensor:
    gathered, batches = gather_rows(step.outputs)
    order = rows.source.in_order(batches)
    return gathered if order is None else torch.empty_like(gathered).index_copy_(0, order, gathered)


def gather_rows(outputs: Sequence[Tensor]) -> tuple[Tensor, list[list[int]]]:
    """Returns the outputs of all ranks, on every rank, in their order; and how many rows each batch had, by rank.

    Cost: the rows once in and once out of each rank.

    Args:
        outputs: This rank's, batch by batch.

    Raises:
        ConfigError: They do not have the same shape and dtype on every rank.
    """
    own = torch.cat(list(outputs)) if outputs else None
    kind = None if own is None else [str(own.dtype).removeprefix("torch."), list(own.shape[1:])]
    text = json.dumps({"kind": kind, "batches": [len(output) for output in outputs]})
    found = [json.loads(other) for other in runtime.gather_texts(text)]
    batches: list[list[int]] = [other["batches"] for other in found]
    kinds = [other["kind"] for other in found if other["kind"] is not None]  # without a batch it has seen nothing
    if any(other != kinds[0] for other in kinds):
        raise ConfigError(f"predict needs rows of one kind; the model's outputs differ between ranks: {kinds}.")
    dtype, shape = kinds[0]
    ends = list(itertools.accumulate(map(sum, batches)))
    rows = torch.empty((ends[-1], *shape), dtype=getattr(torch, dtype), device="cpu")
    for rank, end in enumerate(ends):
        part = rows[end - sum(batches[rank]) : end]
        if len(part) == 0:
            continue
        if own is not None and rank == runtime.get_rank():
            part.copy_(own)
        dist.broadcast(part, rank, group=runtime.cpu_group())
    return rows, batches
