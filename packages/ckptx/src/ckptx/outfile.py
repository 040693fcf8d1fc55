"""Outfile: one file that is to be written: what stands in it from the start, and where boxes go."""

from __future__ import annotations

from dataclasses import dataclass

from ckptx.formats.archive import Frame
from distcore.v1 import Region


@dataclass(frozen=True, slots=True)
class Part:
    """One box of a tensor in a file: `nbytes` bytes, row-major, from byte `begin` on.

    Where it lies in an archive, `frame` is what stands around it, and is written once the digest
    of the bytes is known.
    """

    key: str
    region: Region
    begin: int
    nbytes: int
    frame: Frame | None = None


@dataclass(frozen=True, slots=True)
class OutFile:
    """A file of `nbytes` bytes that `rank` writes; `head` stands at its beginning."""

    name: str
    rank: int
    head: bytes
    parts: tuple[Part, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class OutFormat:
    """All files of a checkpoint, and the small ones that are written last, by name."""

    files: tuple[OutFile, ...]
    last: dict[str, bytes]
