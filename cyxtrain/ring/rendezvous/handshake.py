"""Mutual challenge-response authentication; the listener then accepts or refuses. No sockets here.

Four messages, each the magic "CYXT", its length (u32, big-endian) and a JSON object. This envelope is the same in every
version of the protocol, so that a listener can tell a client of another version why it is refused:

    client    hello     run, generation, role, rank, world_size, checksums, to_rank, to_place, protocol, nonce
    server    hello     nonce
    client    proof     HMAC-SHA256(key, "caller", hello, hello)
    server    verdict   refused ("" or the reason), HMAC-SHA256(key, "listener", hello, hello, refused)

The nonces make a recorded handshake worthless. The hello names the rank that the client wants to reach, so the server
detects a relay in between, even if the table of addresses was forged. A client that cannot prove that it knows the
secret learns no reason. Data sent after the handshake is not encrypted.

Source: mutual authentication in three passes as in ISO/IEC 9798-4, with the keyed hash of RFC 2104.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import json
import os
import secrets
from dataclasses import asdict, dataclass, fields
from typing import Any

from cyxtrain.errors import brief
from cyxtrain.ring.wire.frames import PROTOCOL_VERSION, FrameError, json_object

_MAGIC = b"CYXT"
_LENGTH_BYTES = 4
MAX_BYTES = 4096
"""The most that one side reads from the other before it is authenticated."""
_MESSAGE_MAX_BYTES = 2048 - len(_MAGIC) - _LENGTH_BYTES
_NONCE_BYTES = 16
_INTEGER_LIMIT = 2**32


class HandshakeError(FrameError):
    """The bytes received are not a handshake of this protocol."""


class NoProofError(HandshakeError):
    """The other side does not know the secret."""


class RefusedError(Exception):
    """The other side knows the secret and refuses us; the text says why."""


class Role(str, enum.Enum):
    """The purpose of a connection between two ranks."""

    COLLECTIVES = "collectives"
    MESSAGES = "messages"
    CONTROL = "control"
    STORE = "store"


PEER_ROLES = (Role.COLLECTIVES, Role.MESSAGES, Role.CONTROL)
"""The connections between each two ranks."""


@dataclass(frozen=True)
class Hello:
    """The identity and intent that a client sends first."""

    run: str
    """The name of this rendezvous, in hexadecimal; rank 0 chose it."""
    generation: int
    role: Role
    rank: int
    world_size: int
    checksums: bool
    to_rank: int = 0
    to_place: str = ""
    """The address it connects to, as `place_of` writes it; empty for the store, which has a name."""
    protocol: int = PROTOCOL_VERSION


def place_of(address: Any) -> str:
    """Return the address of a socket as a string: "host:port", or "@name" for an abstract Unix socket."""
    if isinstance(address, tuple):
        return f"{address[0]}:{address[1]}"
    if isinstance(address, bytes):
        address = os.fsdecode(address)
    return str(address).replace("\0", "@", 1)


def message(facts: dict[str, Any]) -> bytes:
    """Return one message: the magic, the length of the body, and the body."""
    body = json.dumps(facts).encode()
    return _MAGIC + len(body).to_bytes(_LENGTH_BYTES, "big") + body


def take_message(received: bytearray, magic: bytes = _MAGIC, max_bytes: int = _MESSAGE_MAX_BYTES) -> bytes | None:
    """Take the body of the first message out of the bytes received; None if it is incomplete.

    Raises HandshakeError if they do not begin a message, or announce one longer than `max_bytes`.
    """
    # At the first wrong byte, do not wait for the rest.
    if not magic.startswith(received[: len(magic)]):
        raise HandshakeError("it does not speak this protocol")
    begin = len(magic) + _LENGTH_BYTES
    if len(received) < begin:
        return None
    length = int.from_bytes(received[len(magic) : begin], "big")
    if length > max_bytes:
        raise HandshakeError(f"it announced {length} bytes")
    if len(received) < begin + length:
        return None
    body = bytes(received[begin : begin + length])
    del received[: begin + length]
    return body


class HandshakeClient:
    """The connecting side of a handshake."""

    def __init__(self, hello: Hello, key: bytes) -> None:
        self._key = key
        self._hello = message(asdict(hello) | {"nonce": secrets.token_hex(_NONCE_BYTES)})
        self._transcript = b""

    def hello(self) -> bytes:
        """Return the first message."""
        return self._hello

    def prove(self, answer: bytes) -> bytes:
        """Return the message that follows the server's hello, whose body is `answer`."""
        nonce = _nonce(_facts(answer))
        self._transcript = _transcript(self._hello[len(_MAGIC) + _LENGTH_BYTES :], nonce)
        return message({"proof": _proof(self._key, "caller", self._transcript)})

    def conclude(self, verdict: bytes) -> None:
        """Check the body of the server's verdict.

        Raises HandshakeError if it is invalid or the server does not know the secret, RefusedError if it refuses us.
        """
        facts = _facts(verdict)
        refused = _field(facts, "refused", str)
        _check(facts, _proof(self._key, "listener", self._transcript, refused))
        if refused:
            raise RefusedError(brief(refused, _MESSAGE_MAX_BYTES))


