"""staged: copies of what fits into a budget, so that the tensors may change; each given once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ckptx.outfile import Part
from ckptx.staged import Staged
from distcore.v1 import Region


def part(key: str, nbytes: int) -> Part:
    return Part(key, Region((0,), (nbytes,)), 0, nbytes)


def test_what_fits_is_copied_and_may_change_then() -> None:
    memory = {"a": bytearray(b"aaaa"), "big": bytearray(b"b" * 9), "c": bytearray(b"cc")}
    parts = {key: part(key, len(data)) for key, data in memory.items()}

    def pieces(wanted: Part) -> Iterator[memoryview]:
        data = memory[wanted.key]
        yield from (memoryview(data)[low : low + 3] for low in range(0, len(data), 3))

    staged = Staged(parts.values(), pieces, 6)
    assert [key for key in parts if parts[key] in staged] == ["a", "c"]
    memory["a"][:] = b"zzzz"
    assert b"".join(map(bytes, staged.pieces(parts["a"]))) == b"aaaa"
    assert parts["a"] not in staged
    with pytest.raises(KeyError):
        next(staged.pieces(parts["a"]))


def test_no_more_than_the_budget_is_held() -> None:
    parts = [part(f"p{i}", 10) for i in range(5)]
    staged = Staged(parts, lambda p: iter([memoryview(bytes(p.nbytes))]), 35)
    assert sum(p in staged for p in parts) == 3


def test_nothing_is_given_out_as_nothing() -> None:
    staged = Staged([part("none", 0)], lambda _: iter(()), 0)
    assert list(staged.pieces(part("none", 0))) == []
