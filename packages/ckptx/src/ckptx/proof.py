"""Proof: everything that can be proven of a checkpoint: bounds, coverage, values and digests."""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from ckptx.checkpoint import Checkpoint
from ckptx.errors import CheckpointingException, CheckpointPlanError, FormatError
from ckptx.files import FileReader
from ckptx.formats import megatron
from ckptx.integrity import Block, Integrity, key_at
from ckptx.plan import plan_load
from ckptx.stored import Chunk
from distcore.v1 import Layout, itemsize

Progress = Callable[[int, int], None]
_READ_NBYTES: Final = 4 << 20


@dataclass(slots=True)
class Findings:
    """What was found: `damage` in words, and how many bytes which kind of digest has proven."""

    damage: list[str] = field(default_factory=list)
    proven: dict[str, int] = field(default_factory=dict)

    def add(self, kind: str, nbytes: int) -> None:
        """Count proven bytes."""
        self.proven[kind] = self.proven.get(kind, 0) + nbytes


def prove(checkpoint: Checkpoint, *, progress: Progress | None = None) -> Findings:
    """Read all that has a digest, and tell everything that is damaged. Raises nothing for damage.

    `progress` is called with the bytes read so far and those to be read.
    """
    found = Findings()
    needs = {
        key: Layout.replicated(shape=stored.shape, dtype=stored.dtype, ranks=(0,))
        for key, stored in checkpoint.tensors.items()
    }
    try:
        plan_load(needs, checkpoint.tensors, (0,))
    except CheckpointPlanError as error:
        found.damage += [f"{problem.where}: {problem.text}" for problem in error.problems]
    for key in checkpoint.objects:
        try:
            checkpoint.value(key)
        except CheckpointingException as error:
            found.damage.append(f"{key}: {error}")
    tasks = list(_tasks(checkpoint))
    total, done = sum(nbytes for nbytes, _ in tasks), 0
    with FileReader() as reader:
        for nbytes, task in tasks:
            try:
                kind = task(reader)
                found.add(kind, nbytes)
            except CheckpointingException as error:
                found.damage.append(str(error))
            done += nbytes
            if progress is not None:
                progress(done, total)
    return found


Task = tuple[int, Callable[[FileReader], str]]


def _tasks(checkpoint: Checkpoint) -> Iterator[Task]:
    """What is to be read, and how it is proven."""
    integrity = checkpoint.integrity
    directory = checkpoint.name
    if not os.path.isdir(directory):
        directory = os.path.dirname(directory)
    covered = integrity.blocks if integrity is not None else {}
    if integrity is not None:
        for name, blocks in integrity.blocks.items():
            file = os.path.join(directory, name)
            yield 0, _sized(file, integrity, name)
            yield from ((block.nbytes, _block(checkpoint, file, block)) for block in blocks)
    for key, stored in checkpoint.tensors.items():
        for chunk in stored.chunks:
            if chunk.crc is not None and os.path.basename(chunk.file) not in covered:
                nbytes = chunk.region.numel * itemsize(stored.dtype)
                yield nbytes, _chunk(key, chunk, nbytes)
    if checkpoint.format == "megatron":
        with FileReader() as reader:
            hashes = megatron.hashes(reader, directory)
            sizes = {name: reader.size(os.path.join(directory, name)) for name in hashes}
        for name, digest in hashes.items():
            yield sizes[name], _hashed(os.path.join(directory, name), digest)


def _sized(file: str, integrity: Integrity, name: str) -> Callable[[FileReader], str]:
    def task(reader: FileReader) -> str:
        size = reader.size(file)
        if size != integrity.sizes[name]:
            text = f"it has {size} bytes, it was written with {integrity.sizes[name]}"
            raise FormatError(text, file=file)
        return "ckptx digests"

    return task


def _block(checkpoint: Checkpoint, file: str, block: Block) -> Callable[[FileReader], str]:
    def task(reader: FileReader) -> str:
        if _crc(reader, file, block.begin, block.nbytes) != block.crc:
            key = key_at(checkpoint.tensors, os.path.basename(file), block)
            text = f"damaged: the {block.nbytes} bytes from here on are not what was written"
            raise FormatError(text, file=file, key=key, offset=block.begin)
        return "ckptx digests"

    return task


def _chunk(key: str, chunk: Chunk, nbytes: int) -> Callable[[FileReader], str]:
    def task(reader: FileReader) -> str:
        if _crc(reader, chunk.file, chunk.offset, nbytes) != chunk.crc:
            text = f"damaged: the {nbytes} bytes from here on do not have their archive's CRC-32"
            raise FormatError(text, file=chunk.file, key=key, offset=chunk.offset)
        return "archive CRC-32"

    return task


def _hashed(file: str, digest: str) -> Callable[[FileReader], str]:
    def task(reader: FileReader) -> str:
        state = hashlib.sha256()
        for data in _pieces(reader, file, 0, reader.size(file)):
            state.update(data)
        if state.hexdigest() != digest.lower():
            raise FormatError("damaged: its SHA-256 is not that of integrity.json", file=file)
        return "SHA-256"

    return task


def _crc(reader: FileReader, file: str, offset: int, nbytes: int) -> int:
    crc = 0
    for data in _pieces(reader, file, offset, nbytes):
        crc = zlib.crc32(data, crc)
    return crc


def _pieces(reader: FileReader, file: str, offset: int, nbytes: int) -> Iterator[bytes]:
    for begin in range(offset, offset + nbytes, _READ_NBYTES):
        yield reader.read(file, begin, min(_READ_NBYTES, offset + nbytes - begin))
