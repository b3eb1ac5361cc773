"""Gradients averaged over ranks: layout -> bucket -> reducer -> DistributedDataParallel; gathering with gradients."""

from cyxtrain.parallel.gathering import (
    GatherCall,
    all_gather_with_grad,
    backward_alike,
    depending_on,
    gather_no_rows,
    gathering_alone,
    gathers_kept,
)
from cyxtrain.parallel.wrapper import DistributedDataParallel, unwrap

__all__ = [
    "DistributedDataParallel",
    "GatherCall",
    "all_gather_with_grad",
    "backward_alike",
    "depending_on",
    "gather_no_rows",
    "gathering_alone",
    "gathers_kept",
    "unwrap",
]
