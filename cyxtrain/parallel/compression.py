"""Compressed exchange of gradients, and the state that PowerSGD keeps from step to step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from cyxtrain.config import DDPConfig
from cyxtrain.errors import CheckpointError
from cyxtrain.parallel.bucket import Bucket
from cyxtrain.parallel.exchange import HalfPrecisionExchange
from cyxtrain.parallel.powersgd import LowRankExchange, LowRankGradient

COMPRESSIBLE = {torch.float32, torch.float64}  # gradients of other types are exchanged uncompressed
_NARROW = {"fp16": torch.float16, "bf16": torch.bfloat16}


def compress(buckets: Sequence[Bucket], config: DDPConfig) -> dict[str, LowRankGradient]:
    """Set the exchange of buckets to the configured compression; return low-rank gradients by name."""
    found = {}
    for bucket in buckets:
        end = len(bucket.buffer())
        if config.compression is None or bucket.numbers.dtype not in COMPRESSIBLE:
            continue
        if config.compression == "powersgd":
            exchange = LowRankExchange(bucket.numbers, end, bucket.gradients(), config.matrix_approximation_rank)
            found.update({bucket.names[number]: gradient for number, gradient in exchange.gradients.items()})
            bucket.exchange = exchange
        else:
            bucket.exchange = HalfPrecisionExchange(bucket.numbers, end, _NARROW[config.compression])
    return found


def gathered_state(gradients: Mapping[str, LowRankGradient], group: Any) -> dict[str, Any]:
    """Return the state of low-rank gradients: "queries" by name, "errors" of each rank by name.

    All ranks call it, with a group on CPUs. Cost: the gradients once from each rank to each, and as many times the
    memory as there are ranks.
    """
    if not gradients:
        return {}
    ranks = range(dist.get_world_size(group))
    errors: list[dict[str, torch.Tensor]] = [{} for _ in ranks]
    for name, gradient in gradients.items():
        own = gradient.error.cpu()
        gathered = [torch.empty_like(own) for _ in ranks]
        dist.all_gather(gathered, own, group=group)
        for rank in ranks:
            errors[rank][name] = gathered[rank]
    return {"queries": {name: gradient.query.cpu().clone() for name, gradient in gradients.items()}, "errors": errors}


def load_state(gradients: Mapping[str, LowRankGradient], state: Mapping[str, Any], rank: int, world_size: int) -> None:
    """Load what `gathered_state` returned; on another number of ranks, each gets the mean of all errors.

    Gradients that are new, or have another shape now, keep their initial state.
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
        raise CheckpointError(f"the saved state of gradient compression cannot be used: {error!r}.") from error
