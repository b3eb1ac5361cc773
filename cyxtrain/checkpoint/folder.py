"""A folder of checkpoints: file names, which is newest, pruning, and files that killed writers left."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cyxtrain.checkpoint.checkpoint_file import STATE, STATE_LIMIT_BYTES
from cyxtrain.checkpoint.files import TEMPORARY_SUFFIX, is_being_written, replacing, try_folder
from cyxtrain.checkpoint.format.archive import read_record
from cyxtrain.checkpoint.format.encoding import decode_tree
from cyxtrain.checkpoint.validation import is_position, is_run
from cyxtrain.environment.regular_files import open_regular

SUFFIX = ".ckpt"
BEST = "best"


@dataclass(frozen=True)
class Found:
    """A checkpoint in a folder, as far as its JSON tells; without position and run if it is corrupt."""

    path: Path
    position: dict[str, Any]
    run: dict[str, Any]

    @property
    def fits(self) -> int | None:
        """Which call of `fit` of its trainer made it, from 1; None if unknown."""
        return self.position.get("fits")

    @property
    def order(self) -> tuple[float, int, int]:
        """A sort key from older to newer: by run, then by step."""
        return (self.run.get("started", 0.0), self.position.get("step", 0), self.position.get("epoch", 0))


class CheckpointFolder:
    """The checkpoints that one rank writes to a folder."""

    def __init__(self, path: str | os.PathLike[str], rank: int | None = None) -> None:
        self.path = Path(path)
        self._suffix = SUFFIX if rank is None else f"-rank{rank}{SUFFIX}"
        self._pattern = re.compile(rf"((epoch|step)-\d+|{BEST}){re.escape(self._suffix)}")

    def file(self, name: str) -> Path:
        """Return the file of a checkpoint, such as "epoch-0003"."""
        return self.path / f"{name}{self._suffix}"

    def check(self) -> None:
        """Create the folder, and try to write to it."""
        try_folder(self.path, self.file(BEST).name, "checkpoints")

    def newest_first(self) -> list[Found]:
        """Return the checkpoints, corrupt ones first, then the newest. Cost: reading the JSON of each."""
        with contextlib.suppress(OSError):
            found = [look_into(path) for path in sorted(self.path.iterdir()) if self._pattern.fullmatch(path.name)]
            return sorted(
                found, key=lambda one: (not one.position, one.order, one.path != self.file(BEST)), reverse=True
            )
        return []

    def prune(self, run: object, keep_last: int, newest: Path) -> int:
        """Delete all but the newest of a run and the best one; return how many were deleted.

        The file `newest`, which may not exist yet, stays in any case.
        """
        deleted = 0
        kept = (newest, self.file(BEST))
        own = [one for one in self.newest_first() if one.position and one.run.get("id") == run]
        for one in [one for one in own if one.path not in kept][keep_last - 1 :]:
            with contextlib.suppress(OSError):
                one.path.unlink()
                deleted += 1
        return deleted

    def mark_best(self, path: Path) -> None:
        """Give the checkpoint the name of the best one too: a link, or a copy."""
        best = self.file(BEST)
        link = best.with_name(f".{best.name}{TEMPORARY_SUFFIX}")
        try:
            link.unlink(missing_ok=True)
            os.link(path, link)
            os.replace(link, best)
        except OSError:  # a file system without links
            with replacing(best, "checkpoint") as target, open_regular(path) as source:
                shutil.copyfileobj(source, target)

    def remove_leftovers(self) -> None:
        """Delete the temporary files of writers that were killed."""
        for path in self.path.glob(f".*{SUFFIX}*{TEMPORARY_SUFFIX}"):
            if not is_being_written(path):
                with contextlib.suppress(OSError):
                    path.unlink()


def look_into(path: Path) -> Found:
    """Return what the JSON of a checkpoint says, if its checksum is right; tensors are not read."""
    try:
        with open_regular(path) as file:
            values = json.loads(read_record(file, STATE, STATE_LIMIT_BYTES))
        position, run = decode_tree(values["position"]), decode_tree(values["run"])
        return Found(path, position, run) if is_position(position) and is_run(run) else Found(path, {}, {})
    except Exception:  # loading it reports the error
        return Found(path, {}, {})
