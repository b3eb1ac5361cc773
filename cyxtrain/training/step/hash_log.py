"""Short hashes of gradients and parameters, in a file by which `cyxtrain bisect` compares two runs."""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from torch import Tensor

from cyxtrain.checkpoint.checkpoint_file import library_versions
from cyxtrain.checkpoint.folder import infix_of
from cyxtrain.config import DistributedTrainingConfig
from cyxtrain.environment import accelerator, process_env
from cyxtrain.environment.regular_files import local_path, regular_opener
from cyxtrain.errors import CheckpointError, on_all_ranks, reason_of, warn
from cyxtrain.parallel import DistributedDataParallel
from cyxtrain.parallel.wrapper import ALL_SLICES
from cyxtrain.tensors.fingerprint import fingerprints
from cyxtrain.training.inputs.facts import deciding_settings
from cyxtrain.training.state import TrainingState
from cyxtrain.world import consensus
from cyxtrain.world.agreement import on_first

FORMAT = 1
_DIGITS = 12


def hashes_file(config: DistributedTrainingConfig, run: Mapping[str, Any]) -> Path:
    """Return the file of a run's hashes, in the folder of its checkpoints."""
    return Path(local_path("checkpoint_dir", config.checkpoint_dir)) / f"hashes{infix_of(run)}.jsonl"


class HashLog:
    """For every k-th step a line of JSON, with a hash of each tensor of each rank.

    A line has the parameters and buffers when the step begins ("start"), the gradients of each slice before they are
    added up ("slices"), their average ("average"), and the parameters and buffers after the step ("end"). Another line,
    at the beginning of the file and where a fit continues, has the names of the tensors and what else may differ.

    Cost of a step with a line: parameters and buffers are read twice, gradients once and their average once; two
    all_gathers, of 15 bytes per hash. Other steps cost nothing.

    Args:
        last_step: The step after which the program ends, for `cyxtrain replay`; None: it does not end.
    """

    def __init__(
        self, every: int, path: Path, state: TrainingState, ddp: DistributedDataParallel, *, last_step: int | None
    ) -> None:
        self._every = every
        self._path = path
        self._state = state
        self._ddp = ddp
        self._last_step = last_step
        self._file: TextIO | None = None  # on rank 0
        self._about: dict[str, Any] = {}
        self._names: list[str] = []
        self._gradients: defaultdict[int, dict[str, str]] = defaultdict(dict)

    def open(self) -> None:
        """Open the file on rank 0. All ranks call it; raises CheckpointError on all if it cannot be written."""
        world = self._ddp.world
        device = accelerator.in_use() or torch.device("cpu")
        ranks = world.gather_json(consensus.arithmetic_of_rank(device))
        run = self._state.run
        own = {"run": run["id"], "origin": run.get("origin", run["id"]), "fits": self._state.position.fits}
        self._about = {"format": FORMAT, **own, "ranks": ranks, "facts": self._facts()}
        on_first(world, self._open)

    def _open(self) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = _opened(self._path)
            if self._file.tell():
                self._file.write("\n")  # a process that was killed may have left a part of a line
        except OSError as error:
            raise CheckpointError(
                f"log_hashes: cannot write to {self._path}: {reason_of(error)}. Choose another checkpoint_dir."
            ) from error

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _facts(self) -> dict[str, Any]:
        """Return what may differ between two runs, by its name in messages."""
        run = self._state.run
        settings = {f"the setting {name}": value for name, value in deciding_settings(self._state.config).items()}
        return {
            **{name: version for name, version in library_versions().items() if name != "torch"},
            "NumPy": np.__version__,
            **self._state.arithmetic,
            "the number of ranks": self._ddp.world.size,
            "the training data (hash)": run.get("data"),
            "the validation data (hash)": run.get("validation"),
            "data, shapes and optimizer options (hash)": run.get("program"),
            **settings,
        }

    @contextlib.contextmanager
    def of_step(self) -> Iterator[None]:
        """Log the step that is taken within, if its number is a multiple of k. All ranks call it."""
        step = self._state.position.step + 1
        if step % self._every:
            yield
            return
        self._gradients.clear()
        start = self._hashes_of_state()
        self._ddp.observe(self._add_gradient)
        try:
            yield
        finally:
            self._ddp.observe(None)
        names = [name for name, _ in self._ddp.module.named_parameters()]
        by_slice = {number: [*map(found.get, names)] for number, found in self._gradients.items()}
        average = by_slice.pop(ALL_SLICES, [])
        own = {"start": start, "slices": by_slice, "average": average, "end": self._hashes_of_state()}
        self._write_step(step, self._ddp.world.gather_json(own))
        if step == self._last_step:
            # No rank ends before rank 0 has written the line.
            self._ddp.world.gather("")
            raise on_all_ranks(SystemExit(0))

    def _add_gradient(self, number: int, name: str, gradient: Tensor) -> None:
        self._gradients[number][name] = _hashes([gradient])[0]

    def _hashes_of_state(self) -> list[str]:
        return _hashes([*self._ddp.module.parameters(), *self._ddp.module.buffers()])

    def _write_step(self, step: int, ranks: Sequence[Mapping[str, Any]]) -> None:
        if self._file is None:
            return
        module = self._ddp.module
        names = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
        if names != self._names:
            self._names = names
            self._write({**self._about, "tensors": names})
        slices = {number: hashes for each in ranks for number, hashes in each["slices"].items()}
        by_rank = {part: _without_repeats([each[part] for each in ranks]) for part in ("start", "average", "end")}
        epoch = self._state.position.epoch + 1
        self._write({"step": step, "epoch": epoch, **by_rank, "slices": dict(sorted(slices.items(), key=_number))})

    def _write(self, values: Mapping[str, Any]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(values, separators=(",", ":"), default=repr) + "\n")
            self._file.flush()
        except OSError as error:
            warn(f"log_hashes: cannot write to {self._path}: {reason_of(error)}. Training continues without hashes.")
            with contextlib.suppress(OSError):  # it flushes again
                self._file.close()
            self._file = None


def make_hash_log(
    config: DistributedTrainingConfig, state: TrainingState, ddp: DistributedDataParallel
) -> HashLog | None:
    """Return where a fit logs hashes; None: `log_hashes` is not set."""
    if config.log_hashes is None:
        return None
    path = hashes_file(config, state.run)
    replay = process_env.replay()
    last_step = None if replay is None else replay.step
    return HashLog(config.log_hashes, path, state, ddp, last_step=last_step)


def _opened(path: Path) -> TextIO:
    return open(path, "a", encoding="utf-8", opener=regular_opener)


def _hashes(tensors: Sequence[Tensor]) -> list[str]:
    return [f"{each % 16**_DIGITS:0{_DIGITS}x}" for each in fingerprints(tensors)]


def _without_repeats(ranks: Sequence[Any]) -> list[Any]:
    """Return a value per rank; None for one that is equal to rank 0's."""
    first, *others = ranks
    return [first, *(None if each == first else each for each in others)]


def _number(item: tuple[str, Any]) -> int:
    return int(item[0])
