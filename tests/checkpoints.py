"""A checkpoint without a disk."""

from __future__ import annotations

import io

from cyxtrain.training.saving.archive import write_archive
from cyxtrain.training.saving.checkpoint import FORMAT, FORMAT_VERSION, CheckpointState, entries_of


def pack_checkpoint(state: CheckpointState) -> bytes:
    """Returns what the file of a checkpoint holds."""
    target = io.BytesIO()
    write_archive(target, FORMAT, FORMAT_VERSION, entries_of(state))
    return target.getvalue()
