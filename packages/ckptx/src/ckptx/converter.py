"""convert: write a checkpoint anew in another format, in bounded memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from ckptx.checkpoint import Checkpoint, Source, open_checkpoint
from ckptx.errors import as_checkpoint_errors
from ckptx.files import FileReader
from ckptx.finishing import make_directory, publish_together, write_files
from ckptx.integrity import Inspector
from ckptx.outfile import Part
from ckptx.reader import read_region
from ckptx.report import SaveReport
from ckptx.savejob import Format, SaveJob
from ckptx.settling import settle
from ckptx.unit import cut_box
from ckptx.ways import DEFAULT_STAGING_NBYTES, Ways, seconds_of
from ckptx.writer import pieces_of
from distcore.v1 import Piece, itemsize
from distcore.v1.runtime import Group, Shard, channel_over

Progress = Callable[[int, int], None]
_PART_OF_STAGING: Final = 8


def convert(
    source: Source,
    path: str | os.PathLike[str],
    *,
    group: Group | None = None,
    format: Format = "safetensors",  # noqa: A002 - the word that users of such functions know
    overwrite: bool = False,
    split: bool = False,
    digests: bool = True,
    verify: bool = True,
    max_staging_bytes: int = DEFAULT_STAGING_NBYTES,
    progress: Progress | None = None,
    timeout: float | timedelta | None = None,
) -> SaveReport:
    """Write what `source` holds as a new checkpoint at `path`.

    Collective over `group`; the ranks share out the bytes. No rank holds more than
    `max_staging_bytes` of tensors at a time. With `verify`, what is read is proven by the
    source's digests, where it has any, before anything is published. `progress` is called with
    the bytes that this rank has written so far, and all that it is to write.

    The other arguments and the errors are those of `save`.
    """
    started = time.monotonic()
    checkpoint = open_checkpoint(source)
    inspector = None
    if verify and checkpoint.integrity is not None:
        inspector = Inspector(checkpoint.integrity, checkpoint.tensors)
    with (
        as_checkpoint_errors(),
        channel_over(group) as channel,
        FileReader(inspector.watch if inspector is not None else None) as files,
    ):
        ways = Ways(channel, max_staging_bytes, "auto", verify, seconds_of(timeout))
        stream = _Stream(checkpoint, files, max_staging_bytes // _PART_OF_STAGING, progress)

        def described() -> SaveJob:
            ways.check()
            return SaveJob.of_checkpoint(
                checkpoint, os.fspath(path), channel, kind=format, source=stream.pieces
            )

        job = ways.together("describe the checkpoint", described)
        job.plan(ways, split=split, overwrite=overwrite)
        stream.total = job.saved.written_nbytes(channel.rank)
        make_directory(job.path, ways, overwrite=overwrite)
        blocks = ways.together("write the checkpoint", lambda: write_files(job.open(), job.pieces))
        if inspector is not None:
            settle(inspector, ways)
        publish_together(job, blocks, ways, digests=digests)
        return job.report(time.monotonic() - started)


@dataclass(slots=True)
class _Stream:
    """Boxes of a checkpoint, read in pieces of at most `piece_nbytes` bytes."""

    checkpoint: Checkpoint
    files: FileReader
    piece_nbytes: int
    progress: Progress | None
    total: int = 0
    done: int = 0

    def pieces(self, part: Part) -> Iterator[memoryview]:
        """The bytes of a box in row-major order, piece by piece."""
        stored = self.checkpoint.tensors[part.key]
        numel = max(1, self.piece_nbytes // itemsize(stored.dtype))
        left = [part.region] if part.nbytes else []
        while left:
            box = left.pop()
            if box.numel > numel:
                before, behind = cut_box(box, numel, 1)
                left += reversed(before + behind)
                continue
            found = read_region(part.key, stored, box, self.files)
            shard = Shard(found, (Piece(box, (0,) * box.ndim),))
            yield from pieces_of(shard, box, found.nbytes)
            self.done += found.nbytes
            if self.progress is not None:
                self.progress(self.done, self.total)
