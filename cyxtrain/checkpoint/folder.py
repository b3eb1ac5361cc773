"""A folder of checkpoints: file names, which is newest, pruning, and files that killed writers left."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import re
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from cyxtrain.checkpoint.checkpoint_file import STATE, checkpoint_bytes
from cyxtrain.checkpoint.files import (
    TEMPORARY_SUFFIX,
    is_locked,
    remove_leftover,
    replacing,
    temporary_file,
    try_folder,
)
from cyxtrain.checkpoint.format.archive import MANIFEST, blaming, read_summary
from cyxtrain.checkpoint.format.encoding import decode_tree
from cyxtrain.checkpoint.remote_files import (
    RemoteEnd,
    is_missing,
    list_files,
    read_remote,
    remove_remote,
    staging_folder,
)
from cyxtrain.checkpoint.validation import is_position, is_run
from cyxtrain.environment.regular_files import local_path, open_regular, read_text, url_of
from cyxtrain.errors import CheckpointError, brief

SUFFIX = ".ckpt"
BEST = "best"
ID_CHARACTERS = 8
"""Characters of a run's id in the names of files and in messages."""
_CLAIM = "run-"
# Most bytes that are read of a file to look into it.
_LIMIT_BYTES = 1 << 20


@dataclass(frozen=True)
class Found:
    """A checkpoint in a folder, as far as its manifest tells; without position and run if it is corrupt."""

    path: Path
    """Its local file; in a store: the local file of that name, which need not exist."""
    position: dict[str, Any]
    run: dict[str, Any]
    problem: str = field(default="", compare=False)
    """Why it is corrupt."""
    url: str = ""
    """Where it is in a store; "": it is local."""

    @property
    def where(self) -> str:
        """Its path or URL."""
        return self.url or str(self.path)

    @property
    def fits(self) -> int | None:
        """Which call of `fit` of its trainer made it, from 1; None if unknown."""
        return self.position.get("fits")

    @property
    def is_best(self) -> bool:
        """Whether it has the name of a best one."""
        return self.path.name.startswith(BEST)

    @property
    def origin(self) -> str | None:
        """The id of the first run of its training."""
        return self.run.get("origin", self.run.get("id"))

    @property
    def order(self) -> tuple[float, int, int]:
        """A sort key from older to newer: by run, then by step."""
        return (self.run.get("started", 0.0), self.position.get("step", 0), self.position.get("epoch", 0))

    def read(self) -> bytes:
        """Return the file's bytes, not verified yet."""
        if self.url:
            return read_remote(self.url, "checkpoint")
        return checkpoint_bytes(self.path)

    def remove(self) -> None:
        """Delete it."""
        if self.url:
            remove_remote(self.url)
        else:
            self.path.unlink()


