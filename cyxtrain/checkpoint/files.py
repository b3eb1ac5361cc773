"""Files that are complete or absent: readers never see half a file; a failed write keeps the old one."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from cyxtrain.checkpoint.remote_files import read_remote, staging_folder, upload
from cyxtrain.environment.regular_files import local_path, open_regular, path_or_url, read_rest, refuse_others, url_of
from cyxtrain.errors import CheckpointError

if sys.platform != "win32":
    import fcntl

TEMPORARY_SUFFIX = ".cyxtrain-tmp"
_unfinished: dict[Path, BinaryIO] = {}
"""Temporary files that this process is writing."""
# How long a writer tries to lock its file, which other processes lock for a moment to see whether it has a writer.
_LOCK_SECONDS = 1.0

_REMEDIES = {
    errno.ENOSPC: "Free space there, or choose another folder.",
    errno.EDQUOT: "Free space within your quota, or choose another folder.",
    errno.EACCES: "Allow this user to write there, or choose another folder.",
    errno.EPERM: "Allow this user to write there, or choose another folder.",
    errno.EROFS: "The file system is read-only: choose another folder.",
    errno.EEXIST: "A file is in its place: choose another folder.",
    errno.ENOTDIR: "A part of the path is a file: choose another folder.",
    errno.EISDIR: "Give the name of a file.",
    errno.EINVAL: "Give the name of a file.",
    errno.ENAMETOOLONG: "Give a shorter name.",
}


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str], what: str, *, synchronizes: bool = True) -> Iterator[BinaryIO]:
    """Open a file that replaces `path` when the block succeeds, and leaves nothing when it fails.

    A temporary file in its folder is written, synchronized and renamed, then the folder is synchronized: after a power
    cut the file has its old content or, after the block, the new one; without `synchronizes`, only after a kill. The
    URL of a store is written to a local folder, and uploaded when the block succeeds.
    """
    url = url_of(path_or_url(f"the path of a {what}", path))
    if not url:
        with _replacing_local(path, what, synchronizes=synchronizes) as file:
            yield file
        return
    folder = staging_folder(url)
    staged = folder / url.rpartition("/")[2]
    try:
        with _replacing_local(staged, what, synchronizes=False) as file:
            yield file
        upload(staged, url)
    finally:
        with contextlib.suppress(OSError):  # it was not written, or another process writes the same file
            staged.unlink()
            folder.rmdir()


@contextlib.contextmanager
def _replacing_local(path: str | os.PathLike[str], what: str, *, synchronizes: bool) -> Iterator[BinaryIO]:
    target = Path(local_path(f"the path of a {what}", path))
    with temporary_file(target, f"{what} {target}") as (file, temporary):
        refuse_others(target)  # renaming would replace a device by a file
        yield file
        file.flush()
        if synchronizes:
            os.fsync(file.fileno())  # a power cut must not leave the new name without content
        file.close()  # Windows does not rename open files
        os.replace(temporary, target)
        if synchronizes:
            _synchronize_folder(target.parent)  # nor lose the new name


def try_folder(folder: Path, name: str, what: str) -> None:
    """Create a folder, and a file in it that is removed again."""
    with temporary_file(folder / name, f"{what} to {folder}"):
        pass


def _leave_files() -> None:
    """Release the parent's files and locks in a forked process: a loader's worker may outlive the parent."""
    for file in _unfinished.values():
        with contextlib.suppress(ValueError), open(os.devnull, "r+b") as nothing:  # it is closed
            os.dup2(nothing.fileno(), file.fileno(), inheritable=False)
    _unfinished.clear()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_leave_files)


@contextlib.contextmanager
def temporary_file(target: Path, what: str) -> Iterator[tuple[BinaryIO, Path]]:
    """Open a locked file in the folder of `target`, and remove it afterwards unless the block renames it."""
    # Hidden, so that a pattern such as *.ckpt does not find it; unique, so that two writers do not mix.
    temporary = target.parent / f".{target.name}.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}"
    try:
        _make_folder(target.parent)
        with _create_locked(temporary) as file:
            yield file, temporary
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "Check the disk, or choose another folder.")
        raise CheckpointError(f"Cannot write {what}: {error.strerror or error}. {remedy}") from error
    finally:  # also after a KeyboardInterrupt
        with contextlib.suppress(OSError):  # complete: it was renamed
            temporary.unlink()
        _unfinished.pop(temporary, None)


def _create(path: Path) -> BinaryIO:
    return open(path, "x+b")


def _create_locked(path: Path) -> BinaryIO:
    """Create and lock a temporary file; again, if `remove_leftover` has removed it between the two."""
    while True:
        file = _create(path)
        _unfinished[path] = file
        with contextlib.suppress(OSError):  # a file system without locks
            _lock_as_writer(file)
        if os.path.exists(path):
            return file
        file.close()


def remove_unfinished() -> None:
    """Remove temporary files that will not be completed, because this process ends at once."""
    for temporary in list(_unfinished):
        with contextlib.suppress(OSError):  # completed meanwhile
            temporary.unlink()


def is_locked(path: str | os.PathLike[str]) -> bool | None:
    """Return whether a temporary file has a writer; None if that is unknown."""
    try:
        with open_regular(path) as file:
            _lock(file, shared=True)
    except BlockingIOError:
        return True
    except OSError:  # it is gone, or its file system has no locks
        return None
    return False


def remove_leftover(path: Path) -> None:
    """Remove a temporary file if it certainly has no writer."""
    with contextlib.suppress(OSError), open_regular(path) as file:
        # Locked until it is removed: a process that has just created it waits, and finds it gone.
        _lock(file, shared=True)
        if sys.platform == "win32":
            file.close()
        path.unlink()


@contextlib.contextmanager
def open_to_read(path: str | os.PathLike[str], what: str) -> Iterator[io.BufferedReader | io.BytesIO]:
    """Open a regular file, or the content of a URL in memory."""
    url = url_of(path_or_url(f"the path of a {what}", path))
    if url:
        yield io.BytesIO(read_remote(url, what))
        return
    try:
        with open_regular(local_path(f"the path of a {what}", path)) as file:
            yield file
    except FileNotFoundError as error:
        raise CheckpointError(f"There is no {what} {path}. Check the path (now in {os.getcwd()}).") from error
    except OSError as error:
        raise CheckpointError(f"Cannot read {what} {path}: {error.strerror or error}. Use another file.") from error


def content_of(file: io.BufferedReader | io.BytesIO) -> bytes:
    """Return all of a file that `open_to_read` has opened."""
    if isinstance(file, io.BytesIO):
        return file.getvalue()
    file.seek(0)
    # Read, not mapped: a mapped file would crash the process on a bad disk.
    return read_rest(file)


def read_file(path: str | os.PathLike[str], what: str, look: Callable[[BinaryIO], object] | None = None) -> bytes:
    """Return the content of a regular file or of a URL; `look` may refuse the open file before all of it is read."""
    with open_to_read(path, what) as file:
        if look is not None:
            look(file)
        return content_of(file)


def _lock(file: BinaryIO, *, shared: bool = False) -> None:
    """Lock a file while it is open; raise BlockingIOError if another process has locked it."""
    if sys.platform == "win32":
        return  # open files cannot be deleted there
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    fcntl.flock(file, kind | fcntl.LOCK_NB)


def _lock_as_writer(file: BinaryIO) -> None:
    """Lock a file that this process writes; others hold their locks for a moment only."""
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            return _lock(file)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.001)


def _make_folder(folder: Path) -> None:
    """Create a folder and its parents durably: each new entry is synchronized."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    _synchronize_folder(folder.parent)


def _synchronize_folder(folder: Path) -> None:
    """Make new and renamed entries of a folder survive a power cut, where the system can."""
    if os.name == "nt":
        return  # Windows cannot open folders
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems do not support it.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
