"""Keeps freed memory in the process while a model trains, because the next step needs it again (glibc).

By default the C library returns large blocks to the kernel when they are freed, and requests them again in every step;
the page faults take up to a quarter of a small convnet's step.
Source: mallopt(3), M_TRIM_THRESHOLD and M_MMAP_THRESHOLD; malloc_trim(3).
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterator
from typing import Any

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_NEVER = -1
# Larger blocks go back to the kernel at once.
_MOST_BYTES = 1 << 30
# The highest value that the C library itself chooses, and the largest that glibc before 2.35 accepts.
_USUAL_MOST_BYTES = 32 << 20


def _find_libc() -> Any:
    if sys.platform != "linux":
        return None
    libc: Any = ctypes.CDLL(None)
    try:
        libc.gnu_get_libc_version  # noqa: B018 - others have functions with these names that do nothing
        libc.malloc_trim.argtypes = (ctypes.c_size_t,)
    except AttributeError:
        return None
    return libc


_libc = _find_libc()


def keep_freed_memory() -> None:
    """Keep freed memory in this process from now on; only glibc has an effect."""
    if _libc is None:
        return
    is_set = _libc.mallopt(_M_MMAP_THRESHOLD, _MOST_BYTES)
    if not is_set:
        _libc.mallopt(_M_MMAP_THRESHOLD, _USUAL_MOST_BYTES)
    _libc.mallopt(_M_TRIM_THRESHOLD, _NEVER)


@contextlib.contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Keep freed memory in this process within; then return it to the kernel, as before."""
    keep_freed_memory()
    try:
        yield
    finally:
        if _libc is not None:
            _libc.mallopt(_M_MMAP_THRESHOLD, _USUAL_MOST_BYTES)
            _libc.mallopt(_M_TRIM_THRESHOLD, 2 * _USUAL_MOST_BYTES)
            _libc.malloc_trim(0)
