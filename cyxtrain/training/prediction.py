"""Outputs of all ranks, put together in the order of the rows."""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from cyxtrain import runtime
from cyxtrain.errors import ConfigError


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
