"""Whatever a stranger says, to a listener, to a caller or at the store: it is a protocol error, and nothing else."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import struct

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from strangers import CLAIM, KEY, WORDS, body

from cyxtrain.environment.processes import Process
from cyxtrain.errors import RendezvousError
from cyxtrain.ring.rendezvous.handshake import HandshakeClient, HandshakeError, HandshakeServer, message, take_message
from cyxtrain.ring.rendezvous.record import RankRecord

BY_DAY = settings(max_examples=20, deadline=None, derandomize=True, database=None)
NIGHTLY = settings(max_examples=5_000, deadline=None, derandomize=True, database=None)


HELLO = json.loads(body(HandshakeClient(CLAIM, KEY).hello()))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
NAMES = (*HELLO, "nonce", "proof", "refused")
OBJECTS = st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=8), VALUES, max_size=10)
JSON = (OBJECTS | VALUES).map(lambda value: json.dumps(value).encode())
NESTED = st.builds(
    lambda words, depth: words * depth, st.sampled_from([b"[", b'{"a":']), st.sampled_from([1, 500, 40_000])
)


@st.composite
def mutated(draw: st.DrawFn, data: bytes) -> bytes:
    """Valid bytes in which something was replaced, left out or put in."""
    changed = bytearray(data)
    for _ in range(draw(st.integers(1, 3))):
        first = draw(st.integers(0, len(changed)))
        end = draw(st.integers(first, min(first + 4, len(changed))))
        changed[first:end] = draw(st.binary(max_size=4))
    return bytes(changed)


def _hello() -> bytes:
    return body(HandshakeClient(CLAIM, KEY).hello())


def _like(data: bytes) -> st.SearchStrategy[bytes]:
    """Anything, from noise to what is nearly right."""
    changed_facts = OBJECTS.map(lambda facts: json.dumps(json.loads(data) | facts).encode())
    return st.binary(max_size=300) | JSON | NESTED | mutated(data) | changed_facts


ANSWER = body(HandshakeServer(KEY).answer(_hello()))
VERDICT = json.dumps({"refused": "", "proof": "00" * 32}).encode()


def check_take_message(parts: list[bytes]) -> None:
    received, whole = bytearray(), b"".join(parts)
    taken = b""
    with contextlib.suppress(HandshakeError):
        for part in parts:
            received += part
            while (found := take_message(received)) is not None:
                taken += b"CYXT" + struct.pack(">I", len(found)) + found
        assert len(received) < 2048
    assert taken + received == whole[: len(taken) + len(received)]


@example(b'{"proof": "\\ud800"}', b'{"proof": "\\ud800"}')
def check_listener(hello: bytes, proof: bytes) -> None:
    listener = HandshakeServer(KEY)
    with contextlib.suppress(HandshakeError):
        body(listener.answer(hello))
        assert listener.hello is not None
    listener = HandshakeServer(KEY)
    listener.answer(_hello())
    with pytest.raises(HandshakeError):
        listener.check(proof)


@example(b'{"nonce": "' + b"\\ud800" * 32 + b'"}', b'{"refused": "\\ud800", "proof": ""}')
def check_caller(answer: bytes, verdict: bytes) -> None:
    caller = HandshakeClient(CLAIM, KEY)
    with contextlib.suppress(HandshakeError):
        body(caller.prove(answer))
    caller = HandshakeClient(CLAIM, KEY)
    caller.prove(ANSWER)
    with pytest.raises(HandshakeError):
        caller.conclude(verdict)


ENTRY = RankRecord(3, Process("a machine", 7, 8), "127.0.0.1", 29500, run="00" * 16, key="11" * 32)
ENTRY_OBJECTS = st.dictionaries(
    st.sampled_from([*dataclasses.asdict(ENTRY), "process", "more"]),
    VALUES | st.fixed_dictionaries({"machine": VALUES, "pid": VALUES, "started": VALUES}),
    max_size=10,
)


@example(b"[" * 100_000)
@example(b'{"world_size": 2, "process": {"machine": "", "pid": 1, "started": 0}, "host": null}')
@example(b'{"world_size": 2, "process": {"machine": "", "pid": "../..", "started": 0}}')
@example(b'{"world_size": 2, "process": {"machine": "", "pid": 1, "started": 0}, "key": "no number"}')
@example(b'{"world_size": 2, "process": {"machine": "", "pid": 1, "started": 0}, "heartbeat_timeout_seconds": NaN}')
@example(b'{"world_size": 2, "process": {"machine": "", "pid": 1, "started": 0}, "heartbeat_timeout_seconds": 0.0}')
def check_entry(data: bytes) -> None:
    with contextlib.suppress(RendezvousError):
        entry = RankRecord.from_json(data)
        for name, value in vars(entry).items():
            assert type(value) is type(vars(ENTRY)[name]) or (name, type(value)) == ("heartbeat_timeout_seconds", int)
        assert tuple(map(type, vars(entry.process).values())) == (str, int, int)
        assert 0.01 <= entry.heartbeat_timeout_seconds <= 1e9
        assert 0 <= entry.process.pid < 2**31
        assert 0 <= entry.port < 2**16
        bytes.fromhex(entry.run + entry.key)


MESSAGES = st.lists(
    st.binary(max_size=30) | OBJECTS.map(message) | st.sampled_from([message(HELLO), *WORDS.values()]), max_size=5
)
SPLITS = st.tuples(MESSAGES.map(b"".join), st.lists(st.integers(1, 300), max_size=20)).map(lambda drawn: _split(*drawn))


def _split(data: bytes, sizes: list[int]) -> list[bytes]:
    parts = []
    for size in sizes:
        parts.append(data[:size])
        data = data[size:]
    return [*parts, data]


ENTRIES = (
    st.binary(max_size=300)
    | JSON
    | NESTED
    | mutated(ENTRY.to_json().encode())
    | ENTRY_OBJECTS.map(lambda facts: json.dumps(json.loads(ENTRY.to_json()) | facts).encode())
    | ENTRY_OBJECTS.map(lambda facts: json.dumps(facts).encode())
)


CHECKS = {
    "messages": (check_take_message, SPLITS),
    "listener": (check_listener, _like(_hello()), _like(VERDICT)),
    "caller": (check_caller, _like(ANSWER), _like(VERDICT)),
    "entry": (check_entry, ENTRIES),
}


def go_through(what: str, examples: settings) -> None:
    check, *strategies = CHECKS[what]
    examples(given(*strategies)(check))()


def test_whatever_a_listener_hears_it_lets_nobody_in_and_raises_nothing_else():
    go_through("listener", BY_DAY)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("what", CHECKS)
def test_five_thousand_times_nothing_but_protocol_errors(what):
    go_through(what, NIGHTLY)


def test_an_entry_arrives_as_it_was_said_also_from_a_later_version_that_says_more():
    facts = json.loads(ENTRY.to_json())
    assert RankRecord.from_json(json.dumps(facts)) == ENTRY
    more = facts | {"colour": "blue", "protocol": 7, "process": facts["process"] | {"cgroup": "/"}}
    assert RankRecord.from_json(json.dumps(more)) == dataclasses.replace(ENTRY, protocol=7)
