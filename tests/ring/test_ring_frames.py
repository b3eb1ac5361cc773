"""What travels: headers that say everything, and control frames that a stranger cannot abuse."""

from __future__ import annotations

import contextlib
import json
import math
import struct

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from markers import nightly_where
from xxhash import xxh3_64_digest

from cyxtrain.errors import (
    CollectiveTimeoutError,
    CyxtrainError,
    DistributedTrainingError,
    PeerLostError,
    error_from_facts,
    printable,
    reported,
)
from cyxtrain.ring.monitoring.failure import located_error
from cyxtrain.ring.schedules.kernels import Reduction
from cyxtrain.ring.wire.checksums import Checksums
from cyxtrain.ring.wire.frames import (
    CONTROL_HEADER_BYTES,
    CONTROL_MAX_BYTES,
    EXPECTED_BYTES,
    HEADER_BYTES,
    PROTOCOL_VERSION,
    Control,
    DamagedError,
    FrameError,
    Kind,
    Operation,
    control_frame,
    decode_header,
    dtype_code,
    expected_header,
    folded,
    header,
    is_damaged,
    json_object,
    payload_sum,
    take_control_frame,
)

SUMS = Checksums(b"the secret of this run", "c0ffee")
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
    for checksums in (None, SUMS):
        data = whole_header(operation, memoryview(bytes(77)), checksums=checksums)
        assert len(data) == HEADER_BYTES
        assert data[:EXPECTED_BYTES] == expected_header(operation.identity(), 77)
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
    assert OPERATION._replace(**change).identity() != OPERATION.identity()


def test_more_than_six_dimensions_keep_their_number_of_elements():
    assert folded((1, 2, 3, 4, 5, 6)) == (1, 2, 3, 4, 5, 6)
    assert folded((1, 2, 3, 4, 5, 6, 7, 8)) == (1, 2, 3, 4, 5, 336)
    seven = OPERATION._replace(shape=(1, 2, 3, 4, 5, 6, 7))
    assert decode_header(whole_header(seven, memoryview(b""), checksums=None))[0].shape == (1, 2, 3, 4, 5, 42)


@pytest.mark.parametrize(
    ("position", "byte", "message"),
    [
        (0, 0x00, "not a frame"),
        (2, 99, "protocol version 99"),
        (7, 200, "does not know"),
        (8, 200, "does not know"),
        (9, 200, "damaged"),
        (10, 7, "damaged"),
    ],
    ids=["magic", "version", "operation", "reduction", "dtype", "dimensions"],
)
def test_what_is_no_header_is_refused_with_the_reason(position, byte, message):
    data = bytearray(whole_header(OPERATION, memoryview(b""), checksums=None))
    data[position] = byte
    with pytest.raises(FrameError, match=message):
        decode_header(data)


def test_every_dtype_that_travels_has_a_number_of_its_own():
    carried = []
    for dtype in {dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}:
        with contextlib.suppress(CyxtrainError):
            carried.append(dtype_code(dtype))
    assert sorted(carried) == list(range(1, 21))
    with pytest.raises(CyxtrainError, match=r"does not carry tensors of torch\.quint8"):
        dtype_code(torch.quint8)


def test_an_operation_reads_as_people_say_it():
    assert OPERATION.describe() == "all_reduce #12 (SUM, float32 [10, 4], generation 3)"
    assert [operation.describe() for operation in OTHERS] == [
        "barrier #1",
        "broadcast #2 (float32 [7], src 3)",
        f"scatter #{2**63} (bool [], src 0)",
        f"message (complex128 [{2**40}], tag {2**31})",
        f"reduce #5 (BXOR, uint64 [0, 3], dst 2, generation {2**32 - 1})",
    ]


def test_an_operation_knows_its_bytes():
    assert OPERATION.payload_bytes() == 160
    assert [operation.payload_bytes() for operation in OTHERS] == [0, 28, 1, 2**44, 0]


