"""Gradients, from a rank into the ring and back: layout -> bucket -> reducer -> DistributedDataParallel."""

from cyxtrain.parallel.distributed_data_parallel import DistributedDataParallel, unwrap
from cyxtrain.parallel.gathering import (
    GatherCall,
    all_gather_with_grad,
    backward_alike,
    gather_nothing,
    gathering_alone,
    gathers_kept,
)

__all__ = [
    "DistributedDataParallel",
    "GatherCall",
    "all_gather_with_grad",
    "backward_alike",
    "gather_nothing",
    "gathering_alone",
    "gathers_kept",
    "unwrap",
]
