"""The CPU backend: a `torch.distributed` process group named "ring". Other packages import only these names.

schedules: who sends what to whom, as pure data. wire: frames, links, transfers, arithmetic. shared_memory: sums on
one machine. rendezvous: how ranks find each other. monitoring: how a dead or stalled rank is noticed.
`group` does collectives by an `executor`; `process_group` and `backend` give them to PyTorch.
"""

from cyxtrain.ring.backend import RingProcessGroup, register
from cyxtrain.ring.gradient_buffer import SharedGradientBuffer
from cyxtrain.ring.wire.payload import is_finite, memory_of
from cyxtrain.ring.work import CallOptions

__all__ = ["CallOptions", "RingProcessGroup", "SharedGradientBuffer", "is_finite", "memory_of", "register"]
