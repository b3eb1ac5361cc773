"""Files in stores that fsspec reaches by URL, such as S3: a file has its name there only when it is complete.

Object stores are like that by themselves. In others, a file is written under a temporary name and renamed.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import posixpath
import re
import secrets
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import xxhash

from cyxtrain.environment import process_env
from cyxtrain.environment.regular_files import TEXT_LIMIT_BYTES, memory_bytes, path_or_url, read_text, url_of
from cyxtrain.errors import CheckpointError, ConfigError, CyxtrainError, brief, reason_of

START_SECONDS = 5.0
"""How long a store may take to answer at the start of a fit."""
_PART_BYTES = 8 << 20
_PARTS_AT_ONCE = 3
# S3's limit: larger files have larger parts.
_MOST_PARTS = 10_000
# More than a checkpoint's manifest and directory.
_END_BYTES = 1 << 18
_TEMPORARY_SUFFIX = ".cyxtrain-tmp"
_SLUG_CHARACTERS = 40
_S3 = ("s3", "s3a")
# Where a file appears when its last byte has arrived.
_OBJECT_STORES = (*_S3, "gs", "gcs", "az", "abfs", "abfss")


def staging_folder(url: str) -> Path:
    """Return the local folder in which files wait that are uploaded to a URL; the same for each process."""
    slug = re.sub(r"[^A-Za-z0-9]+", "-", url)[-_SLUG_CHARACTERS:].strip("-")
    return process_env.staging_dir() / f"{slug}-{xxhash.xxh3_64_hexdigest(url.encode())}"


def require_reachable(url: str, *, writes: bool) -> None:
    """Raise CheckpointError unless a folder can be listed and, with `writes`, written to, within 5 s."""
    _require_library(url)  # an import may take longer than the store
    done: Future[None] = Future()

    def run() -> None:
        try:
            list_files(url)
            if writes:
                _try_to_write(url)
            done.set_result(None)
        except BaseException as error:
            done.set_exception(error)

    # A daemon: a library that waits for its own timeouts must not keep the process.
    threading.Thread(target=run, name="cyxtrain-store", daemon=True).start()
    wait([done], START_SECONDS)
    if not done.done():
        raise CheckpointError(
            f"Cannot use {url}: it does not answer within {START_SECONDS:g} s. Check its address and the network."
        )
    done.result()


def _try_to_write(url: str) -> None:
    with _blaming("write to", url):
        system, folder = _opened(url)
        probe = f"{folder}/.{secrets.token_hex(4)}{_TEMPORARY_SUFFIX}"
        if _scheme(url) not in _OBJECT_STORES:
            system.makedirs(folder, exist_ok=True)
        system.pipe_file(probe, b"cyxtrain")
        system.rm_file(probe)


def list_files(url: str) -> dict[str, tuple[int, str]]:
    """Return (size in bytes, version) of the files in a folder, by name; a missing folder is empty."""
    with _blaming("list", url):
        system, folder = _opened(url)
        # Libraries remember listings, and other processes write there, too.
        system.invalidate_cache()
        try:
            entries = system.ls(folder, detail=True)
        except FileNotFoundError:
            return {}
        # Some programs make a folder in an object store by an empty object whose name ends in a slash.
        files = [entry for entry in entries if entry["type"] == "file" and not entry["name"].endswith("/")]
        return {posixpath.basename(entry["name"]): (int(entry["size"]), repr(entry)) for entry in files}


def read_remote(url: str, what: str, limit_bytes: int | None = None) -> bytes:
    """Return the content of a file; refuse one above a limit (None: the memory of this machine)."""
    allowed = "it may have"
    if limit_bytes is None:
        allowed = "this machine's memory has"
        limit_bytes = memory_bytes()
    with _blaming("read", url):
        system, path = _opened(url)
        system.invalidate_cache()
        try:
            size_bytes = int(system.size(path))
            if size_bytes > limit_bytes:
                raise CheckpointError(
                    f"Cannot read {what} {url}: it has {size_bytes:,} bytes, and {allowed} {limit_bytes:,}. Use "
                    "another file."
                )
            return bytes(system.cat_file(path))
        except FileNotFoundError:
            raise CheckpointError(f"There is no {what} {url}. Check the URL.") from None


def is_missing(error: CheckpointError) -> bool:
    """Return whether an error of this module is about a file that is not there."""
    return isinstance(error.__context__, FileNotFoundError)


def read_text_of(path: str | os.PathLike[str], limit_bytes: int = TEXT_LIMIT_BYTES) -> str:
    """Return the content of a text file or URL; errors are those of `read_text`, or CheckpointError for a store."""
    url = url_of(path)
    if not url:
        return read_text(path, limit_bytes)
    try:
        return read_remote(url, "file", limit_bytes).decode("utf-8")
    except CheckpointError as error:
        if is_missing(error):
            raise FileNotFoundError(errno.ENOENT, "there is no such file", url) from None
        raise


class RemoteEnd(io.BytesIO):
    """The last bytes of a file, at their positions in it; reading what comes before raises ValueError."""

    def __init__(self, url: str, size_bytes: int) -> None:
        self._skipped = max(0, size_bytes - _END_BYTES)
        content = b""
        if size_bytes:  # of an empty file, stores refuse to send a part
            with _blaming("read", url):
                system, path = _opened(url)
                content = bytes(system.cat_file(path, start=self._skipped, end=size_bytes))
        super().__init__(content)

    def seek(self, position: int, whence: int = io.SEEK_SET, /) -> int:
        """Go to a position in the file; as in any file."""
        if whence == io.SEEK_SET:
            position -= self._skipped
        return super().seek(position, whence) + self._skipped

    def tell(self) -> int:
        """Return the position in the file."""
        return super().tell() + self._skipped


def upload(path: Path, url: str, progress: Callable[..., object] = lambda *_, **__: None) -> None:
    """Upload a file whole: nothing has its name before it is complete; `progress` is called after each part.

    Cost on S3: at most 64 MiB of memory, for three parts of 8 MiB at a time and what the library adds; elsewhere the
    buffers of fsspec.
    """
    with _blaming("write", url):
        from fsspec.callbacks import Callback

        system, target = _opened(url)
        size_bytes = path.stat().st_size
        options: dict[str, Any] = {"callback": Callback(hooks={"progress": progress})}
        if _scheme(url) in _S3:
            part_bytes = max(_PART_BYTES, size_bytes // _MOST_PARTS + 1)
            options |= {"chunksize": part_bytes, "max_concurrency": _PARTS_AT_ONCE}
        with _under_another_name(system, target, url) as name:
            system.put_file(str(path), name, **options)
        system.invalidate_cache()
        arrived_bytes = int(system.size(target))
        if arrived_bytes != size_bytes:
            raise OSError(f"{arrived_bytes:,} of {size_bytes:,} bytes have arrived")


def write_remote(url: str, content: bytes) -> None:
    """Write a small file whole, as `upload` does."""
    with _blaming("write", url):
        system, target = _opened(url)
        with _under_another_name(system, target, url) as name:
            system.pipe_file(name, content)
        system.invalidate_cache()


def create_remote(url: str, content: bytes) -> bool:
    """Write a small file unless there is one; return whether it was written.

    That is a look, and then a write; on S3 the write has a condition (If-None-Match: *).
    """
    with _blaming("write", url):
        system, path = _opened(url)
        system.invalidate_cache()
        # On S3, too: some servers and older libraries ignore the condition.
        if system.exists(path):
            return False
        if _scheme(url) in _S3:
            with contextlib.suppress(Exception):
                system.pipe_file(path, content, mode="create")
                return True
            # Another process was faster, or the server refuses conditions.
            if system.exists(path):
                return False
    write_remote(url, content)
    return True


def write_file(argument: str, path: Any, content: bytes) -> None:
    """Write a small file, of this machine or to a URL."""
    found = path_or_url(argument, path)
    if url_of(found):
        write_remote(found, content)
    else:
        Path(found).write_bytes(content)


def copy_remote(url: str, other: str) -> None:
    """Copy a file within a store, whole as `upload` does."""
    with _blaming("write", other):
        system, source = _opened(url)
        _, target = _opened(other)
        with _under_another_name(system, target, url) as name:
            system.cp_file(source, name)


def remove_remote(url: str) -> None:
    """Delete a file, unless it is missing."""
    with _blaming("delete", url), contextlib.suppress(FileNotFoundError):
        system, path = _opened(url)
        system.rm_file(path)


@contextlib.contextmanager
def _under_another_name(system: Any, target: str, url: str) -> Iterator[str]:
    """Return the name under which to write a file, and give it its own afterwards; object stores need no other one."""
    if _scheme(url) in _OBJECT_STORES:
        yield target
        return
    folder, name = posixpath.split(target)
    # If a process is killed, the next one that writes this file replaces what is left.
    temporary = f"{folder}/.{name}{_TEMPORARY_SUFFIX}"
    system.makedirs(folder, exist_ok=True)
    try:
        yield temporary
        system.mv(temporary, target)
    except BaseException:
        with contextlib.suppress(Exception):  # the error of the block is the one to report
            system.rm_file(temporary)
        raise


def _scheme(url: str) -> str:
    return url.partition(":")[0]


def _opened(url: str) -> tuple[Any, str]:
    """Return fsspec's file system of a URL, and the path in it."""
    _require_library(url)
    from fsspec.core import url_to_fs

    system, path = url_to_fs(url)
    return system, path


def _require_library(url: str) -> None:
    """Import what fsspec reaches a URL with."""
    try:
        from fsspec import get_filesystem_class  # PyTorch depends on fsspec; other programs need not import it

        get_filesystem_class(_scheme(url))
    except (ImportError, ValueError) as error:
        reason = brief(reason_of(error)).rstrip(".")
        raise ConfigError(
            f"Cannot use {url}: {reason}. fsspec needs a library for each kind of store, such as s3fs for S3 (pip "
            "install s3fs)."
        ) from None


@contextlib.contextmanager
def _blaming(action: str, url: str) -> Iterator[None]:
    """Turn what a store's library raises into a CheckpointError with the URL, without the library's frames."""
    try:
        yield
    except CyxtrainError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {brief(reason_of(error)).rstrip('.')}"
        raise CheckpointError(
            f"Cannot {action} {url}: {reason}. Check its address, your credentials and the network."
        ) from None
