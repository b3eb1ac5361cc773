"""A checkpoint without a disk."""

from __future__ import annotations

import io

from cyxtrain.checkpoint.checkpoint_file import FORMAT, FORMAT_VERSION, CheckpointState, records_of, summary_of
from cyxtrain.checkpoint.format.archive import write_archive


def pack_checkpoint(state: CheckpointState) -> bytes:
    """Returns what the file of a checkpoint holds."""
    target = io.BytesIO()
    write_archive(target, FORMAT, FORMAT_VERSION, records_of(state), summary_of(state))
    return target.getvalue()
