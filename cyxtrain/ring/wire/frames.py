"""The wire format of data frames and control frames.

A data frame is a header of `HEADER_BYTES` and a payload. The header names the collective completely: the receiver knows
the expected header and compares bytes before it uses the payload, so that a hostile length never allocates memory. A
control frame is a short JSON object on the control connection.

Header, big-endian: magic "CX", protocol version (u8), generation (u32), operation, reduction, dtype and number of
dimensions (u8 each), root or tag (i64), six dimensions (u64), sequence (u64), payload bytes (u64), and two checksums
(u64 each, checksums.py; 0 if they are off): of the payload, and of the header before.
"""

from __future__ import annotations

import enum
import functools
import json
import math
import struct
from typing import Any, NamedTuple, Protocol

import torch

from cyxtrain.errors import (
    CollectiveMismatchError,
    CyxtrainError,
    DamagedFrameError,
    error_from_facts,
    printable,
    reported,
)
from cyxtrain.ring.schedules.kernels import Reduction
from cyxtrain.ring.wire.checksums import SUM_BYTES, Checksums

PROTOCOL_VERSION = 9
_MAGIC = b"CX"
MAX_DIMENSIONS = 6
_SIGNATURE = struct.Struct(">2sBIBBBBq6Q")
_NUMBER = struct.Struct(">Q")
_LENGTH = struct.Struct(">Q")
_NO_SUMS = bytes(2 * SUM_BYTES)
EXPECTED_BYTES = _SIGNATURE.size + _NUMBER.size + _LENGTH.size
"""The part of a header that the receiver knows in advance."""
HEADER_BYTES = EXPECTED_BYTES + len(_NO_SUMS)
_CONTROL = struct.Struct(">2sBBI8s")
CONTROL_HEADER_BYTES = _CONTROL.size + SUM_BYTES
_LONGEST_STRING = 2000
"""Characters of a string in a control frame; JSON makes up to twelve bytes of one."""
CONTROL_MAX_BYTES = 64 * 1024
NO_ROOT = -1
_HANDSHAKE_HINT = (
    " The all_gather of one int64 is the handshake at the start of fit, evaluate, predict, save_checkpoint, barrier "
    "and DistributedDataParallel, and at the end of a program (finalize). A rank whose program caught an error gets "
    "there too early: read that rank's output."
)


class FrameError(Exception):
    """The received bytes are not a frame of this protocol."""


class DamagedError(FrameError):
    """The received bytes differ from the bytes that were sent."""


class Kind(enum.IntEnum):
    """Kinds of operations."""

    BARRIER = 1
    ALL_REDUCE = 2
    BROADCAST = 3
    REDUCE = 4
    ALL_GATHER = 5
    GATHER = 6
    SCATTER = 7
    REDUCE_SCATTER = 8
    ALL_TO_ALL = 9
    MESSAGE = 10

    # The hash of an enum is slow Python code.
    __hash__ = int.__hash__


_ROOTS = {Kind.BROADCAST: "src", Kind.SCATTER: "src", Kind.ALL_REDUCE: "memory"}
"""What errors call an operation's root; "dst" in the others."""


# A dtype's place is its number on the wire.
_DTYPES = (
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex32, torch.complex64, torch.complex128, torch.bool),
    *(torch.uint16, torch.uint32, torch.uint64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
)
_DTYPE_CODES = {dtype: code for code, dtype in enumerate(_DTYPES, start=1)}


def dtype_code(dtype: torch.dtype) -> int:
    """Return the number of a dtype on the wire; refuse quantised and sub-byte types."""
    try:
        return _DTYPE_CODES[dtype]
    except KeyError:
        raise CyxtrainError(f"the ring does not carry tensors of {dtype}; convert them first.") from None


