"""A model's outputs for all rows, put together in their order."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cyxtrain.data.batches.specs import example_of, form_of
from cyxtrain.data.batches.structure import Tree, map_tree, num_rows, tensors
from cyxtrain.errors import ConfigError
from cyxtrain.training.epoch import run_whole_batches
from cyxtrain.training.inputs.plan import CheckedData
from cyxtrain.training.step import PredictionStep
from cyxtrain.world import runtime


def predict_rows(model: nn.Module, rows: CheckedData, *, distributed: bool) -> Any:
    """Returns a model's output for all rows, in their order, on every rank: NumPy arrays where X is of such.

    Args:
        model: Not wrapped.
        rows: All of them.
        distributed: Whether the ranks share the work; else this one does it all.

    Raises:
        ConfigError: The model does not return tensors with a row per row.
    """
    step = PredictionStep(model, rows.call, rows.loss)
    run_whole_batches(model, rows, step, distributed=distributed)
    output = _gathered(rows, step) if distributed else _joined(step.outputs)
    finish: Any = _as_numpy if rows.source.is_numpy else (lambda tensor: tensor)
    return map_tree(finish, output)


def _gathered(rows: CheckedData, step: PredictionStep) -> Tree:
    gathered, batches = gather_rows(step.outputs)
    order = rows.source.in_order(batches)
    if order is None:
        return gathered
    return map_tree(lambda tensor: torch.empty_like(tensor).index_copy_(0, order, tensor), gathered)


def gather_rows(outputs: Sequence[Tree]) -> tuple[Tree, list[list[int]]]:
    """Returns the outputs of all ranks, on every rank, in their order; and how many rows each batch had, by rank.

    Cost: the rows once in and once out of each rank.

    Args:
        outputs: This rank's, batch by batch.

    Raises:
        ConfigError: They do not have the same shape and dtype on every rank.
    """
    text = json.dumps(
        {"kind": form_of(outputs[0]) if outputs else None, "batches": [num_rows(output) for output in outputs]}
    )
    found = [json.loads(other) for other in runtime.gather_texts(text)]
    batches: list[list[int]] = [other["batches"] for other in found]
    kinds = [other["kind"] for other in found if other["kind"] is not None]  # without a batch it has seen nothing
    if any(other != kinds[0] for other in kinds):
        raise ConfigError(f"predict needs rows of one kind; the model's outputs differ between ranks: {kinds}.")
    ends = list(itertools.accumulate(map(sum, batches)))
    own = iter(tensors(_joined(outputs)) if outputs else ())

    def gather(like: Tensor) -> Tensor:
        mine = next(own, None)
        rows = torch.empty((ends[-1], *like.shape[1:]), dtype=like.dtype, device="cpu")
        for rank, end in enumerate(ends):
            part = rows[end - sum(batches[rank]) : end]
            if len(part) == 0:
                continue
            if mine is not None and rank == runtime.get_rank():
                part.copy_(mine)
            dist.broadcast(part, rank, group=runtime.cpu_group())
        return rows

    return map_tree(gather, outputs[0] if outputs else example_of(kinds[0])), batches


def _joined(outputs: Sequence[Tree]) -> Tree:
    """Returns all rows of several outputs of one kind."""
    parts = zip(*(tensors(output) for output in outputs), strict=True)
    return map_tree(lambda _: torch.cat(next(parts)), outputs[0])


def _as_numpy(tensor: Tensor) -> Any:
    return (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy()  # NumPy has no bfloat16
