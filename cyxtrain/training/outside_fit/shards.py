"""Writing predictions to a folder in shards; a call that was killed continues with the shards that are missing.

A shard is a group of neighboring batches, which one rank predicts and writes. Their sizes do not depend on the number
of ranks, and so neither do the files.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from cyxtrain.checkpoint.files import TEMPORARY_SUFFIX, is_being_written, replacing, try_folder
from cyxtrain.data.batches.specs import form_of
from cyxtrain.data.batches.structure import fields_of, output_parts, same_sequence
from cyxtrain.environment.regular_files import read_text
from cyxtrain.errors import ConfigError, brief
from cyxtrain.metrics.whole_set import as_numpy
from cyxtrain.tensors.fingerprint import fingerprint
from cyxtrain.training.inputs.checked_data import CheckedData
from cyxtrain.training.outside_fit.saved_predictions import FORMAT, INDEX, Predictions, file_of, read_index
from cyxtrain.world import runtime
from cyxtrain.world.agreement import agree_on, on_master

SHARD_BYTES = 64 << 20
_FEWEST_SHARDS = 64  # if there are as many batches: many ranks then have equal shares
_STREAM_BATCHES = 16  # of a shard, at most, if their number is unknown
_SAME = "the folder output_dir (without a file system that all ranks share: distributed=False, and a folder for each)"


class ShardFolder:
    """The folder of a prediction, new or continued; all ranks that share the rows make one.

    Attributes:
        group: Batches of a shard.
        done: Numbers of shards that are complete.
        is_complete: Whether all are.

    Raises:
        ConfigError: It has something else, or not all ranks see it.
    """

    def __init__(
        self, path: str | os.PathLike[str], model: nn.Module, rows: CheckedData, output: Any, *, distributed: bool
    ) -> None:
        self.path, self._distributed = Path(path).absolute(), distributed
        self._names, self._rows = [name for name, _ in output_parts(output)], rows
        state: dict[str, Any] = {}
        self._on_writer(lambda: state.update(self._begin(_facts(model, rows), output)))
        if distributed:
            state = json.loads(runtime.gather_texts(json.dumps(state))[0])
            agree_on(lambda: (None, {_SAME: self._time_of_index()}))
        self.group: int = state["group"]
        self.done, self.is_complete = frozenset[int](state["done"]), bool(state["complete"])

    def _on_writer(self, action: Callable[[], object]) -> None:
        """Do something on rank 0, and raise its error on all ranks; on this rank, if it works alone."""
        on_master(action, together=True) if self._distributed else action()

    def _time_of_index(self) -> int | None:
        with contextlib.suppress(OSError):
            return (self.path / INDEX).stat().st_mtime_ns
        return None

    def _begin(self, facts: dict[str, Any], output: Any) -> dict[str, Any]:
        """Create the folder and its index, or check them; return what the other ranks must know."""
        try_folder(self.path, INDEX, "predictions")
        for leftover in self.path.glob(f".*{TEMPORARY_SUFFIX}"):
            if not is_being_written(leftover):
                leftover.unlink(missing_ok=True)
        names = sorted(each.name for each in self.path.iterdir() if not each.name.startswith("."))
        if names and INDEX not in names:
            raise ConfigError(f"output_dir {self.path} has files ({brief(names)}) and no {INDEX}: give an empty one.")
        if not names:
            index: dict[str, Any] = {"format": FORMAT, "of": facts, "output": form_of(_plain(output))}
            index |= {"numpy": self._rows.source.is_numpy, "batches_per_shard": _group_size(self._rows, output)}
            index |= {"complete": False, "pad_value": None, "parts": [], "shards": []}
            _write_json(self.path / INDEX, index)
        found = read_index(self.path)
        for what, value in json.loads(json.dumps(facts)).items():
            before = found["of"].get(what)
            if value != before:
                raise ConfigError(
                    f"output_dir {self.path} has other predictions: {what} was {brief(before)}, and now is "
                    f"{brief(value)}. Choose another folder, or delete that one."
                )
        shards = [int(match[1]) for name in names if (match := re.fullmatch(r"shard-(\d+)\.json", name))]
        return {"group": found["batches_per_shard"], "done": shards, "complete": found["complete"]}

    def write(self, shard: int, batches: list[dict[str, list[Tensor]]]) -> None:
        """Write the outputs of the batches of a shard."""
        record: dict[str, list[Any]] = {"kinds": [], "shapes": []}
        for part, name in enumerate(self._names):
            tensors = [piece for batch in batches for piece in batch[name]]
            alike = itertools.groupby(tensors, lambda tensor: tensor.shape[1:])
            shapes = [[sum(map(len, group)), *shape] for shape, group in alike]
            joined = torch.cat(tensors if len(shapes) == 1 else [tensor.reshape(-1) for tensor in tensors])
            with replacing(file_of(self.path, shard, part), "predictions") as file:
                np.save(file, as_numpy(joined))
            record["kinds"].append(f"{str(joined.dtype).removeprefix('torch.')} of {tensors[0].dim()} dimensions")
            record["shapes"].append(shapes)
        _write_json(file_of(self.path, shard), record)
        self.done |= {shard}

    def finish(self, pad_value: float | None, *, is_ended: bool) -> Predictions:
        """Write the index; return the predictions. If a callback has ended the call, they are the first shards."""
        last = str(max(self.done, default=-1))
        count = 1 + max(map(int, runtime.gather_texts(last) if self._distributed else [last]))

        def write() -> None:
            records: list[dict[str, Any]] = []
            with contextlib.suppress(FileNotFoundError) if is_ended else contextlib.nullcontext():
                for shard in range(count):
                    records.append(json.loads(read_text(file_of(self.path, shard))))
            kinds = [record["kinds"] for record in records]
            if any(kind != kinds[0] for kind in kinds):
                raise ConfigError(f"predict needs rows of one kind; the model's outputs differ: {brief(kinds)}.")
            parts = [
                {"dtype": kind.split()[0], "rows_second": name in self._rows.rows_second}
                for name, kind in zip(self._names, kinds[0] if kinds else (), strict=False)
            ]
            found = {"complete": not is_ended, "pad_value": pad_value, "parts": parts}
            shapes = [record["shapes"] for record in records]
            _write_json(self.path / INDEX, {**read_index(self.path), **found, "shards": shapes})

        self._on_writer(write)
        return Predictions(self.path)


def _write_json(path: Path, value: Any) -> None:
    with replacing(path, "predictions") as file:
        file.write(json.dumps(value).encode())


def _group_size(rows: CheckedData, output: Any) -> int:
    """Return how many batches a shard has, by the sizes of the dry run's output."""
    parts = ((name in rows.rows_second, part) for name, part in output_parts(output))
    row_bytes: int = sum(part.nbytes // max(1, part.shape[second]) for second, part in parts)
    batches = rows.source.num_batches(rows.batch_size)
    most = _STREAM_BATCHES if batches is None else -(-batches // _FEWEST_SHARDS)
    return max(1, min(most, SHARD_BYTES // max(1, row_bytes * rows.batch_size)))


def _facts(model: nn.Module, rows: CheckedData) -> dict[str, Any]:
    """Return what a folder's predictions are of; of a stream, the first batch stands for the others."""
    digest = xxhash.xxh3_64()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        digest.update(f"{name} {fingerprint(tensor)}".encode())
    return {
        "the model": type(model).__name__,
        "the weights' hash": digest.hexdigest(),
        "the precision": str(rows.call.precision.dtype),
        "the batch size": rows.batch_size,
        "the number of batches": rows.source.num_batches(rows.batch_size),
        "the first batch": rows.source.summary(),
        **rows.source.facts("the given"),
    }


def _plain(output: Any) -> Any:
    """Return a model's output with dictionaries for dataclasses."""
    named = fields_of(output)
    if named is not None:
        return {str(name): _plain(part) for name, part in named.items()}
    return same_sequence(output, map(_plain, output)) if isinstance(output, (tuple, list)) else output
