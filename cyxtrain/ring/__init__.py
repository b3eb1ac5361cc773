"""The CPU backend: a `torch.distributed` process group named "ring". Other packages import only these names.

This is its public interface; nothing outside of this folder imports the modules inside. `rendezvous/` connects the
ranks, `wire/` and `shared_memory/` move data, `schedules/` says who sends what to whom, and `monitoring/` notices ranks
that die or stall. A group holds these together: `group`, `connections`, `collective_thread`, and, for PyTorch,
`backend` with `process_group` and `work`.
"""

from cyxtrain.ring.backend import RingProcessGroup, register
from cyxtrain.ring.gradient_buffer import SharedGradientBuffer
from cyxtrain.ring.rendezvous.accept import Acceptor
from cyxtrain.ring.rendezvous.dial import ClosedError, dial_once, socket_address
from cyxtrain.ring.rendezvous.group_registry import WORLD_GROUPS
from cyxtrain.ring.rendezvous.handshake import HandshakeError, Hello, RefusedError, Role
from cyxtrain.ring.rendezvous.key_values import KeyValueStore
from cyxtrain.ring.rendezvous.listen import Listeners, listen, listen_unix
from cyxtrain.ring.rendezvous.membership import await_all_ranks
from cyxtrain.ring.rendezvous.pytorch_store import reach_tcp_store, share_tcp_store
from cyxtrain.ring.rendezvous.record import RankRecord, foreign_value, parse_record, why_incompatible
from cyxtrain.ring.rendezvous.rendezvous import own_record
from cyxtrain.ring.rendezvous.store import open_store
from cyxtrain.ring.rendezvous.store_client import StoreClient, StoreLostError, poll_until
from cyxtrain.ring.wire.link import Deadline, watch_over
from cyxtrain.ring.wire.payload import is_finite, memory_of
from cyxtrain.ring.wire.peer_read import PeerMemory, allow_peer_reads
from cyxtrain.ring.work import CallOptions

__all__ = [
    "WORLD_GROUPS",
    "Acceptor",
    "CallOptions",
    "ClosedError",
    "Deadline",
    "HandshakeError",
    "Hello",
    "KeyValueStore",
    "Listeners",
    "PeerMemory",
    "RankRecord",
    "RefusedError",
    "RingProcessGroup",
    "Role",
    "SharedGradientBuffer",
    "StoreClient",
    "StoreLostError",
    "allow_peer_reads",
    "await_all_ranks",
    "dial_once",
    "foreign_value",
    "is_finite",
    "listen",
    "listen_unix",
    "memory_of",
    "open_store",
    "own_record",
    "parse_record",
    "poll_until",
    "reach_tcp_store",
    "register",
    "share_tcp_store",
    "socket_address",
    "watch_over",
    "why_incompatible",
]
