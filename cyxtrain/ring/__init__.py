"""The CPU backend: a `torch.distributed` process group named "ring". It knows nothing of training.

Ranks meet: meeting/ (host tells processes of one machine apart). They talk: link (over TCP, Unix sockets, or the
memory of the other), frames, algorithms (who sends what to whom), routes (which of them), mesh and transfers (which do
so), reducing and combining (arithmetic), mailbox (messages), courier (beside the caller). Beside that they watch:
watching/. They are a group: connections, group, siblings, tensors, staging; ready (small sums) and shared (gradients in
common memory) are its short ways. PyTorch sees: backend, with registered (from 2.14 on) or naming (before), over the
operations of process_group; work, arguments, uncompiled.
"""

from cyxtrain.ring.backend import RingProcessGroup, register

__all__ = ["RingProcessGroup", "register"]
