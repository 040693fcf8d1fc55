"""Digests of chunks and of whole states, keyed where there is a key.

xxh3 finds every accident but no attack; with a key, BLAKE2b proves who wrote the bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import xxhash

XXH3: Final = "xxh3"
BLAKE2B: Final = "blake2b"
KEYED: Final = "blake2b-keyed"
ALGORITHMS: Final = (XXH3, BLAKE2B, KEYED)
HEX_LENGTH: Final = 32


@dataclass(frozen=True, slots=True)
class Digester:
    """Digests of 128 bits, as 32 hex digits, by one algorithm; `key` only where it is keyed."""

    algorithm: str
    key: bytes = b""

    def __post_init__(self) -> None:
        if self.algorithm not in ALGORITHMS:
            known = ", ".join(ALGORITHMS)
            raise ValueError(f"verify: expected one of {known} or None, got {self.algorithm!r}")
        if (self.algorithm == KEYED) != bool(self.key):
            raise ValueError("a key goes with the keyed algorithm, and with that alone")

    def digest(self, buffers: Iterable[memoryview | bytes]) -> str:
        """The digest of buffers, one after another."""
        if self.algorithm == XXH3:
            state = xxhash.xxh3_128()
            for buffer in buffers:
                state.update(buffer)
            return state.hexdigest()
        keyed = hashlib.blake2b(digest_size=HEX_LENGTH // 2, key=self.key)
        for buffer in buffers:
            keyed.update(buffer)
        return keyed.hexdigest()


def digester_for(verify: str | None, key: bytes) -> Digester | None:
    """What a sender digests with: keyed wherever there is a key, nothing without `verify`."""
    if key:
        return Digester(KEYED, key)
    return None if verify is None else Digester(verify)
