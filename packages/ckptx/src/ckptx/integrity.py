"""Integrity: digests of blocks of a checkpoint's files, and proof that what was read fits them.

The digests lie in a side file, so that other readers are not affected. They are CRC-32: one that
many ranks can work out together, each from the part of a block that it has read.
"""

from __future__ import annotations

import json
import os
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from ckptx.crc import joined
from ckptx.errors import FormatError
from ckptx.files import FileReader
from ckptx.stored import StoredTensor
from distcore.v1 import itemsize

FILE: Final = "ckptx.integrity.json"
FORMAT: Final = 1
BLOCK_NBYTES: Final = 4 << 20
"""The most bytes that one digest covers."""

_MAX_NBYTES: Final = 1 << 30


@dataclass(frozen=True, slots=True, order=True)
class Block:
    """A range of a file, and the CRC-32 of its bytes."""

    begin: int
    nbytes: int
    crc: int


@dataclass(frozen=True, slots=True)
class Integrity:
    """The blocks of each file, in order, by the file's name; they do not overlap.

    `sizes` are the files' sizes in bytes, where they are known.
    """

    blocks: Mapping[str, tuple[Block, ...]]
    sizes: Mapping[str, int]

    def to_json(self) -> str:
        """The side file's text."""
        files = {
            name: {
                "nbytes": self.sizes[name],
                "blocks": [
                    part for block in blocks for part in (block.begin, block.nbytes, block.crc)
                ],
            }
            for name, blocks in sorted(self.blocks.items())
        }
        return json.dumps({"format": FORMAT, "digest": "crc32", "files": files})

    @classmethod
    def from_json(cls, text: str, file: str) -> Integrity:
        """Read the side file's text; FormatError where it is none, or of a later format."""
        try:
            table = json.loads(text)
            if (table["format"], table["digest"]) != (FORMAT, "crc32"):
                raise ValueError(f"its format is {table['format']} {table['digest']}")
            blocks = {name: _blocks(entry["blocks"]) for name, entry in table["files"].items()}
            sizes = {name: int(entry["nbytes"]) for name, entry in table["files"].items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise FormatError(f"it holds no digests that are read here: {error}", file=file) from (
                error
            )
        return cls(blocks, sizes)


def _blocks(numbers: Sequence[int]) -> tuple[Block, ...]:
    if len(numbers) % 3 or not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError("the blocks are damaged")
    found = tuple(map(Block, numbers[::3], numbers[1::3], numbers[2::3]))
    for one, other in pairwise(found):
        if one.begin + one.nbytes > other.begin:
            raise ValueError("two blocks overlap")
    return found


def read_integrity(reader: FileReader, name: str) -> Integrity | None:
    """The digests beside a checkpoint at a path; None where there are none."""
    directory = name if os.path.isdir(name) else os.path.dirname(name)
    file = os.path.join(directory, FILE)
    if not os.path.exists(file):
        return None
    size = reader.size(file)
    if size > _MAX_NBYTES:
        raise FormatError(f"{size} bytes are too many for digests", file=file)
    try:
        text = reader.read(file, 0, size).decode()
    except UnicodeDecodeError as error:
        raise FormatError(f"not text: {error}", file=file) from error
    return Integrity.from_json(text, file)


def blocks_of(begin: int, data: memoryview) -> Iterator[Block]:
    """The blocks of bytes that lie in a file from byte `begin` on."""
    for low in range(0, len(data), BLOCK_NBYTES):
        part = data[low : low + BLOCK_NBYTES]
        yield Block(begin + low, len(part), zlib.crc32(part))


@dataclass(frozen=True, slots=True, order=True)
class Part:
    """What was read of one block: the block's file and number, the range of it, and its CRC-32."""

    file: str
    block: int
    begin: int
    nbytes: int
    crc: int


class Inspector:
    """Sees what is read, and tells which blocks are not as they were written.

    `watch` is a FileReader's watcher. Blocks that were read in parts only, by all ranks together
    too, are never judged.
    """

    def __init__(self, integrity: Integrity, tensors: Mapping[str, StoredTensor]) -> None:
        self._integrity = integrity
        self._tensors = tensors
        self._begins = {
            name: [block.begin for block in blocks] for name, blocks in integrity.blocks.items()
        }
        self._parts: dict[tuple[str, int], list[Part]] = {}
        self._paths: dict[str, str] = {}

    def watch(self, file: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Take in what was read from byte `offset` of a file on."""
        name = os.path.basename(file)
        begins = self._begins.get(name)
        if begins is None:
            return
        self._paths[name] = file
        for buffer in buffers:
            self._take(name, begins, offset, buffer)
            offset += len(buffer)

    def _take(self, name: str, begins: list[int], offset: int, buffer: memoryview) -> None:
        end = offset + len(buffer)
        number = max(0, bisect_right(begins, offset) - 1)
        while number < len(begins) and begins[number] < end:
            block = self._integrity.blocks[name][number]
            low, high = max(offset, block.begin), min(end, block.begin + block.nbytes)
            if low < high:
                crc = zlib.crc32(buffer[low - offset : high - offset])
                part = Part(name, number, low - block.begin, high - low, crc)
                self._parts.setdefault((name, number), []).append(part)
            number += 1

    def judge(self) -> list[Part]:
        """Judge the blocks that were read whole. Returns the parts of all others, and drops them.

        FormatError names the file, the tensor and the byte of the first block that is damaged.
        """
        left: list[Part] = []
        for (name, number), parts in sorted(self._parts.items()):
            block = self._integrity.blocks[name][number]
            found = _whole(parts, block.nbytes)
            if not found:
                left += parts
            elif found != {block.crc}:
                raise self._damaged(name, block)
        self._parts = {}
        return left

    def add(self, parts: Iterable[Part]) -> None:
        """Take in what other ranks have read."""
        for part in parts:
            self._parts.setdefault((part.file, part.block), []).append(part)

    def _damaged(self, name: str, block: Block) -> FormatError:
        text = (
            f"damaged: the {block.nbytes} bytes from here on have not the digest "
            f"{block.crc:08x} that was written with them"
        )
        key = key_at(self._tensors, name, block)
        return FormatError(text, file=self._paths.get(name, name), key=key, offset=block.begin)


def key_at(tensors: Mapping[str, StoredTensor], name: str, block: Block) -> str | None:
    """The tensor that has bytes in a block of a file; None where it has none of any."""
    for key, stored in tensors.items():
        size = itemsize(stored.dtype)
        for chunk in stored.chunks:
            end = chunk.offset + chunk.region.numel * size
            begins_before = chunk.offset < block.begin + block.nbytes
            if os.path.basename(chunk.file) == name and begins_before and block.begin < end:
                return key
    return None


def _whole(parts: Iterable[Part], nbytes: int) -> set[int]:
    """The CRC-32 of a block as the parts give it; none where they leave something out.

    Parts may overlap. Where two readings of the same bytes differ there are two.
    """
    upto = {0: {0}}
    for part in sorted(set(parts)):
        for crc in upto.get(part.begin, ()):
            ends = upto.setdefault(part.begin + part.nbytes, set())
            # Two are enough to know that one of them is wrong.
            if len(ends) < 2:
                ends.add(joined(crc, part.crc, part.nbytes))
    return upto.get(nbytes, set())
