"""A model's outputs for all rows, put together in their order."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cyxtrain import runtime
from cyxtrain.data.batches import share_of_batches
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
    world_size = runtime.get_world_size()
    shares = [share_of_batches(len(rows), rows.batch_size, rank, world_size) for rank in range(world_size)]
    return gather_rows(step.outputs, [[min(batch * rows.batch_size, len(rows)) for batch in share] for share in shares])


def gather_rows(outputs: Sequence[Tensor], spans: Sequence[Sequence[int]]) -> Tensor:
    """Returns the outputs of all rows, on every rank.

    Cost: the rows once in and once out of each rank.

    Args:
        outputs: This rank's, batch by batch.
        spans: (first, end) of each rank's rows; neighbours that cover all.

    Raises:
        ConfigError: They do not have the same shape and dtype on every rank.
    """
    own = torch.cat(list(outputs)) if outputs else None
    kind = None if own is None else [str(own.dtype).removeprefix("torch."), list(own.shape[1:])]
    found = [json.loads(text) for text in runtime.gather_texts(json.dumps(kind))]
    kinds = [other for other in found if other is not None]  # a rank without a batch has seen nothing
    if any(other != kinds[0] for other in kinds):
        raise ConfigError(f"predict needs rows of one kind; the model's outputs differ between ranks: {kinds}.")
    dtype, shape = kinds[0]
    rows = torch.empty((spans[-1][1], *shape), dtype=getattr(torch, dtype), device="cpu")
    for rank, (first, end) in enumerate(spans):
        if first == end:
            continue
        part = rows[first:end]
        if own is not None and rank == runtime.get_rank():
            part.copy_(own)
        dist.broadcast(part, rank, group=runtime.cpu_group())
    return rows
