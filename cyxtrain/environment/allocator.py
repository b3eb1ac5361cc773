"""Freed memory stays with the process while a model is trained: the next step wants it again (glibc).

The C library gives large pieces back to the kernel as soon as they are freed, and asks for them again in every step.
Each page then comes by a fault, and full of zeros: up to a quarter of a small convnet's step. Which memory a tensor
has makes no difference to its numbers.
Source: mallopt(3), M_TRIM_THRESHOLD and M_MMAP_THRESHOLD; malloc_trim(3).
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterator
from typing import Any

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_NEVER = -1
_MOST_BYTES = 1 << 30
"""Larger pieces are the kernel's, and go back to it at once."""
_USUAL_MOST_BYTES = 32 << 20
"""What the C library itself comes to, at most; and the largest that one before 2.35 takes."""


def _find_libc() -> Any:
    """Return the C library, where it is glibc; else None."""
    if sys.platform != "linux":
        return None
    libc: Any = ctypes.CDLL(None)
    try:
        libc.gnu_get_libc_version  # noqa: B018 - others have functions of the same names that do nothing
        libc.malloc_trim.argtypes = (ctypes.c_size_t,)
    except AttributeError:
        return None
    return libc


_libc = _find_libc()


def keep_freed_memory() -> None:
    """Let this process keep what it frees, from now on. Elsewhere than on glibc it does nothing."""
    if _libc is not None:
        _ = _libc.mallopt(_M_MMAP_THRESHOLD, _MOST_BYTES) or _libc.mallopt(_M_MMAP_THRESHOLD, _USUAL_MOST_BYTES)
        _libc.mallopt(_M_TRIM_THRESHOLD, _NEVER)


@contextlib.contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Within, this process keeps what it frees; then what is free goes back, and so does what is freed later."""
    keep_freed_memory()
    try:
        yield
    finally:
        if _libc is not None:
            _libc.mallopt(_M_MMAP_THRESHOLD, _USUAL_MOST_BYTES)
            _libc.mallopt(_M_TRIM_THRESHOLD, 2 * _USUAL_MOST_BYTES)
            _libc.malloc_trim(0)
