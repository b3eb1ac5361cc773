"""Out-of-memory errors, of a device or of the machine, with a remedy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from cyxtrain.environment import accelerator
from cyxtrain.errors import CyxtrainError
from cyxtrain.world.world import World

# Part of PyTorch's message, in a plain RuntimeError.
_OF_THE_CPU = "can't allocate memory"
# Parts of messages of drivers, cuBLAS, cuDNN, cuSPARSE and NCCL, which allocate memory themselves; in lower case.
_OF_LIBRARIES = ("out of memory", "_alloc_failed", "_allocation_failed", "failed to cuda")
_IN_PIECES = "PYTORCH_ALLOC_CONF=expandable_segments:True helps where free memory is in pieces."
_LESS = "Give each rank less to hold at once: a smaller batch_size"
_IN_TRAINING = (
    ", with accumulation_steps so that steps stay as they are; precision='bf16'; "
    "trainer.enable_gradient_checkpointing()"
)
_IN_EVALUATION = " (in fit, validation_batch_size; a DataLoader has its own)"
_ON_GPUS = "On a GPU, look at nvidia-smi: each rank needs its own (cyxtrain launch --gpus), and nobody else on it."


@contextlib.contextmanager
def memory_explained(world: World, *, trains: bool = True) -> Iterator[None]:
    """Add the rank and a remedy to an out-of-memory error within; `trains`: whether it is about training."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if is_full(error):
            less = _IN_TRAINING if trains else _IN_EVALUATION
            reason = str(error).rstrip(". \n") or type(error).__name__
            problem = f"rank {world.number} is out of memory: {reason}. {_device_memory(error)}"
            error.args = (f"{problem}{_LESS}{less}. {_ON_GPUS}",)
        raise


def _device_memory(error: Exception) -> str:
    """Describe how much memory of its device PyTorch has held, with a remedy; "" for the CPU."""
    if _is_of_the_cpu(error):
        return ""
    device = accelerator.in_use()
    peak = None if device is None else accelerator.peak_memory(device, "reserved")
    if peak is None:
        return f"{_IN_PIECES} "
    return f"PyTorch has held up to {peak / 2**30:.1f} GiB of {device}. {_IN_PIECES} "


def is_full(error: Exception) -> bool:
    """Return whether an error is about memory, and has no remedy yet."""
    if _ON_GPUS in str(error) or isinstance(error, CyxtrainError):
        return False
    known = _is_of_the_cpu(error) or isinstance(error, torch.OutOfMemoryError)
    return known or any(words in str(error).lower() for words in _OF_LIBRARIES)


def _is_of_the_cpu(error: Exception) -> bool:
    return isinstance(error, MemoryError) or _OF_THE_CPU in str(error)
