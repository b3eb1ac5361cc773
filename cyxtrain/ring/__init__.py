"""The CPU backend: a `torch.distributed` process group named "ring", on TCP. It knows nothing of training.

Ranks meet: meeting/ (host tells processes of one machine apart). They talk: link, frames, algorithms (who sends what
to whom), mesh (which does so), mailbox (messages). Beside that they watch: watching/. They are a group: connections,
group, siblings, tensors; ready (small sums) and shared (gradients in common memory) are its short ways. PyTorch sees:
process_group, work, arguments, uncompiled.
"""

from cyxtrain.ring.process_group import RingProcessGroup, register

__all__ = ["RingProcessGroup", "register"]
