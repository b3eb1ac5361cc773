"""The CPU backend: a `torch.distributed` process group named "ring", on TCP. It knows nothing of training.

rendezvous -> link, frames -> algorithms -> mesh (transfers), mailbox (messages), watch (aborts) -> process_group
"""

from cyxtrain.ring.process_group import RingProcessGroup, register

__all__ = ["RingProcessGroup", "register"]
