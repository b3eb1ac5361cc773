"""Reads the memory of another process of this machine, if its kernel allows it (Linux).

One copy instead of two, and no system call per piece. The peer leaves its data in place until this process has
acknowledged it, and ends the stream on any error: a reader of invalid data finds the stream ended before it uses it.
Source: process_vm_readv(2); ptrace(2), section "Ptrace access mode checking", for the permission.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import sys
from typing import Any

_PIECE_BYTES = 4 << 20
"""Bytes read by one system call at most, so that signals are handled soon."""
_LARGE_PAGE_BYTES = 2 << 20
_LARGE_BYTES = 2 * _LARGE_PAGE_BYTES
"""From this size on memory contains a whole large page."""
_TIMES = 3
"""Uses after which memory is expected to be used again."""
_MAX_SEEN = 1024
"""Places that are counted."""
_MADV_COLLAPSE = 25
_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)
_token = ctypes.create_string_buffer(secrets.token_bytes(16), 16)
"""Proves to a peer that it can read this process."""


class _Piece(ctypes.Structure):
    """struct iovec."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def _find(name: str, returned: Any, *arguments: Any) -> Any:
    """Return a function of the C library; None: it has none of this name."""
    function: Any = getattr(_libc, name, None)
    if function is not None:
        function.restype, function.argtypes = returned, arguments
    return function


_address, _count = ctypes.c_void_p, ctypes.c_ulong
_readv = _find("process_vm_readv", ctypes.c_ssize_t, ctypes.c_int, _address, _count, _address, _count, ctypes.c_ulong)
_madvise = _find("madvise", ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def allow_peer_reads() -> str:
    """Let other processes of this user read this one's memory (Yama); return the probe they need, or ""."""
    if _libc is None or _readv is None:
        return ""
    _libc.prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)
    return f"{ctypes.addressof(_token):x} {_token.raw.hex()}"


def address_of(memory: memoryview) -> int:
    """Return the address of writable bytes, at least one."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class PeerMemory:
    """The memory of another process; one thread at a time uses it."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._here, self._there = _Piece(), _Piece()
        self._pieces = ctypes.byref(self._here), ctypes.byref(self._there)

    def can_be_read(self, probe: str) -> bool:
        """Return whether the kernel lets this process read there; `probe` is from its `allow_peer_reads`."""
        try:
            address, token = probe.split()
            found = bytearray(len(token) // 2)
            self.read(int(address, 16), address_of(memoryview(found)), len(found))
            return found == bytes.fromhex(token) and len(found) >= len(_token.raw)
        except (ValueError, OSError, ctypes.ArgumentError):
            return False

    def read(self, address: int, into: int, count: int) -> None:
        """Copy `count` bytes from an address there to one here; raise OSError if that is impossible."""
        if _readv is None:
            raise OSError("no process can read another's memory here")
        here, there = self._here, self._there
        while count:
            here.base, there.base = into, address
            here.length = there.length = min(count, _PIECE_BYTES)
            done = _readv(self._pid, self._pieces[0], 1, self._pieces[1], 1, 0)
            if done <= 0:
                code = ctypes.get_errno()
                raise OSError(code, os.strerror(code))
            address, into, count = address + done, into + done, count - done


class LargePages:
    """Move memory that is read repeatedly into large pages, which the kernel reads two to three times as fast.

    It costs one copy, once, so it is done for memory that was seen before, such as a training's gradients.
    Source: madvise(2), MADV_COLLAPSE, Linux 6.1.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[int, int], int] = {}

    def note(self, memory: memoryview) -> None:
        """Count a use of these bytes; collapse their pages when they come again."""
        if _madvise is None or len(memory) < _LARGE_BYTES:
            return
        place = address_of(memory), len(memory)
        times = self._seen[place] = self._seen.get(place, 0) + 1
        if times == _TIMES:
            first = -(-place[0] // _LARGE_PAGE_BYTES) * _LARGE_PAGE_BYTES
            end = (place[0] + place[1]) // _LARGE_PAGE_BYTES * _LARGE_PAGE_BYTES
            _madvise(first, end - first, _MADV_COLLAPSE)  # a failure changes nothing
        elif len(self._seen) > _MAX_SEEN:
            self._seen.clear()
