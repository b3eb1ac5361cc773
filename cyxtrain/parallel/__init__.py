"""Gradients, from a rank into the ring and back: layout -> bucket -> reducer -> DistributedDataParallel."""

from cyxtrain.parallel.distributed_data_parallel import DistributedDataParallel, unwrap

__all__ = ["DistributedDataParallel", "unwrap"]
