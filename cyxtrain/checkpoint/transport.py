"""Checkpoints on all ranks without a shared disk: rank 0 reads, the others receive."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from cyxtrain.checkpoint.checkpoint_file import CheckpointState, checkpoint_bytes, unpack_checkpoint
from cyxtrain.checkpoint.validation import check_content
from cyxtrain.errors import CheckpointError, CyxtrainError
from cyxtrain.world.world import World


def read_on_all(world: World, read: Callable[[], tuple[bytes, str]]) -> tuple[CheckpointState, str] | None:
    """Return (state, name) of the checkpoint that rank 0 reads, on every rank; None if it finds none.

    `read` returns (bytes, name), with name "" for none, on rank 0 alone. Cost: the file once in and out of each rank;
    its size and its tensors in memory.
    """
    data = b""
    name = ""
    problem = ""
    if world.is_first:
        try:
            data, name = read()
        except CyxtrainError as error:  # the other ranks wait: they get it too
            problem = str(error)
        except Exception as error:
            problem = f"Cannot read a checkpoint: {error!r}."
    name, problem = world.gather(f"{name}\0{problem}")[0].split("\0", 1)  # a path contains no NUL
    if problem:
        raise CheckpointError(problem)
    if not name:
        return None
    state = unpack_checkpoint(_broadcast(world, data), name)
    check_content(state, f"checkpoint {name}")
    return state, name


def read_file_on_all(world: World, path: str | os.PathLike[str]) -> tuple[CheckpointState, str]:
    """Return (state, path) of a checkpoint's file on rank 0, on every rank."""
    found = read_on_all(world, lambda: (checkpoint_bytes(path), str(path)))
    assert found is not None
    return found


def _broadcast(world: World, data: bytes) -> bytes:
    size = torch.tensor([len(data)], device="cpu")
    world.broadcast(size)
    buffer = torch.empty(int(size), dtype=torch.uint8, device="cpu")
    if data:
        buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    world.broadcast(buffer)
    return data or buffer.numpy().tobytes()
