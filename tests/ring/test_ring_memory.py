"""Memory of another process that is read in place: exactly what is there, or an error; never something else."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import random
import secrets
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rank_processes import _CONTEXT, rank_server  # noqa: F401 - a fixture

from cyxtrain.ring.wire import peer_read
from cyxtrain.ring.wire.peer_read import PeerMemory, address_of, allow_peer_reads

pytestmark = [
    pytest.mark.usefixtures("rank_server"),
    pytest.mark.skipif(not allow_peer_reads(), reason="no process can read another's memory on this system"),
]
PIECE = peer_read._PIECE_BYTES
SIZE = 2 * PIECE + 4099


def contents(seed):
    return bytearray(random.Random(seed).randbytes(SIZE))


def lie_open(end, seed):
    """Runs in another process: has something in its memory until it is told to end."""
    held, token = contents(seed), ctypes.create_string_buffer(secrets.token_bytes(16), 16)
    peer_read._token = token  # forked from one server, all have the same one
    end.send((_CONTEXT.current_process().pid, address_of(memoryview(held)), allow_peer_reads()))
    end.recv()


@contextlib.contextmanager
def opened(seed=0):
    """Another process, as pid, address and probe; and how to end it."""
    ours, theirs = _CONTEXT.Pipe()
    process = _CONTEXT.Process(target=lie_open, args=(theirs, seed))
    process.start()
    theirs.close()

    def end():
        process.kill()
        process.join()

    try:
        assert ours.poll(20)
        pid, address, probe = ours.recv()
        if not PeerMemory(pid).can_be_read(probe):
            pytest.skip("this kernel lets no process read another's memory")
        yield pid, address, probe, end
    finally:
        end()
        process.close()
        ours.close()


def read(pid, address, count):
    """Returns what is read, into the middle of something that must stay as it is."""
    room = bytearray(b"\xa5" * (count + 16))
    PeerMemory(pid).read(address, address_of(memoryview(room)) + 8, count)
    assert room[:8] == room[-8:] == b"\xa5" * 8
    return bytes(room[8:-8])


def test_what_is_read_is_exactly_what_is_there():
    expected = contents(7)
    with opened(7) as (pid, address, _, _):
        for count in (0, 1, 7, 4095, 4096, 4097, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, SIZE):
            for start in {0, 1, 4093, SIZE - count} if count else {0}:
                count_here = min(count, SIZE - start)
                assert read(pid, address + start, count_here) == expected[start : start + count_here], (count, start)


def test_the_same_reader_reads_on_and_sees_what_changes():
    room = bytearray(16)
    other = bytearray(b"a" * 16)
    reader = PeerMemory(_CONTEXT.current_process().pid)
    for letter in b"abc":
        other[:] = bytes([letter]) * 16
        reader.read(address_of(memoryview(other)), address_of(memoryview(room)), 16)
        assert room == other


def test_a_process_that_has_ended_is_not_read():
    with opened() as (pid, address, probe, end):
        end()
        with pytest.raises(OSError, match="No such process"):
            read(pid, address, 100)
        assert not PeerMemory(pid).can_be_read(probe)


def test_an_address_that_is_not_mapped_is_an_error_also_behind_what_is():
    with mmap.mmap(-1, 3 * mmap.PAGESIZE) as pages:
        start = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        # Half of what is asked for is there: what has come of it must not pass for all.
        ctypes.CDLL(None).munmap(ctypes.c_void_p(start + mmap.PAGESIZE), ctypes.c_size_t(mmap.PAGESIZE))
        try:
            for address in (start + mmap.PAGESIZE, start + mmap.PAGESIZE - 100):
                with pytest.raises(OSError, match="Bad address"):
                    read(_CONTEXT.current_process().pid, address, 200)
            assert read(_CONTEXT.current_process().pid, start, mmap.PAGESIZE) == bytes(mmap.PAGESIZE)
        finally:
            room = ctypes.CDLL(None).mmap
            room.restype = ctypes.c_void_p
            room.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
            fixed = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10  # MAP_FIXED: the hole that was made above
            room(start + mmap.PAGESIZE, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE, fixed, -1, 0)
    with opened() as (pid, _, _, _), pytest.raises(OSError, match="Bad address"):
        read(pid, 8, 100)


def test_a_probe_is_believed_only_where_its_token_is_found():
    with opened() as (pid, address, probe, _):
        where, token = probe.split()
        assert PeerMemory(pid).can_be_read(probe)
        assert PeerMemory(pid).can_be_read(f"{address:x} {contents(0)[:32].hex()}")
        other = bytearray.fromhex(token)
        other[-1] ^= 1
        for wrong in (f"{where} {other.hex()}", f"{address:x} {token}", f"{int(where, 16) + 1:x} {token}"):
            assert not PeerMemory(pid).can_be_read(wrong)
        # Another process than it was made by: what stands there is not the token.
        assert not PeerMemory(_CONTEXT.current_process().pid).can_be_read(probe)


@given(st.one_of(st.text(), st.from_regex(r"-?[0-9a-f]{0,40} ([0-9a-f]{2}){0,20}", fullmatch=True)))
def test_a_probe_of_any_text_is_refused_without_an_error(text):
    assert not PeerMemory(_CONTEXT.current_process().pid).can_be_read(text)


@given(st.integers(), st.binary(max_size=40))
def test_a_probe_of_any_address_is_refused_without_an_error(address, token):
    assert not PeerMemory(_CONTEXT.current_process().pid).can_be_read(f"{address:x} {token.hex()}")


def test_where_there_is_no_such_call_nothing_is_offered_and_nothing_read(monkeypatch):
    probe, pid = allow_peer_reads(), _CONTEXT.current_process().pid
    assert PeerMemory(pid).can_be_read(probe)
    monkeypatch.setattr(peer_read, "_readv", None)
    assert allow_peer_reads() == ""
    assert not PeerMemory(pid).can_be_read(probe)
    assert not PeerMemory(pid).can_be_read("")
    with pytest.raises(OSError, match="no process can read another's memory here"):
        read(pid, address_of(memoryview(bytearray(8))), 8)


def test_a_system_without_the_c_library_of_linux_has_no_such_call(monkeypatch):
    monkeypatch.setattr(peer_read, "_libc", None)
    assert peer_read._find("process_vm_readv", None) is None
    assert allow_peer_reads() == ""
    assert sys.platform == "linux" or peer_read._readv is None


def test_only_so_many_places_are_kept_in_mind(monkeypatch):
    monkeypatch.setattr(peer_read, "_MAX_SEEN", 2)
    pages, held = peer_read.LargePages(), memoryview(bytearray(peer_read._LARGE_BYTES + 3))
    for size in range(4):
        pages.note(held[: peer_read._LARGE_BYTES + size])
        assert len(pages._seen) <= 2
