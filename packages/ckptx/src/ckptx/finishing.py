"""Finishing: files are written by all ranks, and then the directory is published by one."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import ExitStack
from typing import TypeAlias

from ckptx.integrity import FILE as INTEGRITY_FILE
from ckptx.integrity import Block, Integrity
from ckptx.publishing import prepare, publish
from ckptx.savejob import SaveJob
from ckptx.staged import Staged
from ckptx.ways import Ways
from ckptx.writer import FileWriting, Pieces

Blocks: TypeAlias = dict[str, tuple[Block, ...]]


def make_directory(path: str, ways: Ways, *, overwrite: bool) -> None:
    """Make the directory in which all ranks write. Collective."""

    def made() -> None:
        if not ways.channel.index:
            prepare(path, overwrite=overwrite)

    ways.together("make the directory", made)


def write_files(
    files: Iterable[FileWriting], pieces: Pieces, *, only: Staged | None = None
) -> Blocks:
    """Write the parts of files, or only those in `only`, and finish and close the files."""
    found: Blocks = {}
    with ExitStack() as stack:
        opened = [stack.enter_context(file) for file in files]
        for file in opened:
            parts = file.file.parts
            file.write(parts if only is None else [p for p in parts if p in only], pieces)
            found[file.file.name] = file.finish()
    return found


def publish_together(job: SaveJob, blocks: Blocks, ways: Ways, *, digests: bool) -> None:
    """Bring the digests together, and let the first rank publish. Collective."""
    sizes = {file.name: file.nbytes for file in job.out.files}
    rows = ways.rows(json.dumps(_numbers(blocks)).encode() if digests else b"")

    def published() -> None:
        if ways.channel.index:
            return
        last = dict(job.out.last)
        if digests:
            tables = [json.loads(row) for row in rows]
            found = {name: _blocks(flat) for table in tables for name, flat in table.items()}
            last = {INTEGRITY_FILE: Integrity(found, sizes).to_json().encode(), **last}
        publish(job.path, sizes, last)

    ways.together("publish the checkpoint", published)


def _numbers(blocks: Blocks) -> dict[str, list[int]]:
    return {
        name: [number for b in found for number in (b.begin, b.nbytes, b.crc)]
        for name, found in blocks.items()
    }


def _blocks(numbers: list[int]) -> tuple[Block, ...]:
    return tuple(map(Block, numbers[::3], numbers[1::3], numbers[2::3]))