def test_checksums_are_of_the_payload_and_of_the_header_before_them():
    payload = memoryview(b"what travels")
    data = whole_header(OPERATION, payload, checksums=SUMS)
    assert payload_sum(data) == SUMS.of(payload)
    assert not is_damaged(data, SUMS)
    bare = whole_header(OPERATION, payload, checksums=None)
    assert bare == data[:EXPECTED_BYTES] + bytes(16)
    assert len(bare) == HEADER_BYTES == 99  # as docs/ring.md says


def test_checksums_depend_on_the_secret_and_on_the_run_and_never_show_the_seed():
    """XXH3's digest of few bytes is a bijection of its seed: whoever saw that of an empty frame would know the seed."""
    others = [SUMS, Checksums(b"another secret", "c0ffee"), Checksums(b"the secret of this run", "another run")]
    for data in (b"", b"1234", bytes(5000)):
        assert len({xxh3_64_digest(data), xxh3_64_digest(data, SUMS._seed), *(sums.of(data) for sums in others)}) == 5
        begun = SUMS.begin()
        begun.update(data[:2])
        begun.update(data[2:])
        assert SUMS.end(begun) == SUMS.of(data) == Checksums(b"the secret of this run", "c0ffee").of(data)
    frame = control_frame(Control.ABORT, {"message": "a lie"}, others[1])
    with pytest.raises(DamagedError):
        take_control_frame(bytearray(frame), SUMS)


def test_every_bit_that_turns_over_in_a_header_or_its_payload_is_found():
    payload = bytes(range(64))
    data = whole_header(OPERATION, memoryview(payload), checksums=SUMS)
    for bit in range(8 * len(data)):
        assert is_damaged(flip(data, bit), SUMS), bit
    for bit in range(8 * len(payload)):
        assert SUMS.of(flip(payload, bit)) != payload_sum(data), bit


def whole_header(operation, payload, *, checksums):
    return header(expected_header(operation.identity(), len(payload)), payload, checksums=checksums)


def flip(data, bit):
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return changed


# --- control frames -------------------------------------------------------------------------------------------------


def control_head(magic=b"CX", version=PROTOCOL_VERSION, kind=1, length=0, body=b"", right=True):
    """The header of a control frame, with the right checksum or another."""
    head = struct.pack(">2sBBI8s", magic, version, kind, length, SUMS.of(body))
    return head + (SUMS.of(head) if right else bytes(8))


def test_a_control_frame_brings_its_facts():
    for kind in Control:
        received = bytearray(control_frame(kind, {"message": "größer 😀", "rank": 3}, SUMS) + b"and more")
        assert take_control_frame(received, SUMS) == (kind, {"message": "größer 😀", "rank": 3})
        assert received == b"and more"


def test_a_control_frame_is_taken_when_it_is_whole_and_not_before():
    frame = control_frame(Control.ABORT, {"message": "x" * 30}, SUMS)
    received = bytearray()
    for byte in frame[:-1]:
        received.append(byte)
        assert take_control_frame(received, SUMS) is None
    received += frame[-1:] + frame
    assert (
        take_control_frame(received, SUMS)
        == take_control_frame(received, SUMS)
        == (Control.ABORT, {"message": "x" * 30})
    )
    assert not received


def test_the_longest_text_still_fits_a_control_frame():
    frame = control_frame(Control.ABORT, {"message": "😀" * 100_000, "during": "ä" * 100_000, "rank": 1}, SUMS)
    assert len(frame) <= CONTROL_HEADER_BYTES + CONTROL_MAX_BYTES
    kind, facts = take_control_frame(bytearray(frame), SUMS)
    assert (kind, len(facts["message"]), len(facts["during"]), facts["rank"]) == (Control.ABORT, 2000, 2000, 1)


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (control_head(magic=b"XX"), "not a control frame"),
        (control_head(version=PROTOCOL_VERSION + 1), "not a control frame"),
        (control_head(right=False), "damaged"),
        (control_head(kind=0), "too long, or of an unknown kind"),
        (control_head(kind=99), "too long, or of an unknown kind"),
        (control_head(length=CONTROL_MAX_BYTES + 1), "too long, or of an unknown kind"),
        (control_head(length=2**32 - 1), "too long, or of an unknown kind"),
    ],
    ids=["magic", "version", "checksum", "no kind", "kind", "length", "a huge length"],
)
def test_what_is_no_control_frame_is_refused_before_its_body(head, message):
    assert len(head) == CONTROL_HEADER_BYTES
    with pytest.raises(FrameError, match=message):
        take_control_frame(bytearray(head), SUMS)


