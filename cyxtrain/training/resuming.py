"""Which checkpoint a fit goes on from, whether it fits, and what of it belongs to this rank."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cyxtrain import environment, runtime
from cyxtrain.config import DistributedTrainingConfig
from cyxtrain.errors import CheckpointError, ConfigError
from cyxtrain.training.randomness import set_generators
from cyxtrain.training.saving.checkpoint import CheckpointState, unpack_checkpoint
from cyxtrain.training.saving.files import read_file
from cyxtrain.training.saving.folder import CheckpointFolder
from cyxtrain.training.saving.transport import read_on_all
from cyxtrain.training.state import Position
from cyxtrain.training.totals import Totals

AUTO = "auto"
_SAME_FIELDS = ("shuffle", "seed", "validation_split", "batch_size", "effective_batch_size")
"""What decides the samples of a step, beside the data."""


@dataclass
class Resumed:
    """What belongs to this rank of a checkpoint that a fit goes on from.

    Attributes:
        ranks: What belonged to each rank that wrote it.
        source: The checkpoint, for messages.
    """

    ranks: Sequence[dict[str, Any]]
    source: str

    def hand_over(self, totals: Totals, device: torch.device) -> None:
        """Gives this rank its generators, where there are as many ranks as there were, and its sums of the epoch.

        Raises:
            CheckpointError: The checkpoint holds something else.
        """
        rank, world_size = runtime.get_rank(), runtime.get_world_size()
        try:
            tables = [each["sums"] for each in self.ranks]
            if not any(tables):
                return  # made between two epochs: the next one begins with generators of its own
            if len(self.ranks) == world_size:
                set_generators(self.ranks[rank]["generators"], device)
                totals.go_on_from(tables[rank])
            elif rank == 0:
                # Added up once: which rank has counted what makes no difference to the result but in its last bits.
                totals.go_on_from([list(map(math.fsum, zip(*rows, strict=True))) for rows in zip(*tables, strict=True)])
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"Cannot resume from {self.source}: what belongs to rank {rank} is wrong: {error}."
            ) from error


def find_checkpoint(
    resume: str | None, config: DistributedTrainingConfig, call: int, trainer: int
) -> tuple[CheckpointState, str] | None:
    """Returns (state, name) of the checkpoint to go on from, on every rank; None: there is none, or nobody asked.

    Where the launcher has started all ranks again, the newest one that this launch has made comes first, whatever
    `resume` says.

    Args:
        resume: "auto": the newest one of `config.checkpoint_dir` that is intact; else its path, or None.
        config: Of the fit.
        call: Which call of `fit` of this trainer it is, from 1. A program that runs again makes all its calls: what an
            earlier one has left is no place to go on from.
        trainer: Number of the trainer in the program.

    Raises:
        CheckpointError: The one that was named is not there, or damaged; the same on every rank.
    """
    launched, attempt = environment.launched_run()
    folder = CheckpointFolder(config.checkpoint_dir, None if config.save_on_master_only else 0)
    if attempt and resume != AUTO:
        found = read_on_all(lambda: next(_intact(folder, launched, trainer), (b"", "")))
        if found is not None:
            return _unless_earlier(found, call)
    if resume is None:
        return None
    if resume == AUTO:
        return _unless_earlier(read_on_all(lambda: next(_intact(folder), (b"", ""))), call)
    return read_on_all(lambda: (read_file(resume, "checkpoint"), resume))


def _unless_earlier(found: tuple[CheckpointState, str] | None, call: int) -> tuple[CheckpointState, str] | None:
    """Returns a checkpoint, unless an earlier call of `fit` has made it."""
    if found is None or Position.from_json(found[0].position, found[1]).fits < call:
        return None
    return found


def _intact(folder: CheckpointFolder, launched: str = "", trainer: int = 0) -> Iterator[tuple[bytes, str]]:
    """Gives (bytes, path) of checkpoints that are intact, the newest first; of one trainer of a launch, or of any."""
    for found in folder.newest_first():
        if launched and found.run and (found.run.get("launched"), found.run.get("trainer")) != (launched, trainer):
            continue
        try:
            data = read_file(found.path, "checkpoint")
            state = unpack_checkpoint(data, str(found.path))
            Position.from_json(state.position, f"checkpoint {found.path}")
        except CheckpointError as error:
            warnings.warn(f"{error} It is skipped.", stacklevel=2)
            continue
        yield data, str(found.path)


def check_same_fit(state: CheckpointState, name: str, config: DistributedTrainingConfig, data: str) -> None:
    """Refuses to go on with other samples than those that the checkpoint would have seen.

    Args:
        state: The checkpoint.
        name: Its name.
        config: Of the fit.
        data: A digest of the training data.

    Raises:
        ConfigError: With what differs.
    """
    now = dataclasses.asdict(config)
    differences = [
        f"{field} is {now[field]} and was {state.config.get(field)}"
        for field in _SAME_FIELDS
        if now[field] != state.config.get(field)
    ]
    if state.run.get("data") != data:
        differences.append("the training data are others")
    if differences:
        raise ConfigError(
            f"fit cannot resume from {name}: {'; '.join(differences)}. Give what was given before; or "
            "load_checkpoint() and fit() without resume, to begin a new fit with that model."
        )