class CheckpointFolder:
    """The checkpoints that one rank writes to a folder.

    If that is the URL of a store, they are written to a local folder first, and wait there until they are uploaded.
    """

    def __init__(self, path: str | os.PathLike[str], rank: int | None = None) -> None:
        self.url = url_of(path)
        """Where the checkpoints go in a store; "": they stay in the folder `path`."""
        if self.url:
            self.path = staging_folder(self.url)
        else:
            self.path = Path(local_path("checkpoint_dir", path))
        self.infix = ""
        """Part of the names of files, if other runs are writing to the folder."""
        self._suffix = SUFFIX if rank is None else f"-rank{rank}{SUFFIX}"
        self._pattern = re.compile(rf"((epoch|step)-\d+|{BEST})(-[0-9a-f]{{8}})?{re.escape(self._suffix)}")

    def file(self, name: str) -> Path:
        """Return the file of a checkpoint, such as "epoch-0003"."""
        return self.path / f"{name}{self.infix}{self._suffix}"

    def aside(self, name: str, run: Mapping[str, Any]) -> str:
        """Return the name of a file with a run's id in it."""
        infix = infix_of(run)
        begin = name.removesuffix(self._suffix).removesuffix(infix)
        return f"{begin}{infix}{self._suffix}"

    def check(self) -> None:
        """Create the folder, and try to write to it."""
        try_folder(self.path, self.file(BEST).name, "checkpoints")

    def newest_first(self) -> list[Found]:
        """Return the checkpoints, corrupt ones first, then the newest; of a store's, local ones first among equals.

        Raises CheckpointError if a store does not answer. Cost: reading the manifest of each; in a store a listing, and
        a request for each file that has not been read before.
        """
        return sorted([*self._local(), *self.in_store()], key=_age, reverse=True)

    def _local(self) -> list[Found]:
        with contextlib.suppress(OSError):
            # A new folder does not exist yet.
            paths = [path for path in sorted(self.path.iterdir()) if self._pattern.fullmatch(path.name)]
            return [*map(look_into, paths)]
        return []

    def in_store(self) -> list[Found]:
        """Return the checkpoints in the store; [] without a store."""
        found: list[Found] = []
        if not self.url:
            return found
        for name, (size_bytes, version) in sorted(list_files(self.url).items()):
            if self._pattern.fullmatch(name):
                try:
                    found.append(_look_into_remote(self.path / name, f"{self.url}/{name}", size_bytes, version))
                except CheckpointError as error:
                    # Another process may have deleted it meanwhile.
                    if not is_missing(error):
                        raise
        return found

    def best(self, run: object) -> Found | None:
        """Return the best checkpoint of a run."""
        # If there is a local one, those in a store are older: it need not answer.
        for kept in (self._local, self.in_store):
            for found in sorted(kept(), key=_age, reverse=True):
                if found.is_best and found.run.get("id") == run:
                    return found
        return None

    def claim(self, run: Mapping[str, Any], claim: contextlib.ExitStack) -> bool:
        """Tell other processes that a run writes here, until `claim` is closed.

        Returns False if another process already continues the run.
        """
        claim.close()
        with contextlib.suppress(CheckpointError):  # `check` reports it
            target = self.path / f"{_CLAIM}{run.get('id')}{SUFFIX}"
            file, _ = claim.enter_context(temporary_file(target, f"checkpoints to {self.path}"))
            file.write(writer_of(run).encode())
            file.flush()
            if len(self._claims(run.get("id"))) > 1:
                claim.close()
                return False
        return True

    def live_runs(self) -> dict[str, str]:
        """Return the names of the runs whose processes write here, by id; none on file systems without locks."""
        found = {}
        for path in self._claims("*"):
            with contextlib.suppress(OSError, ValueError):  # the run has just ended
                run = path.name.removeprefix(f".{_CLAIM}").partition(".")[0]
                found[run] = brief(read_text(path, _LIMIT_BYTES))
        return found

    def _claims(self, run: object) -> list[Path]:
        """Return the claims of a run, or of all runs ("*"), whose processes are alive."""
        return [path for path in self._hidden(f".{_CLAIM}{run}{SUFFIX}.*{TEMPORARY_SUFFIX}") if is_locked(path)]

    def _hidden(self, pattern: str) -> list[Path]:
        with contextlib.suppress(OSError):  # `check` reports it
            return list(self.path.glob(pattern))
        return []

    def prune(self, run: object, keep_last: int, newest: Path) -> int:
        """Delete all but the newest checkpoints of a run and the best one, in a store there; return how many.

        The file `newest`, which may not exist yet, stays in any case.
        """
        intact = [found for found in self.newest_first() if found.position and found.run.get("id") == run]
        # Local files of a store are those that wait for it.
        there = [found for found in intact if bool(found.url) == bool(self.url)]
        older = [found for found in there if found.path != newest and not found.is_best]
        deleted = 0
        for found in older[keep_last - 1 :]:  # the newest one is among those that are kept
            with contextlib.suppress(OSError):  # another process has deleted it
                found.remove()
                deleted += 1
        return deleted

    def mark_best(self, path: Path) -> None:
        """Give the checkpoint the name of the best one too: a link, or a copy."""
        best = self.file(BEST)
        link = best.with_name(f".{best.name}{TEMPORARY_SUFFIX}")
        try:
            link.unlink(missing_ok=True)
            os.link(path, link)  # under a name of its own: a link replaces nothing
            os.replace(link, best)
        except OSError:  # a file system without links, or a folder in its place
            with contextlib.suppress(OSError):  # a link that stays would keep the space of a deleted checkpoint
                link.unlink()
            with replacing(best, "checkpoint") as target, open_regular(path) as source:
                shutil.copyfileobj(source, target)

    def remove_leftovers(self) -> None:
        """Delete the temporary files of writers that were killed."""
        for path in self._hidden(f".*{SUFFIX}*{TEMPORARY_SUFFIX}"):
            remove_leftover(path)


def newest_in(path: str | os.PathLike[str]) -> Found | None:
    """Return the newest intact checkpoint of a folder: rank 0's, if each rank has written its own; None: no intact one.

    Cost: reading the manifest of each.
    """
    names = (CheckpointFolder(path), CheckpointFolder(path, rank=0))
    intact = [found for folder in names for found in folder.newest_first() if found.position]
    return max(intact, key=_age, default=None)


def _age(found: Found) -> tuple[bool, tuple[float, int, int], bool]:
    """Return a sort key from older to newer, corrupt ones last."""
    return (not found.position, found.order, not found.is_best)


def infix_of(run: Mapping[str, Any]) -> str:
    """Return the part of a file's name that tells its run, if other runs write to the folder."""
    return f"-{str(run.get('id'))[:ID_CHARACTERS]}"


def name_of(run: Mapping[str, Any]) -> str:
    """Return a run's name for messages: the beginning of its id, and when it began."""
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.get("started", 0)))
    return f"run {str(run.get('id'))[:ID_CHARACTERS]} (begun {began})"


def writer_of(run: Mapping[str, Any]) -> str:
    """Return the name of a run that this process writes, for messages of others."""
    return f"{name_of(run)} in process {os.getpid()} on {platform.node()}"


def look_into(path: str | os.PathLike[str]) -> Found:
    """Return the position and the run of a checkpoint, by its manifest or, if older, its state.json."""
    url = url_of(path)
    if url:
        name = url.rpartition("/")[2]
        size_bytes, version = list_files(url).get(name, (0, ""))
        return _look_into_remote(Path(name), url, size_bytes, version)
    return _look_into(Path(path), "", lambda: open_regular(path))


@functools.lru_cache(4096)
def _look_into_remote(path: Path, url: str, size_bytes: int, version: str) -> Found:
    """As `_look_into`, in a store; `version` tells a file apart from others that have had its name."""
    end = RemoteEnd(url, size_bytes)  # an error here is not the file's
    return _look_into(path, url, lambda: end)


def _look_into(path: Path, url: str, opened: Callable[[], AbstractContextManager[BinaryIO]]) -> Found:
    try:
        with blaming(url or str(path), MANIFEST), opened() as file:
            values = read_summary(file, STATE, _LIMIT_BYTES)
            found = Found(path, decode_tree(values["position"]), decode_tree(values["run"]), url=url)
            if not (is_position(found.position) and is_run(found.run)):
                raise ValueError("the position or the run in it is invalid")
    except (CheckpointError, MemoryError) as error:
        return Found(path, {}, {}, str(error), url)
    return found
