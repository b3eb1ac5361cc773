"""Outputs of all ranks, put together in the order of the rows."""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from cyxtrain import runtime
from cyxtrain.errors import ConfigError


def gather_rows(outputs: Sequence[Tensor], other: str | None, spans: Sequence[Sequence[int]], *, distributed: bool) -> Tensor:
    """Returns the outputs of all rows, on every rank.

    Args:
        outputs: This rank's, batch by batch.
        other: What the model returned where that was no tensor with a row per row.
        spans: (first, end) of each rank's rows; neighbours that cover all.
        distributed: Whether the other ranks have parts.

    Raises:
        ConfigError: The model returns something else, or not the same shape on every rank.
    """
    own = torch.cat(list(outputs)) if outputs else None
    if not distributed:
        _refuse([{"other": other}])
        assert own is not None
        return own
    facts = {"other": other, "dtype": None, "shape": None}
    if own is not None:
        facts |= {"dtype": str(own.dtype).removeprefix("torch."), "shape": list(own.shape[1:])}
    everyone = [json.loads(text) for text in runtime.gather_texts(json.dumps(facts))]
    _refuse(everyone)
    kinds = [found for found in everyone if found["dtype"] is not None]  # ranks without a batch know nothing
    if any((found["dtype"], found["shape"]) != (kinds[0]["dtype"], kinds[0]["shape"]) for found in kinds):
        raise ConfigError(f"the model's outputs differ in shape or dtype between ranks: {kinds}.")
    rows = torch.empty((spans[-1][1], *kinds[0]["shape"]), dtype=getattr(torch, kinds[0]["dtype"]))
    for rank, (first, end) in enumerate(spans):
        if first == end:
            continue
        part = rows[first:end]
        if rank == runtime.get_rank() and own is not None:
            part.copy_(own)
        dist.broadcast(part, rank, group=runtime.cpu_group())
    return rows


def _refuse(everyone: Sequence[dict[str, object]]) -> None:
    for found in everyone:
        if found["other"] is not None:
            raise ConfigError(
                f"predict needs a model that returns one tensor with a row per row of X; it returned {found['other']}."
            )
