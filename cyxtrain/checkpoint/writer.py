"""Writes checkpoints in the background: a step waits only until its state is copied."""

from __future__ import annotations

import errno
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from cyxtrain.checkpoint.checkpoint_file import CheckpointState, records_of, summary_of, write_records
from cyxtrain.checkpoint.folder import CheckpointFolder
from cyxtrain.environment import accelerator
from cyxtrain.errors import CheckpointError


class Writer:
    """Writes checkpoints to a folder, one after the other, in a thread.

    Cost: memory for one copy of the state, reused for each save; a save waits for the one before. A copy from an
    accelerator goes to pinned memory, and only the writing thread waits for it.
    """

    def __init__(self, folder: CheckpointFolder) -> None:
        self.folder = folder
        self._pool = ThreadPoolExecutor(1, "cyxtrain-checkpoint")
        self._writing: Future[None] | None = None
        self._copies: dict[tuple[str, str], torch.Tensor] = {}
        self._devices: set[torch.device] = set()

    def write(
        self,
        name: str,
        state: CheckpointState,
        afterwards: Callable[[], None],
        make_room: Callable[[], bool] = lambda: False,
    ) -> None:
        """Copy a state, whose tensors may change as soon as this returns, and start writing it.

        The writing thread calls `afterwards` when the file is complete, and `make_room` if the disk is full; that
        returns whether to retry.
        """
        if self._writing is not None:
            futures.wait([self._writing])  # it reads the copies; `wait` returns its error
        self._devices.clear()
        entries = records_of(state, self._copy)
        summary = summary_of(state)
        copied = [accelerator.done_on(device) for device in self._devices]
        path = self.folder.file(name)

        def write() -> None:
            for event in copied:
                event.synchronize()  # until the copies from an accelerator are there
            try:
                write_records(path, entries, summary)
            except CheckpointError as error:
                if not _is_disk_full(error) or not make_room():
                    raise
                write_records(path, entries, summary)
            afterwards()

        self._writing = self._pool.submit(write)

    def wait(self) -> Exception | None:
        """Wait until the last checkpoint is on the disk; return its error, once."""
        writing = self._writing
        self._writing = None
        if writing is None:
            return None
        error = writing.exception()
        if error is not None and not isinstance(error, Exception):
            raise error
        return error

    def close(self) -> None:
        """Wait for the last checkpoint, and end the thread."""
        self._pool.shutdown()
        self._copies.clear()

    def _copy(self, entry: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor of an entry to memory that later saves reuse; on an accelerator, only start the copy."""
        copy = self._copies.get((entry, name))
        is_on_accelerator = accelerator.is_accelerator(tensor.device)
        if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=is_on_accelerator)
            self._copies[entry, name] = copy
        if not is_on_accelerator:
            return copy.copy_(tensor)
        self._devices.add(tensor.device)
        return copy.copy_(tensor.contiguous(), non_blocking=True)


def _is_disk_full(error: CheckpointError) -> bool:
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)