class Operation(NamedTuple):
    """One collective, as all its ranks must agree on it."""

    kind: Kind
    sequence: int  # the number of the collective in its group, from 1
    reduction: Reduction = Reduction.NONE
    dtype: int = 0  # `dtype_code` of the elements; 0: no elements
    shape: tuple[int, ...] = ()  # of each rank's tensor
    root: int = NO_ROOT  # source or destination; a message's tag; an all_reduce's shared buffer
    generation: int = 0

    def identity(self) -> bytes:
        """Return the part of the header that all frames of the operation share."""
        signature = _packed(self.generation, self.kind, self.reduction, self.dtype, self.shape, self.root)
        return signature + _NUMBER.pack(self.sequence)

    def describe(self) -> str:
        """Return a description, such as "all_reduce #12 (SUM, float32 [10, 4])"."""
        facts = self._facts()
        if self.kind is Kind.MESSAGE:
            facts.append(f"tag {self.root}")
            return f"message ({', '.join(facts)})"
        numbered = f"{self.kind.name.lower()} #{self.sequence}"
        if not facts:
            return numbered
        return f"{numbered} ({', '.join(facts)})"

    def _facts(self) -> list[str]:
        facts = []
        if self.reduction is not Reduction.NONE:
            facts.append(self.reduction.name)
        if self.dtype:
            dtype = str(_DTYPES[self.dtype - 1]).removeprefix("torch.")
            # The shapes of an all_to_all may differ by rank.
            shape = "" if self.kind is Kind.ALL_TO_ALL else f" {list(self.shape)}"
            facts.append(dtype + shape)
        if self.root != NO_ROOT and self.kind is not Kind.MESSAGE:
            facts.append(f"{_ROOTS.get(self.kind, 'dst')} {self.root}")
        if self.generation:
            facts.append(f"generation {self.generation}")
        return facts

    def payload_bytes(self) -> int:
        """Return the bytes of a whole tensor of `shape`."""
        if not self.dtype:
            return 0
        return math.prod(self.shape) * _DTYPES[self.dtype - 1].itemsize


@functools.lru_cache(maxsize=1024)
def _packed(generation: int, kind: Kind, reduction: Reduction, dtype: int, shape: tuple[int, ...], root: int) -> bytes:
    """Return the part of a header that is the same when an operation is repeated."""
    shape = folded(shape)
    zeros = (0,) * (MAX_DIMENSIONS - len(shape))
    return _SIGNATURE.pack(
        _MAGIC, PROTOCOL_VERSION, generation, kind, reduction, dtype, len(shape), root, *shape, *zeros
    )


class Numbered(Protocol):
    """A collective with its number: an `Operation` or a `PersistentOperation`."""

    @property
    def sequence(self) -> int:
        """The number."""

    def identity(self) -> bytes:
        """As `Operation.identity`."""

    def describe(self) -> str:
        """As `Operation.describe`."""


def append_sentence(message: str, sentence: str) -> str:
    """Return an error's message with one more sentence."""
    # The last line of a message with a traceback has ended already.
    if message.endswith("\n"):
        return message + sentence
    if message.endswith("."):
        return f"{message} {sentence}"
    return f"{message}. {sentence}"


