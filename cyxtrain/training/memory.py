"""What a rank says when its device, or the machine, has no more memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from cyxtrain import runtime

_OF_THE_CPU = "can't allocate memory"
"""PyTorch's words for it, in an error of no kind of its own."""
_REMEDIES = (
    "Give each rank less to hold at once: a smaller batch_size, with accumulation_steps so that steps stay as they "
    "are; precision='bf16'; trainer.enable_gradient_checkpointing(). On a GPU, look at nvidia-smi: each rank needs one "
    "of its own (cyxtrain launch --gpus), and nobody else on it."
)


@contextlib.contextmanager
def memory_explained() -> Iterator[None]:
    """An error within that says that memory is full says also on which rank, and what to do; it stays what it is."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if is_full(error):
            error.args = (f"rank {runtime.get_rank()} is out of memory: {error} {_REMEDIES}",)
        raise


def is_full(error: Exception) -> bool:
    """Returns whether an error is about memory, and nothing has been added to it yet."""
    known = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or _OF_THE_CPU in str(error)
    return known and _REMEDIES not in str(error)
