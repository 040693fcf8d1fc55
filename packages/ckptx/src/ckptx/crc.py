"""crc: the CRC-32 of a whole from those of its parts, so that many may read one block."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

_POLYNOMIAL: Final = 0xEDB88320
_ONE: Final = 1 << 31
# x to the powers 1, 2, 4, ... of two, each the square of the one before; they repeat after 32.
_BITS: Final = 32


def joined(first: int, second: int, second_nbytes: int) -> int:
    """The CRC-32 of two parts, one behind the other, from the CRC-32 of each.

    >>> import zlib
    >>> joined(zlib.crc32(b"shard"), zlib.crc32(b"works"), 5) == zlib.crc32(b"shardworks")
    True
    """
    return _product(_shift(second_nbytes), first) ^ second


def _product(one: int, other: int) -> int:
    """The product of two polynomials modulo that of the CRC, lowest power in the highest bit."""
    found, mask = 0, _ONE
    while mask:
        if one & mask:
            found ^= other
        mask >>= 1
        other = (other >> 1) ^ _POLYNOMIAL if other & 1 else other >> 1
    return found


@lru_cache(maxsize=1)
def _powers() -> tuple[int, ...]:
    found = [_ONE >> 1]
    while len(found) < _BITS:
        found.append(_product(found[-1], found[-1]))
    return tuple(found)


@lru_cache(maxsize=256)
def _shift(nbytes: int) -> int:
    """X to the power of the bits that follow."""
    found, power = _ONE, 3
    while nbytes:
        if nbytes & 1:
            found = _product(_powers()[power % _BITS], found)
        nbytes >>= 1
        power += 1
    return found