def folded(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape of at most six dimensions with as many elements."""
    if len(shape) <= MAX_DIMENSIONS:
        return shape
    return (*shape[: MAX_DIMENSIONS - 1], math.prod(shape[MAX_DIMENSIONS - 1 :]))


def expected_header(identity: bytes, payload_bytes: int) -> bytes:
    """Return how the header of a transfer must begin."""
    return identity + _LENGTH.pack(payload_bytes)


def put_sequence(frame: memoryview, sequence: int) -> None:
    """Write an operation's number into a frame; its checksums are then wrong."""
    _NUMBER.pack_into(frame, _SIGNATURE.size, sequence)


def header(begin: bytes, payload: memoryview, *, checksums: Checksums | None) -> bytes:
    """Return the header of a transfer that `begin`s as `expected_header` says; without `checksums` it carries none."""
    if checksums is None:
        return begin + _NO_SUMS
    head = begin + checksums.of(payload)
    return head + checksums.of(head)


def is_damaged(head: bytes | bytearray, checksums: Checksums | None) -> bool:
    """Return whether a header's checksum is wrong."""
    return checksums is not None and checksums.of(head[:-SUM_BYTES]) != head[-SUM_BYTES:]


def mismatch_error(rank: int, operation: Numbered, peer: int, found: bytes) -> CollectiveMismatchError:
    """Return the error of `rank` in `operation`, which received the header `found` of another one from `peer`."""
    ours = operation.describe()
    try:
        other, _ = decode_header(found)
        theirs = other.describe()
    except FrameError as error:
        theirs = f"something unreadable ({error})"
    hint = ""
    if _may_be_handshake(ours) or _may_be_handshake(theirs):
        hint = _HANDSHAKE_HINT
    if theirs == ours:
        theirs = f"{theirs} with other sizes"
    return CollectiveMismatchError(
        f"the ranks do not call the same collective: rank {rank} is in {ours}, rank {peer} is in {theirs}. "
        f"Every rank must make the same calls, in the same order, with the same shapes, dtypes and reductions.{hint}",
        rank=peer,
        during=ours,
    )


def _may_be_handshake(call: str) -> bool:
    """Return whether a described call looks like the handshake of `fit` and other methods."""
    return call.startswith("all_gather ") and call.endswith("(int64 [1])")


def damaged_error(peer: int, rank: int, during: str) -> DamagedFrameError:
    """Return the error for data that was corrupted in transit."""
    return DamagedFrameError(
        f"data from rank {peer} to rank {rank} was corrupted in transit, in {during}: memory, a network card or a "
        "cable is faulty, or somebody tampers with it. The data was not used. Start all ranks again, without that "
        "machine or network path if it happens again.",
        rank=peer,
        during=during,
    )


def payload_sum(head: bytes | bytearray) -> bytes:
    """Return the payload's checksum in a header."""
    return bytes(head[-2 * SUM_BYTES : -SUM_BYTES])


def decode_header(data: bytes | bytearray) -> tuple[Operation, int]:
    """Return (operation, payload bytes) of a header; raise `FrameError` for other bytes."""
    magic, version, generation, kind, reduction, dtype, dimensions, root, *shape = _SIGNATURE.unpack_from(data)
    if magic != _MAGIC:
        raise FrameError("the bytes are not a frame of cyxtrain's ring")
    if version != PROTOCOL_VERSION:
        raise FrameError(f"the frame has protocol version {version}, this rank speaks {PROTOCOL_VERSION}")
    if dimensions > MAX_DIMENSIONS or dtype > len(_DTYPES):
        raise FrameError("the frame's header is damaged")
    (sequence,) = _NUMBER.unpack_from(data, _SIGNATURE.size)
    try:
        operation = Operation(
            Kind(kind), sequence, Reduction(reduction), dtype, tuple(shape[:dimensions]), root, generation
        )
    except ValueError:
        raise FrameError("the frame names an operation that this rank does not know") from None
    (payload_bytes,) = _LENGTH.unpack_from(data, _SIGNATURE.size + _NUMBER.size)
    return operation, payload_bytes


class Control(enum.IntEnum):
    """Kinds of control frames."""

    ABORT = 1
    """The group has failed, and why."""
    GOODBYE = 2
    """This rank leaves."""
    WAITING = 3
    """This rank waits for another."""
    HEARTBEAT = 4
    """This rank is alive."""
    QUESTION = 5
    """Asks what the receiver is doing."""
    ANSWER = 6
    """What this rank is doing."""


def control_frame(kind: Control, facts: dict[str, Any], checksums: Checksums) -> bytes:
    """Return a control frame; strings are cut so that it stays below `CONTROL_MAX_BYTES`."""
    short = dict(facts)
    for name, fact in facts.items():
        if isinstance(fact, str):
            short[name] = fact[:_LONGEST_STRING]
    body = json.dumps(short).encode()
    head = _CONTROL.pack(_MAGIC, PROTOCOL_VERSION, kind, len(body), checksums.of(body))
    return head + checksums.of(head) + body


def take_control_frame(received: bytearray, checksums: Checksums) -> tuple[Control, dict[str, Any]] | None:
    """Remove the first control frame from `received`, and return (kind, facts); None if it is incomplete."""
    if len(received) < CONTROL_HEADER_BYTES:
        return None
    magic, version, kind, length, body_sum = _CONTROL.unpack_from(received)
    if is_damaged(received[:CONTROL_HEADER_BYTES], checksums):
        raise DamagedError("the header of a control frame is damaged")
    if magic != _MAGIC or version != PROTOCOL_VERSION:
        raise FrameError("the bytes are not a control frame of cyxtrain's ring")
    if length > CONTROL_MAX_BYTES or kind not in iter(Control):
        raise FrameError("a control frame is too long, or of an unknown kind")
    end = CONTROL_HEADER_BYTES + length
    if len(received) < end:
        return None
    body = bytes(received[CONTROL_HEADER_BYTES:end])
    del received[:end]
    if checksums.of(body) != body_sum:
        raise DamagedError("the body of a control frame is damaged")
    facts = json_object(body)
    for name, fact in facts.items():
        if isinstance(fact, str):
            facts[name] = printable(fact)
    return Control(kind), facts


def abort_error(facts: dict[str, Any], peer: int) -> CyxtrainError:
    """Return the error in an abort frame of `peer`; its message names the rank that reported it first."""
    return error_from_facts(facts | {"message": reported(facts.get("message"), peer)})


def json_object(data: bytes) -> dict[str, Any]:
    """Return the JSON object in untrusted bytes; raise `FrameError` for other bytes."""
    try:
        found = json.loads(data.decode())
    # A RecursionError: it is nested deeper than Python's stack.
    except (ValueError, RecursionError):
        raise FrameError("the bytes are not JSON") from None
    if not isinstance(found, dict):
        raise FrameError("the bytes are not a JSON object")
    return found