BODIES = [b"", b"{", b"\xff\xfe", b"[1]", b'"text"', b"[" * CONTROL_MAX_BYTES, b'{"a":' * 13_000, b"9" * 60_000]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: repr(body[:8]))
def test_a_body_that_is_no_object_is_refused(body):
    with pytest.raises(FrameError, match="not"):
        take_control_frame(bytearray(control_head(length=len(body), body=body) + body), SUMS)
    with pytest.raises(FrameError, match="not"):
        json_object(body)


def test_every_bit_that_turns_over_in_a_control_frame_is_found():
    frame = control_frame(Control.WAITING, {"sequence": 12, "peer": 3}, SUMS)
    for bit in range(8 * len(frame)):
        with pytest.raises(FrameError):
            take_control_frame(flip(frame, bit), SUMS)


# --- anything at all ------------------------------------------------------------------------------------------------

BY_DAY = settings(max_examples=200, deadline=None, derandomize=True, database=None)
NIGHTLY = settings(max_examples=5_000, deadline=None, derandomize=True, database=None)
OPERATIONS = st.builds(
    Operation,
    kind=st.sampled_from(Kind),
    sequence=st.integers(0, 2**64 - 1),
    reduction=st.sampled_from(Reduction),
    dtype=st.integers(0, 20),
    shape=st.lists(st.integers(0, 2**16), max_size=8).map(tuple),
    root=st.integers(-(2**63), 2**63 - 1),
    generation=st.integers(0, 2**32 - 1),
)
SMALL = st.dictionaries(
    st.text(max_size=5), st.integers() | st.text(max_size=50) | st.none() | st.booleans(), max_size=5
)
FRAMES = st.tuples(st.sampled_from(Control), SMALL)
HEADERS = st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES) | st.tuples(
    OPERATIONS, st.lists(st.tuples(st.integers(0, HEADER_BYTES - 1), st.integers(0, 255)), max_size=3)
).map(lambda drawn: _changed(whole_header(drawn[0], memoryview(b""), checksums=None), drawn[1]))
SIZES = st.lists(st.integers(1, 200), max_size=30)
NOISE = st.binary(max_size=100) | st.builds(
    lambda body, kind: control_head(kind=kind, length=len(body), body=body) + body,
    st.binary(max_size=60) | st.sampled_from(BODIES),
    st.integers(0, 8),
)


def _changed(data, changes):
    changed = bytearray(data)
    for position, byte in changes:
        changed[position] = byte
    return bytes(changed)


def check_headers(operation, data):
    whole = whole_header(operation, memoryview(b"1234"), checksums=SUMS)
    found, payload_bytes = decode_header(whole)
    assert (found, payload_bytes) == (operation._replace(shape=folded(operation.shape)), 4)
    assert math.prod(found.shape) == math.prod(operation.shape)
    with contextlib.suppress(FrameError):
        found, payload_bytes = decode_header(data)
        assert 0 <= payload_bytes < 2**64
        identity = found.identity()
        said = len(identity) - 8 - 8 * (6 - len(found.shape))  # what is behind the dimensions counts for nothing
        assert (identity[:said], identity[-8:]) == (data[:said], data[len(identity) - 8 : len(identity)])
        found.describe()
        found.payload_bytes()


