"""Paths that a user gives, and files that a user or a folder names: regular files only, without ever blocking."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import stat
import types
import urllib.parse
from pathlib import Path
from typing import Any, BinaryIO

from cyxtrain.errors import ConfigError, brief

TEXT_LIMIT_BYTES = 1 << 28
"""Longer than any text that a person or this package writes."""
# More than the end records of a zip with the longest comment.
_LAST_RECORDS_BYTES = 1 << 17

# Also one that `pathlib.Path` has normalized, to a single slash; a drive of Windows has one letter.
_URL = re.compile(r"(?s)([A-Za-z][A-Za-z0-9+.-]+):(/+)(.*)")
_CGROUPS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe (FIFO)",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
# Windows has none of them. They open a pipe without waiting for a writer, never make a terminal the controlling one,
# and keep the file from child processes.
_FLAGS = sum(getattr(os, name, 0) for name in ("O_NONBLOCK", "O_CLOEXEC", "O_NOCTTY"))


def local_path(argument: str, path: Any) -> str:
    """Return a path that a user gives: "~" is the home folder, and "file:///x" is "/x".

    All paths of the public interface pass through here or through `path_or_url`. Raises ConfigError, with the name of
    the argument, for other URLs and for values that are not paths.
    """
    found = path_or_url(argument, path)
    if not url_of(found):
        return found
    raise ConfigError(
        f"{argument} is {brief(str(path))}, a URL: only files and folders of this machine are supported here. Give a "
        "path, such as the one where the store is mounted. checkpoint_dir, resume, CSVLogger, predict's output_dir, "
        "YAML files, and the files of checkpoints, weights and histories may be URLs."
    )


def path_or_url(argument: str, path: Any) -> str:
    """Return a path as `local_path` does, or the URL of a store as fsspec takes it, such as "s3://bucket/run".

    A `UPath` is either of them; one with options of its own is refused: they would be lost where the path travels.
    """
    is_path = isinstance(path, (str, os.PathLike)) or _is_upath(path)
    if not is_path or not str(path).strip() or "\0" in str(path):
        raise ConfigError(f"{argument} must be a path, got {brief(repr(path))}.")
    if _is_upath(path):
        if path.storage_options:
            raise ConfigError(
                f"{argument} is a UPath with storage_options, which only this process would know. Set them for all "
                "ranks in fsspec's configuration, such as FSSPEC_S3_ENDPOINT_URL, and give the URL alone."
            )
        path = str(path)
    url = url_of(path)
    of_file = _URL.fullmatch(str(path))
    if url or of_file is None:
        return url or os.path.expanduser(os.fsdecode(path))
    if len(of_file[2]) == 2:  # these slashes precede the name of a machine
        raise ConfigError(
            f"{argument} is {brief(str(path))}, a URL: only files and folders of this machine are supported. Give "
            "a path, such as the one where that machine's disk is mounted."
        )
    return "/" + urllib.parse.unquote(of_file[3])


def url_of(path: Any) -> str:
    """Return the URL of a store in the form that fsspec takes; "" for a path of this machine."""
    url = _URL.fullmatch(str(path))
    if url is None or url[1].lower() == "file":
        return ""
    slashes = url[2]
    if len(slashes) == 1:  # `pathlib.Path` has removed the other one
        slashes = "//"
    return f"{url[1].lower()}:{slashes}{url[3].rstrip('/')}"


def _is_upath(path: Any) -> bool:
    """Return whether a value is a path of universal_pathlib, which need not be installed."""
    return type(path).__module__.partition(".")[0] == "upath"


def regular_opener(path: str, flags: int) -> int:
    """Open a regular file; an `opener` for Python's `open`, whose OSError names another kind of file."""
    refuse_others(path)  # before opening, which can have effects on a device
    descriptor = os.open(path, flags | _FLAGS, 0o666)
    try:
        _require_regular(os.fstat(descriptor).st_mode, path)  # another file may have replaced it meanwhile
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def open_regular(path: str | os.PathLike[str]) -> io.BufferedReader:
    """Open a regular file to read bytes of it."""
    try:
        return open(path, "rb", opener=regular_opener)
    except ValueError:
        raise OSError(errno.EINVAL, "no file can have this name", path) from None


def read_rest(file: io.BufferedReader, limit_bytes: int | None = None) -> bytes:
    """Return the rest of an open file; refuse more than a limit (None: the memory of this machine)."""
    size_bytes = os.fstat(file.fileno()).st_size
    allowed = "may have"
    if limit_bytes is None:
        allowed = "this machine's memory has"
        limit_bytes = memory_bytes()
    if size_bytes > limit_bytes:
        raise OSError(errno.EFBIG, f"it has {size_bytes:,} bytes, and {allowed} {limit_bytes:,}", file.name)
    try:
        return file.read(max(size_bytes - file.tell(), 0))
    except MemoryError:
        raise OSError(errno.ENOMEM, f"its {size_bytes:,} bytes do not fit into memory", file.name) from None


def read_text(path: str | os.PathLike[str], limit_bytes: int = TEXT_LIMIT_BYTES) -> str:
    """Return the content of a regular file as a string, from UTF-8."""
    with open_regular(path) as file:
        return read_rest(file, limit_bytes).decode("utf-8")


def at_a_glance(file: BinaryIO, limit_bytes: int) -> Any:
    """Return a file for `zipfile` that refuses reads above a limit, whatever its records say."""

    def read(size: int = -1) -> bytes:
        wanted = _LAST_RECORDS_BYTES if size < 0 else size
        if wanted > limit_bytes:
            raise ValueError(f"its records announce {wanted:,} bytes, and at most {limit_bytes:,} are allowed")
        return file.read(wanted)

    return types.SimpleNamespace(read=read, seek=file.seek, tell=file.tell, seekable=file.seekable)


def refuse_others(path: str | os.PathLike[str]) -> None:
    """Raise OSError if a path is anything other than a regular file; a missing one is allowed."""
    with contextlib.suppress(FileNotFoundError):  # a new file
        _require_regular(os.stat(path).st_mode, os.fspath(path))


def _require_regular(mode: int, path: str) -> None:
    if stat.S_ISREG(mode):
        return
    kind = _KINDS.get(stat.S_IFMT(mode), "something else")
    code = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
    raise OSError(code, f"it is {kind}, not a file", path)


def memory_bytes() -> int:
    """Return how much memory the machine and the container allow this process."""
    import psutil

    found = [int(psutil.virtual_memory().total)]
    for file in _CGROUPS:
        with contextlib.suppress(OSError, ValueError):  # "max": no limit
            found.append(int(Path(file).read_text()))
    return min(found)
