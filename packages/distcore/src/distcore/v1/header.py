"""Header: the 64 bytes that every rank shows before anything else moves.

All ranks exchange one header of fixed size and compare: whoever makes another call, at another
point, with another value, or has failed, is found before a payload is sent. The first eight
bytes keep their meaning in every later format.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from hashlib import blake2b
from typing import Final

from distcore.v1.errors import PlanError, Problem

FORMAT: Final = 1
NBYTES: Final = 64
DIGEST_NBYTES: Final = 16
_MAGIC: Final = b"SHWK"
# Magic, format, call, failed, a zero, source, flags, label, value, extra, count.
_FORM: Final = struct.Struct("<4sBBBBII16s16sQQ")


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
    a meaning to; `source` is the global rank that a call is about. PlanError where a digest has
    another length, or a number does not fit: `source` and `flags` have 32 bits, `extra` and
    `count` 64, none has a sign.

    >>> header = Header(Call.AGREE, failed=False, label=digest16("step"), count=7)
    >>> len(header.encode()), Header.decode(header.encode()) == header
    (64, True)
    """

    call: Call
    failed: bool
    label: bytes
    value: bytes = bytes(16)
    source: int = 0
    extra: int = 0
    count: int = 0
    flags: int = 0

    def __post_init__(self) -> None:
        for name, digest in (("label", self.label), ("value", self.value)):
            if len(digest) != DIGEST_NBYTES:
                text = f"expected a digest of {DIGEST_NBYTES} bytes, got {len(digest)}"
                raise PlanError(Problem(name, "length", text))
        try:
            self.encode()
        except struct.error as error:
            raise PlanError(Problem("header", "range", str(error))) from None

    def encode(self) -> bytes:
        """The 64 bytes."""
        return _FORM.pack(
            _MAGIC, FORMAT, self.call, self.failed, 0, self.source, self.flags,
            self.label, self.value, self.extra, self.count,
        )  # fmt: skip

    @classmethod
    def decode(cls, row: bytes) -> Header:
        """Read 64 bytes; ValueError says how they are no header of this format."""
        if len(row) != NBYTES or row[:4] != _MAGIC:
            raise ValueError("the bytes are no header: the peer made some other call")
        if row[4] != FORMAT:
            raise ValueError(f"the peer speaks format {row[4]}, this rank format {FORMAT}")
        _, _, call, failed, zero, *rest = _FORM.unpack(row)
        source, flags, label, value, extra, count = rest
        if failed > 1:
            raise ValueError(f"byte 6 of the header is {failed}; expected 0 or 1")
        if zero:
            raise ValueError(f"byte 7 of the header is {zero}; expected 0")
        try:
            found = Call(call)
        except ValueError:
            raise ValueError(f"the peer made call number {call}, unknown here") from None
        return cls(found, bool(failed), label, value, source, extra, count, flags)


def digest16(text: str) -> bytes:
    """A 16-byte digest of a text."""
    return blake2b(text.encode(errors="surrogatepass"), digest_size=DIGEST_NBYTES).digest()
