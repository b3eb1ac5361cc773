"""The CPU backend: a `torch.distributed` process group named "ring". Other packages import only these names.

This is its public interface; nothing outside of this folder imports the modules inside. `rendezvous/` connects the
ranks, `schedules/` says who sends what to whom and does the arithmetic, `wire/` and `shared_memory/` move data, and
`monitoring/` notices ranks that die or stall (`failure` tells how a group then ends). `group` has the collectives of a
group, and `engine` runs them; for PyTorch, `backend` offers them by `process_group` and `work`.
"""

from cyxtrain.ring.backend import (
    RingProcessGroup,
    fail,
    failure_of,
    gradient_buffers_of,
    is_ring,
    members_of,
    raised_failure_of,
    register,
    transport_of,
)
from cyxtrain.ring.gradient_buffer import SharedGradientBuffer
from cyxtrain.ring.mean_weight import DIGITS, MeanWeight
from cyxtrain.ring.monitoring.group_registry import WORLD_GROUPS
from cyxtrain.ring.rendezvous.key_values import KeyValueStore
from cyxtrain.ring.rendezvous.membership import await_all_ranks
from cyxtrain.ring.rendezvous.probe import RankProbe, try_transports
from cyxtrain.ring.rendezvous.record import RankRecord
from cyxtrain.ring.rendezvous.store import reach_store, reach_tcp_store, serve_store, share_tcp_store
from cyxtrain.ring.rendezvous.store_client import StoreClient, StoreLostError
from cyxtrain.ring.schedules.kernels import memory_of
from cyxtrain.ring.schedules.summation import RowSum, binary_tree
from cyxtrain.ring.wire.link import Deadline
from cyxtrain.ring.wire.payload import is_finite
from cyxtrain.ring.work import CallOptions

__all__ = [
    "DIGITS",
    "WORLD_GROUPS",
    "CallOptions",
    "Deadline",
    "KeyValueStore",
    "MeanWeight",
    "RankProbe",
    "RankRecord",
    "RingProcessGroup",
    "RowSum",
    "SharedGradientBuffer",
    "StoreClient",
    "StoreLostError",
    "await_all_ranks",
    "binary_tree",
    "fail",
    "failure_of",
    "gradient_buffers_of",
    "is_finite",
    "is_ring",
    "members_of",
    "memory_of",
    "raised_failure_of",
    "reach_store",
    "reach_tcp_store",
    "register",
    "serve_store",
    "share_tcp_store",
    "transport_of",
    "try_transports",
]
