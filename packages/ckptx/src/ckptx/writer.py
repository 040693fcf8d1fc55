"""Writer: files written from tensors where they lie in memory, with the digests of every byte."""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Self, TypeAlias

from ckptx.crc import joined
from ckptx.errors import WriteError
from ckptx.integrity import BLOCK_NBYTES, Block
from ckptx.outfile import OutFile, Part
from ckptx.reader import memory_of, staging_for
from ckptx.unit import cut_box
from distcore.v1 import Region
from distcore.v1.runtime import Shard

COPY_NBYTES: Final = 8 << 20
"""The staging through which boxes go that do not lie in order in CPU memory."""


Pieces: TypeAlias = Callable[[Part], Iterator[memoryview]]
"""Gives the bytes of a box in row-major order, piece by piece."""


class FileWriting:
    """A file that is being written into a directory, where it must not be yet.

    WriteError where the system refuses; the file is incomplete then. Use `with`, or `close`.
    """

    def __init__(self, file: OutFile, directory: str) -> None:
        self.file = file
        self._path = os.path.join(directory, file.name)
        try:
            self._output = _Output(self._path)
        except OSError as error:
            raise write_error(error, self._path) from error

    def write(self, parts: Iterable[Part], pieces: Pieces) -> None:
        """Write some of the parts, in any order."""
        try:
            for part in parts:
                _write_part(part, pieces(part), self._output)
        except OSError as error:
            raise write_error(error, self._path) from error

    def finish(self) -> tuple[Block, ...]:
        """Write the head, and wait until all is on the disk; returns the digests of all bytes."""
        try:
            if self.file.head:
                self._output.put(0, self.file.head)
            self._output.sync()
        except OSError as error:
            raise write_error(error, self._path) from error
        return tuple(sorted(self._output.blocks))

    def close(self) -> None:
        """Close the file. Once is enough, more does no harm."""
        self._output.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write_bytes(data: bytes, path: str) -> None:
    """Write a small file whole, and wait until it is on the disk."""
    try:
        with _Output(path) as output:
            output.put(0, data)
            output.sync()
    except OSError as error:
        raise write_error(error, path) from error


def write_error(error: OSError, path: str) -> WriteError:
    """What the system said, as an error of ckptx."""
    return WriteError(error.errno or errno.EIO, error.strerror or str(error), path)


def pieces_of(shard: Shard, region: Region, copy_nbytes: int) -> Iterator[memoryview]:
    """The bytes of a box in row-major order, piece by piece; each holds until the next is taken.

    What lies in order in CPU memory is not copied; anything else goes through staging.
    """
    if region.is_empty:
        return  # nobody need hold it
    flat = shard.box(region).flat("cpu")
    if flat is not None:
        yield memory_of(flat)
        return
    size = shard.data.element_size()
    nbytes = min(copy_nbytes, region.numel * size)
    staging = staging_for(shard.data.device.type, nbytes)
    left = [region]
    while left:
        box = left.pop()
        if box.numel * size > nbytes:
            before, behind = cut_box(box, nbytes // size, 1)
            left += reversed(before + behind)
            continue
        part = staging[: box.numel * size]
        shard.box(box).read_into(part)
        yield memory_of(part)


def _write_part(part: Part, pieces: Iterator[memoryview], output: _Output) -> None:
    at, crc = part.begin, 0
    blocks = _Blocks(part.begin)
    for piece in pieces:
        for low in range(0, len(piece), BLOCK_NBYTES):
            data = piece[low : low + BLOCK_NBYTES]
            output.write(at, data)
            blocks.add(data)
            at += len(data)
    found = blocks.finish()
    output.blocks += found
    if part.frame is not None:
        for block in found:
            crc = joined(crc, block.crc, block.nbytes)
        head, tail = part.frame.around(crc)
        output.put(part.begin - len(head), head)
        output.put(part.begin + part.nbytes, tail)


class _Blocks:
    """Cuts a run of bytes into blocks as it comes along."""

    def __init__(self, begin: int) -> None:
        self._begin = begin
        self._nbytes = self._crc = 0
        self._done: list[Block] = []

    def add(self, data: memoryview) -> None:
        """Take in the next bytes, in whatever pieces they come."""
        while len(data):
            part = data[: BLOCK_NBYTES - self._nbytes]
            self._crc = zlib.crc32(part, self._crc)
            self._nbytes += len(part)
            data = data[len(part) :]
            if self._nbytes == BLOCK_NBYTES:
                self._close()

    def finish(self) -> list[Block]:
        """All blocks."""
        if self._nbytes:
            self._close()
        return self._done

    def _close(self) -> None:
        self._done.append(Block(self._begin, self._nbytes, self._crc))
        self._begin += self._nbytes
        self._nbytes = self._crc = 0


class _Output:
    """A new file that is written at given places; `blocks` are the digests so far."""

    def __init__(self, path: str) -> None:
        self.blocks: list[Block] = []
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def put(self, offset: int, data: bytes) -> None:
        """Write bytes, and keep their digest."""
        self.write(offset, memoryview(data))
        self.blocks.append(Block(offset, len(data), zlib.crc32(data)))

    def write(self, offset: int, data: memoryview) -> None:
        """Write bytes."""
        while len(data):
            count = os.pwrite(self._fd, data, offset)
            offset += count
            data = data[count:]

    def sync(self) -> None:
        """Wait until everything is on the disk."""
        os.fsync(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
