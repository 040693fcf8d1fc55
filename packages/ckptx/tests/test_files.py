"""Ranged reads: exact bytes, many buffers, files that end too soon, and no open file left."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import pytest

import ckptx.files
from ckptx.errors import FormatError, ReadError
from ckptx.files import FileReader


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "data"
    path.write_bytes(bytes(i % 251 for i in range(10_000)))
    return str(path)


def test_bytes_land_in_the_given_memory_in_order(file: str) -> None:
    target = bytearray(10)
    view = memoryview(target)
    with FileReader() as reader:
        reader.read_into(file, 100, [view[4:10], view[0:0], view[0:4]])
    assert list(target) == [106, 107, 108, 109, 100, 101, 102, 103, 104, 105]
    assert reader.nbytes == 10


def test_more_buffers_and_bytes_than_one_call_takes(
    file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ckptx.files, "MAX_BUFFERS", 3)
    monkeypatch.setattr(ckptx.files, "CALL_NBYTES", 64)
    target = bytearray(9_000)
    view = memoryview(target)
    edges = [0, 1, 2, 3, 5, 200, 201, 1_000, 9_000]
    buffers = [view[low:high] for low, high in pairwise(edges)]
    with FileReader() as reader:
        reader.read_into(file, 500, buffers)
    assert target == Path(file).read_bytes()[500:9_500]


def test_short_reads_are_continued(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.preadv

    def some(fd: int, buffers: list[memoryview], offset: int) -> int:
        return whole(fd, [buffers[0][:7]], offset)

    monkeypatch.setattr(os, "preadv", some)
    with FileReader() as reader:
        assert reader.read(file, 3, 100) == Path(file).read_bytes()[3:103]
    assert reader.nbytes == 100


def test_a_file_that_ends_too_soon_says_where(file: str) -> None:
    with FileReader() as reader, pytest.raises(FormatError, match="30 bytes too soon") as caught:
        reader.read(file, 9_970, 60)
    assert (caught.value.file, caught.value.offset) == (file, 10_000)


def test_an_error_of_the_system_keeps_its_number(file: str) -> None:
    with FileReader() as reader:
        reader.read(file, 0, 1)
        with pytest.raises(ReadError, match="Is a directory") as caught:
            reader.read(os.path.dirname(file), 0, 1)
    assert caught.value.errno == 21


def test_no_file_stays_open(file: str, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"xy")
    before = set(os.listdir("/proc/self/fd"))
    with FileReader() as reader:
        for _ in range(3):
            reader.read(file, 0, 1)
            reader.read(str(other), 0, 1)
        assert len(os.listdir("/proc/self/fd")) == len(before) + 1
    assert set(os.listdir("/proc/self/fd")) == before
    reader.close()
