"""Files that are whole or absent: a reader never sees a half-written one, and a failed write leaves the old one."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from cyxtrain.environment.regular_files import open_regular, read_rest
from cyxtrain.errors import CheckpointError, ConfigError

if sys.platform != "win32":
    import fcntl

TEMPORARY_SUFFIX = ".cyxtrain-tmp"
"""How the names of temporary files end; one that is older than its process was left by a kill and may go."""

_REMEDIES = {
    errno.ENOSPC: "Free space there, or choose another folder.",
    errno.EDQUOT: "Free space within your quota, or choose another folder.",
    errno.EACCES: "Allow this user to write there, or choose another folder.",
    errno.EPERM: "Allow this user to write there, or choose another folder.",
    errno.EROFS: "The file system is read-only: choose another folder.",
    errno.EEXIST: "A file is in its place: choose another folder.",
    errno.ENOTDIR: "A part of the path is a file: choose another folder.",
    errno.EISDIR: "The path is a folder: give the name of a file.",
}


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str], what: str) -> Iterator[BinaryIO]:
    """Opens a file that takes the place of `path` when the block ends well, and leaves no trace when it does not.

    A temporary file in the same folder is written and synchronised, then renamed, then the folder is
    synchronised: after the block the new content survives a power cut, and before that the old one does.

    Args:
        path: The file to write; its folder is made where it is missing.
        what: What the file is, for the message, such as "checkpoint".

    Raises:
        CheckpointError: The operating system refuses, with the path, the cause and what to do.
    """
    target = _checked(path, what)
    temporary = _temporary_beside(target)
    try:
        _make_folder(target.parent)
        with open(temporary, "x+b") as file:
            _lock(file)
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
        _synchronise_folder(target.parent)
    except OSError as error:
        raise _refused(f"{what} {target}", error) from error
    finally:
        # After the rename there is nothing of that name. A KeyboardInterrupt passes here too.
        with contextlib.suppress(OSError):
            temporary.unlink()


def try_folder(folder: Path, name: str, what: str) -> None:
    """Makes a folder, and a file in it, which does not stay: whether it can be written to at all.

    Args:
        folder: It need not be there.
        name: Of a file as it will be written.
        what: What the files are, for the message, such as "checkpoints".

    Raises:
        CheckpointError: The operating system refuses, with the path, the cause and what to do.
    """
    temporary = _temporary_beside(folder / name)
    try:
        _make_folder(folder)
        with open(temporary, "x+b") as file:
            _lock(file)
    except OSError as error:
        raise _refused(f"{what} to {folder}", error) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _checked(path: Any, what: str) -> Path:
    """Returns what a user gave as a path.

    Raises:
        ConfigError: It is none.
    """
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
        raise ConfigError(f"the path of a {what} must be a text or a Path, got {path!r}.")
    return Path(path)


def _temporary_beside(target: Path) -> Path:
    # Hidden, so that a pattern such as *.ckpt does not find it; unique, so that two writers do not mix.
    return target.with_name(f".{target.name}.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}")


def _refused(what: str, error: OSError) -> CheckpointError:
    remedy = _REMEDIES.get(error.errno or 0, "Check the disk, or choose another folder.")
    return CheckpointError(f"Cannot write {what}: {error.strerror or error}. {remedy}")


def is_being_written(path: str | os.PathLike[str]) -> bool:
    """Returns whether a temporary file has a writer; where the system cannot tell, it does not let one delete it."""
    try:
        with open_regular(path) as file:
            return not _lock(file)
    except OSError:
        return True  # nobody's business


def read_file(path: str | os.PathLike[str], what: str, look: Callable[[BinaryIO], object] | None = None) -> bytes:
    """Returns the content of a file, read once and completely (a mapped file would crash on a bad disk).

    Args:
        path: Of a regular file.
        what: What it is, for messages, such as "checkpoint".
        look: Is given the file before all of it is read, and raises where it is none.

    Raises:
        CheckpointError: It does not exist or cannot be read, with the path, the cause and what to do.
    """
    try:
        with open_regular(_checked(path, what)) as file:
            if look is not None:
                look(file)
                file.seek(0)
            return read_rest(file)
    except FileNotFoundError as error:
        raise CheckpointError(f"There is no {what} {path}. Check the path (now in {os.getcwd()}).") from error
    except OSError as error:
        raise CheckpointError(f"Cannot read {what} {path}: {error.strerror or error}. Use another file.") from error


def _lock(file: BinaryIO) -> bool:
    """Marks a file as one that is written to, until it is closed, also by a kill; returns whether nobody else does."""
    if sys.platform == "win32":
        return True  # what is open cannot be deleted there
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without locks
    return True


def _make_folder(folder: Path) -> None:
    """Makes a folder and those above it; each entry is synchronised, else a power cut takes the whole folder."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    _synchronise_folder(folder.parent)


def _synchronise_folder(folder: Path) -> None:
    """Makes renames and new names in a folder survive a power cut, where the operating system can."""
    if os.name == "nt":
        return  # Windows opens no folders; its file systems write the journal in order
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems have no such call: there is nothing more that we could do.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
