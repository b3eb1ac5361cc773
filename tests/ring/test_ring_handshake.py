"""The handshake proves to both sides that the other knows the secret; whatever else comes is a protocol error."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import hmac
import json
import struct

import pytest
from strangers import KEY, WORDS, body

from cyxtrain.ring.rendezvous.handshake import (
    MAX_BYTES,
    HandshakeClient,
    HandshakeError,
    HandshakeServer,
    Hello,
    NoProofError,
    RefusedError,
    Role,
    message,
    take_message,
)

CLAIM = Hello(run="5f" * 16, generation=3, role=Role.MESSAGES, rank=2, world_size=5, checksums=True)
LARGEST = 2**32 - 1


def shake(caller: HandshakeClient, listener: HandshakeServer, refused: str = "") -> list[bytes]:
    """A whole handshake; returns its four messages."""
    said = [caller.hello()]
    said.append(listener.answer(body(said[0])))
    said.append(caller.prove(body(said[1])))
    listener.check(body(said[2]))
    said.append(listener.verdict(refused))
    caller.conclude(body(said[3]))
    return said


# --- who knows the secret -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "claim",
    [
        CLAIM,
        *(dataclasses.replace(CLAIM, role=role) for role in Role),
        dataclasses.replace(CLAIM, run="", generation=0, rank=0, world_size=0, checksums=False, protocol=0),
        dataclasses.replace(CLAIM, generation=LARGEST, rank=LARGEST, world_size=LARGEST, protocol=LARGEST),
    ],
    ids=str,
)
def test_what_the_caller_says_of_itself_arrives(claim):
    listener = HandshakeServer(KEY)
    said = shake(HandshakeClient(claim, KEY), listener)
    assert listener.hello == claim
    assert sum(map(len, said[0::2])) <= MAX_BYTES
    assert sum(map(len, said[1::2])) <= MAX_BYTES


def test_the_proofs_are_hmac_sha256_over_both_hellos_and_the_verdict():
    hello, answer, proof, verdict = map(body, shake(HandshakeClient(CLAIM, KEY), HandshakeServer(KEY)))
    nonce = json.loads(answer)["nonce"]
    transcript = hashlib.sha256(hashlib.sha256(hello).digest() + nonce.encode()).digest()
    for side, found in (("caller", proof), ("listener", verdict)):
        text = f"cyxtrain {side}".encode() + transcript + hashlib.sha256(b"").digest()
        assert json.loads(found)["proof"] == hmac.new(KEY, text, hashlib.sha256).hexdigest()


def test_the_envelope_is_the_same_in_every_version():
    assert message({"a": 1}) == b'CYXT\x00\x00\x00\x08{"a": 1}'


def test_no_two_handshakes_are_alike():
    nonces = set()
    for _ in range(1000):
        hello = body(HandshakeClient(CLAIM, KEY).hello())
        nonces |= {json.loads(hello)["nonce"], json.loads(body(HandshakeServer(KEY).answer(hello)))["nonce"]}
    assert len(nonces) == 2000
    assert {len(bytes.fromhex(nonce)) for nonce in nonces} == {16}


def test_a_reason_reaches_the_caller_who_knows_the_secret():
    with pytest.raises(RefusedError, match=r"^größer 😀$"):
        shake(HandshakeClient(CLAIM, KEY), HandshakeServer(KEY), "größer 😀")


@pytest.mark.parametrize("key", [b"", b"the secret of this ruN", KEY + b".", KEY[::-1]], ids=repr)
def test_a_caller_with_another_secret_is_found_out(key):
    with pytest.raises(NoProofError):
        shake(HandshakeClient(CLAIM, key), HandshakeServer(KEY))


@pytest.mark.parametrize("refused", ["", "go away"])
def test_an_impostor_at_the_port_is_found_out_whatever_it_says(refused):
    caller, impostor = HandshakeClient(CLAIM, KEY), HandshakeServer(b"another secret")
    caller.prove(body(impostor.answer(body(caller.hello()))))
    with pytest.raises(NoProofError):
        caller.conclude(body(impostor.verdict(refused)))


# --- who has only listened ------------------------------------------------------------------------------------------


def test_a_caller_replayed_word_by_word_proves_nothing():
    hello, _, proof, _ = shake(HandshakeClient(CLAIM, KEY), HandshakeServer(KEY))
    listener = HandshakeServer(KEY)
    listener.answer(body(hello))
    with pytest.raises(NoProofError):
        listener.check(body(proof))


def test_a_listener_replayed_word_by_word_proves_nothing():
    _, answer, _, verdict = shake(HandshakeClient(CLAIM, KEY), HandshakeServer(KEY))
    caller = HandshakeClient(CLAIM, KEY)
    caller.prove(body(answer))
    with pytest.raises(NoProofError):
        caller.conclude(body(verdict))


def test_a_rank_that_hears_its_own_words_does_not_take_them_for_anothers():
    caller = HandshakeClient(CLAIM, KEY)
    own_proof = json.loads(body(caller.prove(body(caller.hello()))))  # its own nonce comes back to it
    with pytest.raises(NoProofError):
        caller.conclude(body(message(own_proof | {"refused": ""})))
    listener = HandshakeServer(KEY)
    listener.answer(body(caller.hello()))
    own_verdict = body(listener.verdict())
    with pytest.raises(NoProofError):
        listener.check(own_verdict)


@pytest.mark.parametrize(("said", "made_of_it"), [("", "go away"), ("go away", ""), ("go away", "go awaY")])
def test_nobody_on_the_way_can_change_the_verdict(said, made_of_it):
    caller, listener = HandshakeClient(CLAIM, KEY), HandshakeServer(KEY)
    listener.check(body(caller.prove(body(listener.answer(body(caller.hello()))))))
    verdict = json.loads(body(listener.verdict(said)))
    with pytest.raises(NoProofError):
        caller.conclude(body(message(verdict | {"refused": made_of_it})))


def flip(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def heard_of(data: bytes) -> bytes:
    """The first message in the bytes; none is an error here, as both sides wait for the rest in vain."""
    found = take_message(bytearray(data))
    if found is None:
        raise HandshakeError("it never ends")
    return found


def test_whichever_bit_of_a_handshake_turns_over_nobody_is_let_in():
    said = shake(HandshakeClient(CLAIM, KEY), HandshakeServer(KEY))
    let_in = []
    for number, data in enumerate(said):
        for bit in range(8 * len(data)):
            caller, listener = HandshakeClient(CLAIM, KEY), HandshakeServer(KEY)
            with contextlib.suppress(HandshakeError):
                sent = caller.hello()
                answer = listener.answer(heard_of(flip(sent, bit) if number == 0 else sent))
                proof = caller.prove(heard_of(flip(answer, bit) if number == 1 else answer))
                listener.check(heard_of(flip(proof, bit) if number == 2 else proof))
                if number < 3:
                    let_in.append((number, bit))
                verdict = listener.verdict()
                caller.conclude(heard_of(flip(verdict, bit) if number == 3 else verdict))
                let_in.append((number, bit))
    assert let_in == []


# --- what is no handshake -------------------------------------------------------------------------------------------

HELLO = json.loads(body(HandshakeClient(CLAIM, KEY).hello()))


@pytest.mark.parametrize("name", sorted(HELLO))
def test_a_hello_says_everything_in_its_type_and_bounds(name):
    wrong = [HELLO | {name: value} for value in (None, [], {}, -1, 2**32, 1.0, "x", True)]
    for changed in (*wrong, {other: HELLO[other] for other in HELLO if other != name}):
        value = changed.get(name)
        listener = HandshakeServer(KEY)
        if (name in ("run", "to_place") and value == "x") or (name == "checksums" and value is True):
            listener.answer(json.dumps(changed).encode())
            continue
        with pytest.raises(HandshakeError, match=f"its {name} is (missing or )?(invalid|unknown)"):
            listener.answer(json.dumps(changed).encode())
        assert listener.hello is None


@pytest.mark.parametrize("name", WORDS)
def test_what_strangers_say_is_no_hello(name):
    with pytest.raises(HandshakeError):
        HandshakeServer(KEY).answer(heard_of(WORDS[name]))


def test_a_message_is_taken_when_it_is_whole_and_not_before():
    data = message({"a": "b" * 100})
    received = bytearray()
    for byte in data[:-1]:
        received.append(byte)
        assert take_message(received) is None
    received += data[-1:] + data
    assert take_message(received) == take_message(received) == data[8:]
    assert not received


def test_a_message_of_the_greatest_length_is_taken_and_none_longer():
    whole = b"CYXT" + struct.pack(">I", 2040) + b" " * 2040
    assert take_message(bytearray(whole)) == b" " * 2040
    with pytest.raises(HandshakeError, match="2041 bytes"):
        take_message(bytearray(b"CYXT" + struct.pack(">I", 2041)))


@pytest.mark.parametrize("first", [b"\0", b"c", b"CYX\0", b"GET "], ids=repr)
def test_the_first_wrong_byte_is_enough(first):
    with pytest.raises(HandshakeError, match="does not speak this protocol"):
        take_message(bytearray(first))
