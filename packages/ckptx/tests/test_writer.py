"""writer: every byte at its place with its digest, whatever memory it comes from; and refusals."""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptx import CheckpointingException
from ckptx.errors import WriteError
from ckptx.integrity import BLOCK_NBYTES, Block
from ckptx.outfile import OutFile, Part
from ckptx.writer import FileWriting, pieces_of, write_bytes, write_error
from distcore.v1 import Piece, Region
from distcore.v1.runtime import Shard

WHOLE = Region((0, 0, 0), (4, 5, 6))


def cube(order: list[int], dtype: torch.dtype = torch.int16) -> Shard:
    """A cube whose dims lie in memory in the given order."""
    values = torch.arange(120, dtype=dtype).reshape(4, 5, 6)
    lying = values.permute(order).contiguous()
    back = lying.permute([order.index(dim) for dim in range(3)])
    return Shard(back, (Piece(WHOLE, (0, 0, 0)),))


@st.composite
def boxes(draw: st.DrawFn) -> Region:
    edges = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in WHOLE.stop]
    return Region(tuple(low for low, _ in edges), tuple(high for _, high in edges))


@given(boxes(), st.permutations([0, 1, 2]), st.integers(2, 300))
def test_pieces_are_the_box_in_row_major_order(
    box: Region, order: list[int], copy_nbytes: int
) -> None:
    found = [bytes(piece) for piece in pieces_of(cube(order), box, copy_nbytes)]
    values = torch.arange(120, dtype=torch.int16).reshape(4, 5, 6)[box.slices()]
    assert b"".join(found) == values.contiguous().numpy().tobytes()
    assert all(found)
    if order != [0, 1, 2] and len(found) > 1:
        assert max(map(len, found)) <= copy_nbytes


def test_what_lies_in_order_is_not_copied() -> None:
    shard = cube([0, 1, 2])
    (piece,) = pieces_of(shard, Region((1, 0, 0), (3, 5, 6)), 2)
    shard.data[1, 0, 0] = 77
    assert piece[:2] == (77).to_bytes(2, "little")


def given_pieces(data: bytes, size: int) -> Iterator[memoryview]:
    for low in range(0, len(data), size):
        yield memoryview(data)[low : low + size]


def part(key: str, begin: int, nbytes: int) -> Part:
    return Part(key, Region((0,), (nbytes,)), begin, nbytes)


def test_parts_in_any_order_make_the_file(tmp_path: Path) -> None:
    parts = (part("a", 4, 10), part("none", 14, 0), part("b", 14, 7))
    data = {"a": bytes(range(10)), "none": b"", "b": bytes(range(100, 107))}
    file = OutFile("f", 0, b"head", parts, 21)
    with FileWriting(file, str(tmp_path)) as writing:
        writing.write(reversed(parts), lambda p: given_pieces(data[p.key], 3))
        blocks = writing.finish()
    written = (tmp_path / "f").read_bytes()
    assert written == b"head" + data["a"] + data["b"]
    assert blocks == (
        Block(0, 4, zlib.crc32(b"head")),
        Block(4, 10, zlib.crc32(data["a"])),
        Block(14, 7, zlib.crc32(data["b"])),
    )


@pytest.mark.parametrize("size", [BLOCK_NBYTES + 5, 1 << 20, 999_983])
def test_a_digest_covers_no_more_than_a_block(tmp_path: Path, size: int) -> None:
    """However the bytes come along."""
    data = bytes(range(256)) * ((2 * BLOCK_NBYTES) // 256) + b"tail"
    only = part("a", 0, len(data))
    with FileWriting(OutFile("f", 0, b"", (only,), len(data)), str(tmp_path)) as writing:
        writing.write((only,), lambda _: given_pieces(data, size))
        blocks = writing.finish()
    assert [(block.begin, block.nbytes) for block in blocks] == [
        (0, BLOCK_NBYTES),
        (BLOCK_NBYTES, BLOCK_NBYTES),
        (2 * BLOCK_NBYTES, 4),
    ]
    assert all(zlib.crc32(data[b.begin : b.begin + b.nbytes]) == b.crc for b in blocks)
    assert (tmp_path / "f").read_bytes() == data


def test_a_short_write_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: write(fd, data[:3], offset))
    write_bytes(b"0123456789", str(tmp_path / "f"))
    assert (tmp_path / "f").read_bytes() == b"0123456789"


def test_a_file_that_is_there_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"old")
    with pytest.raises(WriteError) as caught:
        FileWriting(OutFile("f", 0, b"new", (), 3), str(tmp_path))
    assert (caught.value.errno, caught.value.filename) == (errno.EEXIST, str(tmp_path / "f"))
    with pytest.raises(WriteError, match="File exists"):
        write_bytes(b"new", str(tmp_path / "f"))
    assert (tmp_path / "f").read_bytes() == b"old"


@pytest.mark.parametrize("call", ["pwrite", "fsync"])
def test_what_the_system_refuses_is_told_with_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, full)
    only = part("a", 0, 4)

    def written() -> None:
        with FileWriting(OutFile("f", 0, b"", (only,), 4), str(tmp_path)) as writing:
            writing.write((only,), lambda _: given_pieces(b"data", 4))
            writing.finish()

    with pytest.raises(WriteError, match="No space left") as caught:
        written()
    assert isinstance(caught.value, CheckpointingException)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(tmp_path / "f"))


def test_it_is_closed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []
    close = os.close

    def counted(fd: int) -> None:
        closed.append(fd)
        close(fd)

    monkeypatch.setattr(os, "close", counted)
    with FileWriting(OutFile("f", 0, b"", (), 0), str(tmp_path)) as writing:
        pass
    writing.close()
    assert len(closed) == 1


def test_an_error_without_a_number_gets_one() -> None:
    found = write_error(OSError("it broke"), "f")
    assert (found.errno, found.strerror, found.filename) == (errno.EIO, "it broke", "f")


def test_a_box_without_elements_need_not_be_held() -> None:
    """The first rank writes what has no elements, whatever it holds of it."""
    shard = Shard(torch.zeros(3, 0, 1), (Piece(Region((0, 0, 1), (3, 0, 2)), (0, 0, 0)),))
    assert list(pieces_of(shard, Region((0, 0, 0), (3, 0, 2)), 64)) == []
