"""The CPU backend: a `torch.distributed` process group named "ring", on TCP. It knows nothing of training.

Ranks meet: store, rendezvous, door. They talk: link, frames, algorithms (who sends what to whom), mesh (which does
so), mailbox (messages), watch (why it ended). They are a group: group, tensors. PyTorch sees: process_group, work,
arguments.
"""

from cyxtrain.ring.process_group import RingProcessGroup, register

__all__ = ["RingProcessGroup", "register"]
