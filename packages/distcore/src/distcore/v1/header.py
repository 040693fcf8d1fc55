"""Header: the 64 bytes that every rank shows before anything else moves.

All ranks exchange one header of fixed size and compare: whoever makes another call, at another
point, with another value, or has failed, is found before a payload is sent. The first eight
bytes keep their meaning in every later format.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from hashlib import blake2b
from struct import Struct
from typing import Final

FORMAT: Final = 1
NBYTES: Final = 64
_MAGIC: Final = b"SHWK"
_FORM: Final = Struct("<4sBBBxII16s16sQQ")


class Call(IntEnum):
    """Which collective a rank has entered."""

    AGREE = 1
    TOGETHER = 2
    PREPARE = 3
    RUN = 4
    COMMIT = 5
    GATHER = 6
    REDUCE = 7
    BROADCAST = 8


@dataclass(frozen=True, slots=True)
class Header:
    """What one rank shows the others.

    `label` and `value` are 16-byte digests; `extra` and `count` are numbers that the call gives
    a meaning to; `source` is the global rank that a call is about.
    """

    call: Call
    failed: bool
    label: bytes
    value: bytes = bytes(16)
    source: int = 0
    extra: int = 0
    count: int = 0
    flags: int = 0

    def encode(self) -> bytes:
        """The 64 bytes."""
        return _FORM.pack(
            _MAGIC, FORMAT, self.call, self.failed, self.source, self.flags,
            self.label, self.value, self.extra, self.count,
        )  # fmt: skip

    @classmethod
    def decode(cls, row: bytes) -> Header:
        """Read 64 bytes; ValueError says how they are no header of this format."""
        if len(row) != NBYTES or row[:4] != _MAGIC:
            raise ValueError("the bytes are no header: the peer made some other call")
        if row[4] != FORMAT:
            raise ValueError(f"the peer speaks format {row[4]}, this rank format {FORMAT}")
        _, _, call, failed, source, flags, label, value, extra, count = _FORM.unpack(row)
        try:
            found = Call(call)
        except ValueError:
            raise ValueError(f"the peer made call number {call}, unknown here") from None
        return cls(found, bool(failed), label, value, source, extra, count, flags)


def digest16(text: str) -> bytes:
    """A 16-byte digest of a text."""
    return blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()
