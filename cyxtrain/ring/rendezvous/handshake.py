"""Who may come in: both sides prove that they know the run's secret, then the one that listens decides.

Four messages, each the magic "CYXT", its length (u32, big-endian) and a JSON object; the envelope is the same in
every version of the protocol, so that versions can refuse each other in words:

    caller      hello     run, generation, role, rank, world_size, checksums, to_rank, to_place, protocol, nonce
    listener    hello     nonce
    caller      proof     HMAC-SHA256(key, "caller", hello, hello)
    listener    verdict   refused ("" or why), HMAC-SHA256(key, "listener", hello, hello, refused)

The nonces make a recorded handshake worthless. The hello names whom the caller means to call: somebody who listens
elsewhere and relays every byte is found out by the listener, also where the table of addresses was forged. If you
cannot prove that you know the secret, you are told nothing: reasons are for members.
Nothing here touches a socket. It proves who connects; what is sent afterwards is not encrypted.

Source: mutual authentication in three passes as in ISO/IEC 9798-4, with the keyed hash of RFC 2104.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import json
import os
import secrets
import struct
from dataclasses import asdict, dataclass
from typing import Any

from cyxtrain.errors import printable
from cyxtrain.ring.wire.frames import PROTOCOL_VERSION, FrameError, json_object

_PREFIX = struct.Struct(">4sI")
_MAGIC = b"CYXT"
MAX_BYTES = 4096
"""What one side takes from the other before it lets it in."""
_MESSAGE_MAX_BYTES = 2048 - _PREFIX.size
_NONCE_BYTES = 16
_LARGEST = 2**32


class HandshakeError(Exception):
    """What came is no handshake of this protocol."""


class NoProofError(HandshakeError):
    """The other side does not know the secret."""


class RefusedError(Exception):
    """The other side knows the secret, and does not let us in; the text says why."""


class Role(str, enum.Enum):
    """What a connection between two ranks is for."""

    COLLECTIVES = "collectives"
    MESSAGES = "messages"
    CONTROL = "control"
    STORE = "store"


PAIRED = (Role.COLLECTIVES, Role.MESSAGES, Role.CONTROL)
"""The connections between each two ranks."""


@dataclass(frozen=True)
class Claim:
    """What a caller says of itself.

    Attributes:
        run: What rank 0 called this meeting, in hexadecimal.
        generation: Of the group.
        role: What the connection is for.
        rank: The caller.
        world_size: How many ranks it looks for.
        checksums: Whether its frames carry checksums.
        to_rank: The rank that it calls.
        to_place: Where it calls that rank, as `place_of` writes it; "" where a name leads there, or other machines.
        protocol: The version that it speaks.
    """

    run: str
    generation: int
    role: Role
    rank: int
    world_size: int
    checksums: bool
    to_rank: int = 0
    to_place: str = ""
    protocol: int = PROTOCOL_VERSION


def place_of(address: Any) -> str:
    """Returns the address of a socket as text: "host:port", or "@name" for an abstract Unix socket."""
    if isinstance(address, tuple):
        return f"{address[0]}:{address[1]}"
    return (os.fsdecode(address) if isinstance(address, bytes) else str(address)).replace("\0", "@", 1)


def message(facts: dict[str, Any]) -> bytes:
    """Returns one message of a handshake."""
    body = json.dumps(facts).encode()
    return _PREFIX.pack(_MAGIC, len(body)) + body


def take_message(received: bytearray) -> bytes | None:
    """Takes the first message's body out of what has been heard; None where it is not whole yet.

    Raises:
        HandshakeError: The bytes are no message, or announce one that is too long.
    """
    if not _MAGIC.startswith(received[: len(_MAGIC)]):
        raise HandshakeError("it does not speak this protocol")
    if len(received) < _PREFIX.size:
        return None
    _, length = _PREFIX.unpack_from(received)
    if length > _MESSAGE_MAX_BYTES:
        raise HandshakeError(f"it announced {length} bytes")
    end = _PREFIX.size + length
    if len(received) < end:
        return None
    body = bytes(received[_PREFIX.size : end])
    del received[:end]
    return body


class Caller:
    """The side that connects.

    Args:
        claim: What it says of itself.
        key: The run's secret.
    """

    def __init__(self, claim: Claim, key: bytes) -> None:
        self._key = key
        self._hello = message(asdict(claim) | {"nonce": secrets.token_hex(_NONCE_BYTES)})
        self._transcript = b""

    def hello(self) -> bytes:
        """Returns what is sent first."""
        return self._hello

    def prove(self, answer: bytes) -> bytes:
        """Returns what is sent after the listener's hello, of which `answer` is the body.

        Raises:
            HandshakeError: It is no hello.
        """
        nonce = _Facts(answer).text("nonce", 2 * _NONCE_BYTES)
        self._transcript = _transcript(self._hello[_PREFIX.size :], nonce)
        return message({"proof": _proof(self._key, "caller", self._transcript)})

    def conclude(self, verdict: bytes) -> None:
        """Takes the listener's verdict, of which `verdict` is the body.

        Raises:
            HandshakeError: It is no verdict, or not of one who knows the secret.
            RefusedError: We may not come in.
        """
        facts = _Facts(verdict)
        refused = facts.text("refused")
        _check(facts, _proof(self._key, "listener", self._transcript, refused))
        if refused:
            raise RefusedError(printable(refused))


class Listener:
    """The side that is connected to. It hears a hello, then a proof; then `claim` can be trusted.

    Args:
        key: The run's secret.

    Attributes:
        claim: What the caller says of itself; None before its hello.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._transcript = b""
        self.claim: Claim | None = None

    def answer(self, hello: bytes) -> bytes:
        """Returns our hello.

        Args:
            hello: The body of the caller's.

        Raises:
            HandshakeError: It is no hello.
        """
        facts = _Facts(hello)
        facts.text("nonce", 2 * _NONCE_BYTES)
        self.claim = Claim(
            run=facts.text("run"),
            generation=facts.number("generation"),
            role=facts.role(),
            rank=facts.number("rank"),
            world_size=facts.number("world_size"),
            checksums=facts.truth("checksums"),
            to_rank=facts.number("to_rank"),
            to_place=facts.text("to_place"),
            protocol=facts.number("protocol"),
        )
        nonce = secrets.token_hex(_NONCE_BYTES)
        self._transcript = _transcript(hello, nonce)
        return message({"nonce": nonce})

    def check(self, proof: bytes) -> None:
        """Takes the body of the caller's proof.

        Raises:
            HandshakeError: It is no proof.
            NoProofError: It is not the right one.
        """
        _check(_Facts(proof), _proof(self._key, "caller", self._transcript))

    def verdict(self, refused: str = "") -> bytes:
        """Returns our verdict: the reason why the caller may not come in, or that it may."""
        proof = _proof(self._key, "listener", self._transcript, refused)
        return message({"refused": refused, "proof": proof})


