"""Unit: a box of a stored chunk that one rank reads as a whole, and who needs what of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ckptx.cell import Cell
from ckptx.stored import Chunk, StoredTensor, position, runs
from distcore.v1 import Region, itemsize


@dataclass(frozen=True, slots=True)
class Unit:
    """A box `region` of `chunk` to be read, and the cells in it that are wanted.

    A unit that is not `staged` has one cell, which is the region itself: it is read straight into
    the reader's own place. A staged unit covers cells that lie in the file in runs too short to
    be read one by one, or with their dims in another order; it is read whole, and every rank, the
    reader too, gets its part from there.
    `nbytes` are read for it, from byte `offset` of the file on.
    """

    key: str
    chunk: Chunk
    region: Region
    cells: tuple[Cell, ...]
    itemsize: int
    staged: bool
    nbytes: int = field(init=False)
    offset: int = field(init=False)

    def __post_init__(self) -> None:
        chunk = self.chunk
        place = position(chunk.in_file(self.region).start, chunk.in_file(chunk.region))
        object.__setattr__(self, "nbytes", self.region.numel * self.itemsize)
        object.__setattr__(self, "offset", self.chunk.offset + place * self.itemsize)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Every rank that needs something of it, in the order of their first cells."""
        if len(self.cells) == 1:
            return self.cells[0].ranks
        return tuple(dict.fromkeys(rank for cell in self.cells for rank in cell.ranks))

    def part(self, region: Region) -> Unit:
        """The unit of a smaller box. It may have no cell: then nobody wants it."""
        found = ((cell.region.intersect(region), cell.ranks) for cell in self.cells)
        cells = tuple(Cell(box, ranks) for box, ranks in found if box is not None)
        return Unit(self.key, self.chunk, region, cells, self.itemsize, self.staged)

    def cut(self, nbytes: int, min_split: int) -> tuple[list[Unit], list[Unit]]:
        """Cut it after about `nbytes` bytes, in the file's order: what lies before, and behind.

        Neither side becomes smaller than `min_split`, unless it has nothing; the cut is off by no
        more than that.
        """
        if nbytes < min_split or self.nbytes - nbytes < min_split:
            return ([self], []) if nbytes * 2 >= self.nbytes else ([], [self])
        grain = max(1, min_split // (4 * self.itemsize))
        boxes = cut_box(self.chunk.in_file(self.region), nbytes // self.itemsize, grain)
        before, behind = ([self.part(self.chunk.from_file(box)) for box in side] for side in boxes)
        return before, behind


def cut_box(box: Region, numel: int, grain: int) -> tuple[list[Region], list[Region]]:
    """Cut a box after about `numel` elements, counted row-major, into boxes before and behind.

    Rows of at most `grain` elements stay whole, so that the cut is off by no more than that.

    >>> before, behind = cut_box(Region((0, 0), (4, 10)), 23, 1)
    >>> [box.shape for box in before], [box.shape for box in behind]
    ([(2, 10), (1, 3)], [(1, 7), (1, 10)])
    """
    if numel <= 0 or numel >= box.numel:
        return ([], [box]) if numel <= 0 else ([box], [])
    dim = next(d for d, length in enumerate(box.shape) if length > 1)
    row = box.numel // box.shape[dim]
    whole, rest = divmod(numel, row)
    if row <= grain:
        whole, rest = whole + (rest * 2 >= row), 0
    edge = box.start[dim] + whole
    before, behind = [_slab(box, dim, box.start[dim], edge)], []
    if rest:
        inner_before, inner_behind = cut_box(_slab(box, dim, edge, edge + 1), rest, grain)
        before, behind, edge = before + inner_before, inner_behind, edge + 1
    behind = [*behind, _slab(box, dim, edge, box.stop[dim])]
    return [b for b in before if not b.is_empty], [b for b in behind if not b.is_empty]


def units_of(
    key: str, stored: StoredTensor, cells: Iterable[Cell], min_run: int
) -> tuple[list[Unit], list[Cell]]:
    """How the cells of one tensor are read: the units, and the cells not held exactly once.

    A cell in one run, or in runs of at least `min_run` bytes, is a unit of its own. Others are
    covered by boxes of whole rows, unless less than half of such a box is wanted.
    """
    size = itemsize(stored.dtype)
    units, astray = [], []
    short: dict[tuple[Chunk, Region], list[Cell]] = {}
    for cell in cells:
        left = numel = cell.region.numel
        for chunk in stored.chunks:
            region = cell.region.intersect(chunk.region)
            if region is None:
                continue
            if region == cell.region:
                left, part = left - numel, cell
            else:
                left, part = left - region.numel, Cell(region, cell.ranks)
            count, length = runs(chunk.in_file(region), chunk.in_file(chunk.region))
            if count == 1 or length * size >= min_run:
                # Dims in another order are put right on the way out of staging.
                units.append(Unit(key, chunk, region, (part,), size, staged=bool(chunk.order)))
            else:
                around = chunk.in_file(chunk.region)
                cover = _cover(chunk.in_file(region), around, -(-min_run // size))
                short.setdefault((chunk, chunk.from_file(cover)), []).append(part)
        if left:
            astray.append(cell)
    for (chunk, cover), parts in short.items():
        units.extend(_covering(key, chunk, cover, tuple(parts), size))
    return units, astray


def _covering(
    key: str, chunk: Chunk, cover: Region, parts: tuple[Cell, ...], size: int
) -> Iterator[Unit]:
    if 2 * sum(part.region.numel for part in parts) >= cover.numel:
        yield Unit(key, chunk, cover, parts, size, staged=True)
    else:
        for part in parts:
            yield Unit(key, chunk, part.region, (part,), size, staged=bool(chunk.order))


def _cover(region: Region, chunk: Region, min_numel: int) -> Region:
    """The smallest box around `region` that lies in one run, or in runs of `min_numel` elements.

    It is widened to whole rows from the last dim on.
    """
    for dim in reversed(range(region.ndim)):
        count, length = runs(region, chunk)
        if count == 1 or length >= min_numel:
            break
        region = _slab(region, dim, chunk.start[dim], chunk.stop[dim])
    return region


def _slab(box: Region, dim: int, low: int, high: int) -> Region:
    start, stop = box.start, box.stop
    return Region((*start[:dim], low, *start[dim + 1 :]), (*stop[:dim], high, *stop[dim + 1 :]))
