"""Gradients, from a rank into the ring and back: layout -> bucket -> reducer -> DistributedDataParallel."""

from cyxtrain.parallel.distributed_data_parallel import DistributedDataParallel, unwrap
from cyxtrain.parallel.gathering import GatherCall, all_gather_with_grad, gather_nothing, gathering_alone

__all__ = [
    "DistributedDataParallel",
    "GatherCall",
    "all_gather_with_grad",
    "gather_nothing",
    "gathering_alone",
    "unwrap",
]