class HandshakeServer:
    """The listening side of a handshake; `hello` can be trusted after `check`."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._transcript = b""
        self.hello: Hello | None = None

    def answer(self, hello: bytes) -> bytes:
        """Return the server's hello, given the body of the client's hello."""
        facts = _facts(hello)
        _nonce(facts)
        kinds = {"str": str, "int": int, "bool": bool, "Role": str}
        # The types are strings, as this module has `from __future__ import annotations`.
        values = {field.name: _field(facts, field.name, kinds[str(field.type)]) for field in fields(Hello)}
        try:
            self.hello = Hello(**values | {"role": Role(values["role"])})
        except ValueError:
            raise HandshakeError("its role is unknown") from None
        nonce = secrets.token_hex(_NONCE_BYTES)
        self._transcript = _transcript(hello, nonce)
        return message({"nonce": nonce})

    def check(self, proof: bytes) -> None:
        """Check the body of the client's proof; raise NoProofError if it is wrong."""
        _check(_facts(proof), _proof(self._key, "caller", self._transcript))

    def verdict(self, refused: str = "") -> bytes:
        """Return the last message, with the reason why the client is refused; "": it is accepted."""
        proof = _proof(self._key, "listener", self._transcript, refused)
        return message({"refused": refused, "proof": proof})


def _facts(body: bytes) -> dict[str, Any]:
    try:
        return json_object(body)
    except FrameError as error:
        raise HandshakeError(str(error)) from None


def _field(facts: dict[str, Any], name: str, kind: type) -> Any:
    value = facts.get(name)
    is_valid = type(value) is kind  # not isinstance: a bool is an int
    if type(value) is int:
        is_valid = is_valid and 0 <= value < _INTEGER_LIMIT
    if not is_valid:
        raise HandshakeError(f"its {name} is missing or invalid")
    return value


def _nonce(facts: dict[str, Any]) -> str:
    nonce: str = _field(facts, "nonce", str)
    if len(nonce) != 2 * _NONCE_BYTES:
        raise HandshakeError("its nonce is invalid")
    return nonce


def _transcript(hello: bytes, nonce: str) -> bytes:
    """Return a digest of what both sides have sent so far."""
    return hashlib.sha256(hashlib.sha256(hello).digest() + nonce.encode("utf-8", "surrogatepass")).digest()


def _proof(key: bytes, side: str, transcript: bytes, refused: str = "") -> str:
    reason = hashlib.sha256(refused.encode("utf-8", "surrogatepass")).digest()  # JSON may hold lone surrogates
    return hmac.digest(key, b"cyxtrain " + side.encode() + transcript + reason, "sha256").hex()


def _check(facts: dict[str, Any], expected: str) -> None:
    proof: str = _field(facts, "proof", str)
    # In constant time: how long it takes must not tell how much of a guess is right.
    if not hmac.compare_digest(proof.encode("utf-8", "surrogatepass"), expected.encode()):
        raise NoProofError("it does not know the secret")
