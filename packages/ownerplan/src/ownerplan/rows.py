"""Rows: where tensors lie in a flat buffer of which every equal part ends between rows.

The unit is the chunk, the least common multiple of all row sizes. Parts are whole chunks, and a
tensor starts where a chunk starts, or ends its first, incomplete chunk where a chunk ends. Either
way every border of a chunk is a border of rows. What is smaller than a chunk fills the gaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm, prod


def place_rows(
    shapes: Sequence[tuple[int, ...]], parts: int, block_size: int
) -> tuple[tuple[int, ...], int]:
    """Return the offset of each tensor and the size of the buffer, in elements.

    The order in the buffer is not that of `shapes`. The size is a multiple of `parts` chunks.
    """
    rows = [prod(shape[1:]) * block_size for shape in shapes]
    numels = [prod(shape) for shape in shapes]
    placing = _Placing(rows, numels, lcm(*rows))
    placing.place_all()
    unit = placing.chunk * parts
    return tuple(placing.offsets[at] for at in range(len(shapes))), _up(placing.cursor, unit)


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


class _Placing:
    """A buffer that is filled from its start; `cursor` is where the next whole chunk starts."""

    def __init__(self, rows: Sequence[int], numels: Sequence[int], chunk: int) -> None:
        self.offsets: dict[int, int] = {}
        self.cursor = 0
        self.chunk = chunk
        self._rows = rows
        self._numels = numels
        self._large = [at for at, numel in enumerate(numels) if numel >= chunk]
        small = [at for at, numel in enumerate(numels) if numel < chunk]
        self._small = sorted(small, key=lambda at: -numels[at])

    def place_all(self) -> None:
        """Place every tensor: the large ones, the small ones in their gaps, the rest behind."""
        while self._large:
            self._place(self._large.pop(0))
        for at in self._small:
            self.offsets[at] = _up(self.cursor, self._rows[at])
            self.cursor = self.offsets[at] + self._numels[at]

    def _place(self, at: int) -> None:
        self.offsets[at] = self.cursor
        end = self.cursor + self._numels[at]
        self.cursor = gap_end = _up(end, self.chunk)
        if end == gap_end:
            return
        partner = self._find_partner(gap_end - end)
        if partner is not None:
            self._large.remove(partner)
            gap_end -= self._numels[partner] % self.chunk
            self.offsets[partner] = gap_end
            self.cursor += self._numels[partner] // self.chunk * self.chunk
        self._fill(end, gap_end)

    def _find_partner(self, room: int) -> int | None:
        """The first large tensor whose incomplete chunk fits into `room` elements."""
        for at in self._large:
            if 0 < self._numels[at] % self.chunk <= room:
                return at
        return None

    def _fill(self, start: int, end: int) -> None:
        """Place the small tensors that fit between `start` and `end`."""
        left = []
        for at in self._small:
            offset = _up(start, self._rows[at])
            if offset + self._numels[at] <= end:
                self.offsets[at] = offset
                start = offset + self._numels[at]
            else:
                left.append(at)
        self._small = left
