"""Cells: a tensor cut into boxes so that each box is needed by one set of ranks as a whole."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

from distcore.v1 import Layout, Region


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """A Region that each of `ranks` needs whole. `ranks` are in the order of the group."""

    region: Region
    ranks: tuple[int, ...]


def cells_of(layout: Layout, ranks: Sequence[int]) -> list[Cell]:
    """The cells of one tensor, over those ranks of the layout that are in `ranks`.

    Cells do not overlap and are in row-major order of their starts; together they hold exactly
    what the ranks hold. Empty pieces have none.
    """
    holders: dict[Region, list[int]] = {}
    for rank in ranks:
        for piece in layout.pieces(rank):
            if not piece.region.is_empty:
                holders.setdefault(piece.region, []).append(rank)
    if not _overlap(list(holders)):
        return [Cell(region, tuple(holders[region])) for region in sorted(holders)]
    return _common_refinement({region: tuple(held) for region, held in holders.items()}, ranks)


def _overlap(regions: list[Region]) -> bool:
    """Whether two of some regions have an element in common: a sweep along the busiest dim."""
    if len(regions) < 2:
        return False
    ndim = regions[0].ndim
    dim = max(range(ndim), key=lambda d: len({region.start[d] for region in regions}), default=0)
    active: list[Region] = []
    for region in sorted(regions, key=lambda region: region.start[dim : dim + 1]):
        active = [other for other in active if not ndim or other.stop[dim] > region.start[dim]]
        if any(other.intersect(region) is not None for other in active):
            return True
        active.append(region)
    return False


def _common_refinement(
    holders: Mapping[Region, tuple[int, ...]], ranks: Sequence[int]
) -> list[Cell]:
    """Cut along every face of every region, then join what has the same ranks again."""
    order = {rank: i for i, rank in enumerate(ranks)}
    ndim = next(iter(holders)).ndim
    cuts = [
        sorted({edge for region in holders for edge in (region.start[d], region.stop[d])})
        for d in range(ndim)
    ]
    found: dict[Region, set[int]] = {}
    for region, held in holders.items():
        steps = [
            list(
                pairwise(cuts[d][_at(cuts[d], region.start[d]) : _at(cuts[d], region.stop[d]) + 1])
            )
            for d in range(ndim)
        ]
        for box in product(*steps):
            part = Region(tuple(low for low, _ in box), tuple(high for _, high in box))
            found.setdefault(part, set()).update(held)
    cells = [Cell(part, tuple(sorted(found[part], key=order.__getitem__))) for part in found]
    for dim in reversed(range(ndim)):
        cells = _joined(cells, dim)
    return sorted(cells)


def _at(cuts: list[int], edge: int) -> int:
    return bisect_left(cuts, edge)


def _joined(cells: list[Cell], dim: int) -> list[Cell]:
    """Join cells that touch along `dim`, agree in every other dim, and have the same ranks."""

    def line(cell: Cell) -> tuple[object, ...]:
        start, stop = cell.region.start, cell.region.stop
        return (*start[:dim], *start[dim + 1 :], *stop[:dim], *stop[dim + 1 :])

    joined: list[Cell] = []
    for cell in sorted(cells, key=lambda cell: (line(cell), cell.region.start[dim])):
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.ranks == cell.ranks
            and line(last) == line(cell)
            and last.region.stop[dim] == cell.region.start[dim]
        ):
            joined[-1] = Cell(Region(last.region.start, cell.region.stop), cell.ranks)
        else:
            joined.append(cell)
    return joined
