"""What travels: headers that say everything, and control frames that a stranger cannot abuse."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import struct

import pytest
import torch

from cyxtrain.errors import CollectiveTimeoutError, CyxtrainError, PeerLostError, error_from_facts
from cyxtrain.ring.frames import (
    CONTROL_HEADER_BYTES,
    CONTROL_MAX_BYTES,
    HEADER_BYTES,
    Control,
    FrameError,
    Kind,
    Operation,
    Reduction,
    at_operation,
    control_frame,
    decode_control_body,
    decode_control_header,
    decode_header,
    dtype_code,
    folded,
    header,
)

FLOAT = dtype_code(torch.float32)
OPERATION = Operation(Kind.ALL_REDUCE, 12, Reduction.SUM, FLOAT, (10, 4), -1, 3)
OTHERS = [
    Operation(Kind.BARRIER, 1),
    Operation(Kind.BROADCAST, 2, dtype=FLOAT, shape=(7,), root=3),
    Operation(Kind.SCATTER, 2**63, dtype=dtype_code(torch.bool), shape=(), root=0),
    Operation(Kind.MESSAGE, 0, dtype=dtype_code(torch.complex128), shape=(2**40,), root=2**31),
    Operation(Kind.REDUCE, 5, Reduction.BXOR, dtype_code(torch.uint64), (0, 3), 2, 2**32 - 1),
]


@pytest.mark.parametrize("operation", [OPERATION, *OTHERS], ids=lambda operation: operation.kind.name)
def test_a_header_says_the_whole_operation(operation):
    data = header(operation.identity(), 77)
    assert len(data) == HEADER_BYTES
    assert decode_header(data) == (operation, 77)


@pytest.mark.parametrize(
    "change",
    [
        {"kind": Kind.REDUCE_SCATTER},
        {"sequence": 13},
        {"reduction": Reduction.AVG},
        {"dtype": dtype_code(torch.int32)},
        {"shape": (4, 10)},
        {"shape": (40,)},
        {"root": 0},
        {"generation": 4},
    ],
    ids=str,
)
def test_any_difference_changes_the_header(change):
    assert dataclasses.replace(OPERATION, **change).identity() != OPERATION.identity()


def test_more_than_six_dimensions_keep_their_number_of_elements():
    assert folded((1, 2, 3, 4, 5, 6)) == (1, 2, 3, 4, 5, 6)
    assert folded((1, 2, 3, 4, 5, 6, 7, 8)) == (1, 2, 3, 4, 5, 336)
    seven = dataclasses.replace(OPERATION, shape=(1, 2, 3, 4, 5, 6, 7))
    assert decode_header(header(seven.identity(), 0))[0].shape == (1, 2, 3, 4, 5, 42)


@pytest.mark.parametrize(
    ("position", "byte", "message"),
    [
        (0, 0x00, "not a frame"),
        (2, 99, "protocol version 99"),
        (15, 200, "does not know"),
        (16, 200, "does not know"),
        (17, 200, "damaged"),
        (18, 7, "damaged"),
    ],
    ids=["magic", "version", "operation", "reduction", "dtype", "dimensions"],
)
def test_what_is_no_header_is_refused_with_the_reason(position, byte, message):
    data = bytearray(header(OPERATION.identity(), 0))
    data[position] = byte
    with pytest.raises(FrameError, match=message):
        decode_header(data)


def test_every_dtype_that_travels_has_a_number_of_its_own():
    carried = []
    for dtype in {dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}:
        with contextlib.suppress(CyxtrainError):
            carried.append(dtype_code(dtype))
    assert sorted(carried) == list(range(1, 21))
    with pytest.raises(CyxtrainError, match=r"torch\.quint8 cannot travel"):
        dtype_code(torch.quint8)


def test_an_operation_reads_as_people_say_it():
    assert OPERATION.describe() == "all_reduce #12 (SUM, float32 [10, 4])"
    assert [operation.describe() for operation in OTHERS] == [
        "barrier #1",
        "broadcast #2 (float32 [7], src 3)",
        f"scatter #{2**63} (bool [], src 0)",
        f"message (complex128 [{2**40}], tag {2**31})",
        "reduce #5 (BXOR, uint64 [0, 3], dst 2)",
    ]


def test_an_operation_knows_its_bytes():
    assert OPERATION.payload_bytes() == 160
    assert [operation.payload_bytes() for operation in OTHERS] == [0, 28, 1, 2**44, 0]


def test_a_control_frame_brings_its_facts():
    frame = control_frame(Control.ABORT, {"message": "größer 😀", "rank": 3})
    kind, length = decode_control_header(frame)
    assert kind is Control.ABORT
    assert decode_control_body(frame[CONTROL_HEADER_BYTES:]) == {"message": "größer 😀", "rank": 3}
    assert len(frame) == CONTROL_HEADER_BYTES + length


def test_the_longest_text_still_fits_a_control_frame():
    frame = control_frame(Control.ABORT, {"message": "😀" * 100_000, "during": "ä" * 100_000, "rank": 1})
    decode_control_header(frame)  # refuses what is too long
    assert len(decode_control_body(frame[CONTROL_HEADER_BYTES:])["message"]) == 2000


@pytest.mark.parametrize(
    "head",
    [
        struct.pack(">2sBBI", b"XX", 1, 1, 0),
        struct.pack(">2sBBI", b"CX", 2, 1, 0),
        struct.pack(">2sBBI", b"CX", 1, 9, 0),
        struct.pack(">2sBBI", b"CX", 1, 1, CONTROL_MAX_BYTES + 1),
    ],
    ids=["magic", "version", "kind", "length"],
)
def test_what_is_no_control_frame_is_refused_before_its_body(head):
    with pytest.raises(FrameError):
        decode_control_header(head)


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b"[1]", b'"text"'], ids=repr)
def test_a_body_that_is_no_object_is_refused(body):
    with pytest.raises(FrameError):
        decode_control_body(body)


def test_an_error_travels_as_its_facts():
    error = PeerLostError("rank 3 is lost.", rank=3, during="barrier #1")
    again = error_from_facts(json.loads(json.dumps(error.to_facts())))
    assert (type(again), str(again), again.rank, again.during) == (PeerLostError, "rank 3 is lost.", 3, "barrier #1")
    strange = error_from_facts({"type": "LaterError", "message": 7, "rank": "x", "during": 5})
    assert (type(strange), str(strange), strange.rank, strange.during) == (CyxtrainError, "7", None, None)


def test_an_error_says_what_each_rank_was_doing():
    error = at_operation(CollectiveTimeoutError("rank 2 waited.", rank=1, during="barrier #9"), OPERATION)
    assert str(error) == "rank 2 waited. This rank was in all_reduce #12 (SUM, float32 [10, 4])."
    assert (type(error), error.rank, error.during) == (CollectiveTimeoutError, 1, OPERATION.describe())
    assert str(at_operation(error, OPERATION)) == str(error)