class _Facts:
    """The fields of a message, each of its type and in its bounds."""

    def __init__(self, body: bytes) -> None:
        try:
            self._facts = json_object(body)
        except FrameError as error:
            raise HandshakeError(str(error)) from None

    def text(self, name: str, length: int | None = None) -> str:
        value = self._facts.get(name)
        if not isinstance(value, str) or (length is not None and len(value) != length):
            raise HandshakeError(f"its {name} is none")
        return value

    def number(self, name: str) -> int:
        value = self._facts.get(name)
        if type(value) is not int or not 0 <= value < _LARGEST:
            raise HandshakeError(f"its {name} is none")
        return value

    def truth(self, name: str) -> bool:
        value = self._facts.get(name)
        if type(value) is not bool:
            raise HandshakeError(f"its {name} is none")
        return value

    def role(self) -> Role:
        try:
            return Role(self.text("role"))
        except ValueError:
            raise HandshakeError("its role is none") from None


def _transcript(hello: bytes, nonce: str) -> bytes:
    """Returns what both sides have said so far, as 32 bytes."""
    return hashlib.sha256(hashlib.sha256(hello).digest() + nonce.encode("utf-8", "surrogatepass")).digest()


def _proof(key: bytes, side: str, transcript: bytes, refused: str = "") -> str:
    said = hashlib.sha256(refused.encode("utf-8", "surrogatepass")).digest()
    return hmac.digest(key, b"cyxtrain " + side.encode() + transcript + said, "sha256").hex()


def _check(facts: _Facts, right: str) -> None:
    if not hmac.compare_digest(facts.text("proof").encode("utf-8", "surrogatepass"), right.encode()):
        raise NoProofError("it does not know the secret")
