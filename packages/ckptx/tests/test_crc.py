"""crc: parts joined give the CRC-32 of the whole."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptx.crc import joined


@given(st.binary(max_size=40), st.binary(max_size=400))
def test_of_parts(first: bytes, second: bytes) -> None:
    found = joined(zlib.crc32(first), zlib.crc32(second), len(second))
    assert found == zlib.crc32(first + second)


@pytest.mark.parametrize("nbytes", [1 << 16, (4 << 20) + 1])
def test_of_long_parts(nbytes: int) -> None:
    zeros = bytes(nbytes)
    assert joined(zlib.crc32(b"x"), zlib.crc32(zeros), nbytes) == zlib.crc32(b"x" + zeros)
