"""Between a trainer and a checkpoint: what is saved, how it comes back, and who reads and writes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cyxtrain import runtime
from cyxtrain.errors import CheckpointError
from cyxtrain.training.saving.checkpoint import CheckpointState, unpack_checkpoint
from cyxtrain.training.saving.files import read_file
from cyxtrain.training.saving.optimizer_state import load_optimizer_state_by_name, optimizer_state_by_name
from cyxtrain.training.saving.weights import fitting_state, load_model_state


def snapshot(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    epoch: int,
    history: dict[str, Any],
    config: dict[str, Any],
    world_size: int,
) -> CheckpointState:
    """Returns the state of a run; its tensors are the live ones, not copies."""
    state, groups = optimizer_state_by_name(optimizer, model)
    return CheckpointState(
        model=model.state_dict(),
        optimizer=state,
        optimizer_groups=groups,
        position={"epoch": epoch},
        history=history,
        config=config,
        world_size=world_size,
    )


def restore(model: nn.Module, optimizer: torch.optim.Optimizer, state: CheckpointState, source: str) -> int:
    """Gives model and optimizer a saved state; returns the number of epochs that it has seen.

    Raises:
        CheckpointError: It belongs to another model or optimizer; both are as they were.
    """
    fitting_state(model, state.model, source)
    # First, because it takes all or nothing, and the model has just been seen to fit.
    load_optimizer_state_by_name(optimizer, model, state.optimizer, state.optimizer_groups)
    load_model_state(model, state.model, source)
    return int(state.position.get("epoch", 0))


def read_on_all(path: str | os.PathLike[str]) -> CheckpointState:
    """Returns the checkpoint that rank 0 reads, on every rank: no shared disk is needed.

    Cost: the file once in and once out of each rank; its size and its tensors in memory.

    Raises:
        CheckpointError: There is none, or it is damaged; the same on every rank.
    """
    data, problem = b"", ""
    if runtime.is_master():
        try:
            data = read_file(path, "checkpoint")
        except CheckpointError as error:
            problem = str(error)
    problem = runtime.gather_texts(problem)[0]
    if problem:
        raise CheckpointError(problem)
    return unpack_checkpoint(_broadcast_bytes(data), str(path))


def checkpoint_path(folder: str, epoch: int, rank: int | None) -> Path:
    """Returns where the checkpoint after an epoch goes; with a rank, that rank's own."""
    suffix = "" if rank is None else f"-rank{rank}"
    return Path(folder) / f"epoch-{epoch:04d}{suffix}.ckpt"


def _broadcast_bytes(data: bytes) -> memoryview:
    group = runtime.cpu_group()
    size = torch.tensor([len(data)], device="cpu")
    dist.broadcast(size, 0, group=group)
    buffer = torch.empty(int(size), dtype=torch.uint8, device="cpu")
    if data:
        buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    dist.broadcast(buffer, 0, group=group)
    return buffer.numpy().data
