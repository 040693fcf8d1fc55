"""Staged: copies of boxes that one rank is still to write, so that the tensors may change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ckptx.outfile import Part
from ckptx.writer import Pieces
from distcore.v1 import Region


class Staged:
    """Copies of as many boxes as fit into a budget of bytes; each is given out once."""

    def __init__(self, parts: Iterable[Part], pieces: Pieces, budget: int) -> None:
        self._copies: dict[tuple[str, Region], bytearray] = {}
        for part in parts:
            if part.nbytes > budget:
                continue
            budget -= part.nbytes
            copy = bytearray(part.nbytes)
            at = 0
            for data in pieces(part):
                copy[at : at + len(data)] = data
                at += len(data)
            self._copies[part.key, part.region] = copy

    def __contains__(self, part: Part) -> bool:
        return (part.key, part.region) in self._copies

    def pieces(self, part: Part) -> Iterator[memoryview]:
        """The bytes of a box, and its copy is gone."""
        copy = self._copies.pop((part.key, part.region))
        if copy:
            yield memoryview(copy)