def check_streams(frames, sizes, noise):
    """Frames in a row come out as they went in, in whatever parts; what follows is taken for nothing else."""
    stream = b"".join(control_frame(kind, facts, SUMS) for kind, facts in frames)
    received, taken = bytearray(), []
    rest = stream
    for size in [*sizes, len(stream)]:
        received += rest[:size]
        rest = rest[size:]
        while (frame := take_control_frame(received, SUMS)) is not None:
            taken.append(frame)
    assert not received
    assert taken == [
        (kind, {name: printable(fact) if isinstance(fact, str) else fact for name, fact in facts.items()})
        for kind, facts in frames
    ]
    received += noise
    with contextlib.suppress(FrameError):
        while take_control_frame(received, SUMS) is not None:
            pass
        assert len(received) < CONTROL_HEADER_BYTES + CONTROL_MAX_BYTES


def check_damage(frame, bit):
    whole = control_frame(*frame, SUMS)
    assume(bit < 8 * len(whole))
    with pytest.raises(FrameError):
        take_control_frame(flip(whole, bit), SUMS)


CHECKS = {
    "headers": (check_headers, (OPERATIONS, HEADERS)),
    "streams": (check_streams, (st.lists(FRAMES, max_size=5), SIZES, NOISE)),
    "damage": (check_damage, (FRAMES, st.integers(0, 3000))),
}


@nightly_where(lambda name: name != "headers")
@pytest.mark.parametrize("name", CHECKS)
def test_whatever_arrives_is_a_frame_or_a_frame_error(name):
    check, strategies = CHECKS[name]
    BY_DAY(given(*strategies)(check))()


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", CHECKS)
def test_five_thousand_times_nothing_but_frames_and_frame_errors(name):
    check, strategies = CHECKS[name]
    NIGHTLY(given(*strategies)(check))()


# --- errors ---------------------------------------------------------------------------------------------------------


def test_an_error_travels_as_its_facts():
    error = PeerLostError("rank 3 is lost.", rank=3, during="barrier #1")
    again = error_from_facts(json.loads(json.dumps(error.to_facts())))
    assert (type(again), str(again), again.rank, again.during) == (PeerLostError, "rank 3 is lost.", 3, "barrier #1")
    strange = error_from_facts({"type": "LaterError", "message": 7, "rank": "x", "during": 5})
    assert (type(strange), str(strange), strange.rank, strange.during) == (CyxtrainError, "7", None, None)


def test_an_error_says_what_each_rank_was_doing():
    error = located_error(CollectiveTimeoutError("rank 2 waited.", rank=1, during="barrier #9"), OPERATION.describe())
    assert str(error) == "rank 2 waited. This rank was in all_reduce #12 (SUM, float32 [10, 4], generation 3)."
    assert (type(error), error.rank, error.during) == (CollectiveTimeoutError, 1, OPERATION.describe())
    assert str(located_error(error, OPERATION.describe())) == str(error)


def test_what_is_added_to_a_traceback_stands_below_it():
    failed = DistributedTrainingError.because_of(ValueError("no such row"), 1)
    said = "This rank was in all_reduce #12 (SUM, float32 [10, 4], generation 3)."
    assert str(located_error(failed, OPERATION.describe())).splitlines()[-2:] == ["ValueError: no such row", said]
    received = error_from_facts(failed.to_facts() | {"message": reported(failed, 1)})
    told = f"(reported by rank 1). {said}"
    assert str(located_error(received, OPERATION.describe())).splitlines()[-2:] == ["ValueError: no such row", told]


def test_failures_that_travel_are_those_that_are_some():
    facts = DistributedTrainingError.because_of(ValueError("no such row"), 1).to_facts()
    good = facts["failures"][0]
    for strange in (None, "", {}, good | {"rank": "1"}, good | {"message": None}):
        received = error_from_facts(facts | {"failures": [strange, good]})
        assert [failure.message for failure in received.failures] == ["no such row"]
    assert error_from_facts(facts | {"failures": "none"}).failures == ()
