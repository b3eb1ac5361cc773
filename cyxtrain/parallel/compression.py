"""Which way gradients travel, and what a lossy one keeps from step to step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from cyxtrain.config import DDPConfig
from cyxtrain.errors import CheckpointError
from cyxtrain.parallel.bucket import Bucket
from cyxtrain.parallel.exchange import HalfPrecisionExchange
from cyxtrain.parallel.powersgd import LowRank, LowRankGradient

COMPRESSIBLE = {torch.float32, torch.float64}
"""Gradients of other numbers travel as they are."""
_NARROW = {"fp16": torch.float16, "bf16": torch.bfloat16}


def compress(buckets: Sequence[Bucket], config: DDPConfig) -> dict[str, LowRankGradient]:
    """Lets buckets travel as the config says, where their numbers are `COMPRESSIBLE`.

    Args:
        buckets: Of a module.
        config: How gradients travel.

    Returns:
        The gradients that travel as thin matrices, by name.
    """
    found = {}
    for bucket in buckets:
        end = len(bucket.buffer())
        if config.compression is None or bucket.numbers.dtype not in COMPRESSIBLE:
            continue
        if config.compression == "powersgd":
            travel = LowRank(bucket.numbers, end, bucket.gradients(), config.matrix_approximation_rank)
            found.update({bucket.names[number]: gradient for number, gradient in travel.gradients.items()})
            bucket.travel = travel
        else:
            bucket.travel = HalfPrecisionExchange(bucket.numbers, end, _NARROW[config.compression])
    return found


def gathered_state(gradients: Mapping[str, LowRankGradient], group: Any) -> dict[str, Any]:
    """Returns what thin matrices keep, for a checkpoint: "queries" by name, and "errors" of each rank by name.

    All ranks call it. Cost: the gradients once from each rank to each, and as many times the memory as there are ranks.

    Args:
        gradients: Those that travel so, by name.
        group: Of all ranks, on CPUs.
    """
    if not gradients:
        return {}
    ranks = range(dist.get_world_size(group))
    errors: list[dict[str, torch.Tensor]] = [{} for _ in ranks]
    for name, gradient in gradients.items():
        own = gradient.error.cpu()
        everyone = [torch.empty_like(own) for _ in ranks]
        dist.all_gather(everyone, own, group=group)
        for rank in ranks:
            errors[rank][name] = everyone[rank]
    return {"queries": {name: gradient.query.cpu().clone() for name, gradient in gradients.items()}, "errors": errors}


def load_state(gradients: Mapping[str, LowRankGradient], state: Mapping[str, Any], rank: int, world_size: int) -> None:
    """Goes on from what `gathered_state` gave; on another number of ranks, each has the mean of all errors.

    What is new, or has another shape now, begins anew.

    Args:
        gradients: As `gathered_state`.
        state: What that returned.
        rank: This one.
        world_size: How many there are.

    Raises:
        CheckpointError: It is something else.
    """
    try:
        queries, errors = state["queries"], state["errors"]
        for name, gradient in gradients.items():
            if name in queries and queries[name].shape == gradient.query.shape:
                gradient.query.copy_(queries[name])
            of_ranks = [own[name] for own in errors if name in own and own[name].shape == gradient.error.shape]
            if len(of_ranks) == world_size:
                gradient.error.copy_(of_ranks[rank])
            elif of_ranks:
                gradient.error.copy_(torch.stack(of_ranks).mean(0))
    except (KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"what gradient compression has kept cannot be used: {error!r}.") from error
