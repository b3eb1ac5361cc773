"""The CPU backend: a `torch.distributed` process group named "ring". It knows nothing of training.

Ranks meet: meeting/ (host tells processes of one machine apart). They talk: link (over TCP, Unix sockets, or the
memory of the other), frames, algorithms (who sends what to whom), routes (which of them), mesh and transfers (which do
so), reducing and combining (arithmetic), mailbox (messages), courier (beside the caller). Beside that they watch:
watching/. They are a group: connections, group, siblings, tensors, staging; ready (small sums) and shared (gradients in
common memory) are its short ways. PyTorch sees: backend, with registered (from 2.14 on) or naming (before), over the
operations of process_group; work, arguments, uncompiled.
"""

from cyxtrain.ring.backend import RingProcessGroup, register
from cyxtrain.ring.monitoring.process_state import State, state_of
from cyxtrain.ring.rendezvous.accept import Acceptor
from cyxtrain.ring.rendezvous.dial import ClosedError, call_once, socket_address
from cyxtrain.ring.rendezvous.handshake import Claim, HandshakeError, RefusedError, Role
from cyxtrain.ring.rendezvous.listen import listen, listen_near
from cyxtrain.ring.rendezvous.record import RankRecord, misfit
from cyxtrain.ring.rendezvous.rendezvous import Meeting, own_record
from cyxtrain.ring.rendezvous.store_client import StoreClient, StoreLostError
from cyxtrain.ring.shared_memory import peer_read
from cyxtrain.ring.wire.link import Deadline, watch_over

__all__ = [
    "Acceptor",
    "Claim",
    "ClosedError",
    "Deadline",
    "HandshakeError",
    "Meeting",
    "RankRecord",
    "RefusedError",
    "RingProcessGroup",
    "Role",
    "State",
    "StoreClient",
    "StoreLostError",
    "call_once",
    "listen",
    "listen_near",
    "misfit",
    "own_record",
    "peer_read",
    "register",
    "socket_address",
    "state_of",
    "watch_over",
]
