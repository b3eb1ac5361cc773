"""Keyed checksums of frames, which only members of a run can compute.

A frame is hashed by XXH3 with a secret seed, and that digest by BLAKE2s with a secret key (RFC 7693): XXH3's digest of
a few bytes is a bijection of the seed, so that one empty frame would reveal it.

This is not a message authentication code. XXH3 "is labeled non-cryptographic, and is not meant to avoid intentional
collisions" (doc/xxhash_spec.md), and a frame can be replayed wherever the same header is expected. If the run has no
secret, everyone who reaches the store can read the key.
"""

from __future__ import annotations

import hashlib
import hmac

from xxhash import xxh3_64, xxh3_64_digest

SUM_BYTES = 8


class Checksums:
    """The keyed checksums of one group. Cost: one read of the bytes, and about a microsecond.

    `key` is the run's secret, or one that rank 0 has made. `run` is the random name of the group's rendezvous, so that
    no two groups have the same checksums.
    """

    def __init__(self, key: bytes, run: str) -> None:
        derived = hmac.digest(key, b"cyxtrain checksums" + run.encode(), "sha256")
        self._seed = int.from_bytes(derived[:8], "big")
        self._key = derived[8:]

    def of(self, data: bytes | bytearray | memoryview) -> bytes:
        """Return the checksum of some bytes."""
        return self._sealed(xxh3_64_digest(data, self._seed))

    def begin(self) -> xxh3_64:
        """Return a hash to `update` with bytes that arrive in pieces."""
        return xxh3_64(seed=self._seed)

    def end(self, begun: xxh3_64) -> bytes:
        """Return the checksum of all bytes that the hash was updated with."""
        return self._sealed(begun.digest())

    def _sealed(self, digest: bytes) -> bytes:
        return hashlib.blake2s(digest, digest_size=SUM_BYTES, key=self._key).digest()
