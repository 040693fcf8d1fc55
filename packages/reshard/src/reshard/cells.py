"""Cells: the boxes into which the source and destination of one tensor cut each other.

A cell is the largest box whose elements all have the same holders and the same receivers. Two
meshes are merged dim by dim, so that no source rank is compared with every destination rank:
along each dim the cuts of both sides are walked once, and the cells are the products of what was
found. Layouts without a mesh are cut along all of their borders.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import TypeAlias

from distcore.v1 import Layout, MeshForm, PlanError, Problem, Region, intervals


@dataclass(frozen=True, slots=True)
class Cell:
    """A Region that all of `holders` hold at the source and all of `receivers` at the end.

    All are global ranks in mesh order. `kept` are the receivers that are holders too, `missing`
    the others; `numel` are its elements.
    """

    region: Region
    holders: tuple[int, ...]
    receivers: tuple[int, ...]
    kept: tuple[int, ...]
    missing: tuple[int, ...]
    numel: int


_Ranks: TypeAlias = tuple[int, ...]
_Four: TypeAlias = tuple[_Ranks, _Ranks, _Ranks, _Ranks]


@dataclass(frozen=True, slots=True)
class _Side:
    """Along every dim the cuts (start, stop, part); and who has each product of parts."""

    cuts: tuple[tuple[tuple[int, int, int], ...], ...]
    ranks: dict[tuple[int, ...], tuple[int, ...]]


class CellMaker:
    """Makes the cells of many tensors; tensors of one shape and one pair of meshes share them."""

    def __init__(self) -> None:
        self._sides: dict[tuple[tuple[int, ...], MeshForm], _Side] = {}
        self._cells: dict[tuple[tuple[int, ...], MeshForm, MeshForm], tuple[Cell, ...]] = {}

    def cells_of(self, key: str, src: Layout, dst: Layout) -> tuple[Cell, ...]:
        """The cells of a tensor, in row-major order of their regions.

        PlanError where a rank of `dst` needs an element that no rank of `src` holds.
        """
        if src.form is None or dst.form is None:
            return tuple(_gridded(key, src, dst))
        place = (src.shape, src.form, dst.form)
        cells = self._cells.get(place)
        if cells is None:
            sides = self._side_of(src.shape, src.form), self._side_of(dst.shape, dst.form)
            cells = self._cells[place] = tuple(_merged(*sides))
        return cells

    def _side_of(self, shape: tuple[int, ...], form: MeshForm) -> _Side:
        side = self._sides.get((shape, form))
        if side is None:
            side = self._sides[shape, form] = _side_of(shape, form)
        return side


def _side_of(shape: tuple[int, ...], form: MeshForm) -> _Side:
    """The cuts of a mesh along every dim, and the ranks of every product of parts."""
    cuts, axes_of = [], []
    for dim, length in enumerate(shape):
        axes = [axis for axis, placement in enumerate(form.placements) if placement.dim == dim]
        found: list[tuple[int, int, int]] = []
        for part, chosen in enumerate(product(*(range(form.sizes[axis]) for axis in axes))):
            coordinates = [0] * len(form.sizes)
            for axis, digit in zip(axes, chosen, strict=True):
                coordinates[axis] = digit
            held = intervals(
                dim, length, form.placements, form.sizes, coordinates, reading=form.reading
            )
            found += [(i.start, i.start + i.length, part) for i in held if i.length]
        cuts.append(tuple(sorted(found)))
        axes_of.append(axes)
    ranks: dict[tuple[int, ...], list[int]] = {}
    for rank, place in zip(form.ranks, product(*map(range, form.sizes)), strict=True):
        parts = tuple(_number(axes, place, form.sizes) for axes in axes_of)
        ranks.setdefault(parts, []).append(rank)
    return _Side(tuple(cuts), {parts: tuple(found) for parts, found in ranks.items()})


def _number(axes: Sequence[int], coordinates: Sequence[int], sizes: Sequence[int]) -> int:
    number = 0
    for axis in axes:
        number = number * sizes[axis] + coordinates[axis]
    return number


def _merged(src: _Side, dst: _Side) -> Iterator[Cell]:
    per_dim = [_overlaps(a, b) for a, b in zip(src.cuts, dst.cuts, strict=True)]
    split: dict[tuple[tuple[int, ...], ...], _Four] = {}
    for box in product(*per_dim):
        region = Region(tuple(run[0] for run in box), tuple(run[1] for run in box))
        parts = tuple(run[2] for run in box), tuple(run[3] for run in box)
        known = split.get(parts)
        if known is None:
            known = split[parts] = _split(src.ranks[parts[0]], dst.ranks[parts[1]])
        yield Cell(region, *known, region.numel)


def _split(holders: tuple[int, ...], receivers: tuple[int, ...]) -> _Four:
    """Holders and receivers, and which of the receivers are holders and which are not."""
    if len(receivers) == 1:
        (only,) = receivers
        return holders, receivers, *((receivers, ()) if only in holders else ((), receivers))
    held = set(holders)
    kept = tuple(rank for rank in receivers if rank in held)
    missing = tuple(rank for rank in receivers if rank not in held) if kept else receivers
    return holders, receivers, kept, missing


def _overlaps(
    left: tuple[tuple[int, int, int], ...], right: tuple[tuple[int, int, int], ...]
) -> list[tuple[int, int, int, int]]:
    """Walk two ascending lists of disjoint cuts once: (start, stop, left part, right part)."""
    found = []
    i = j = 0
    while i < len(left) and j < len(right):
        start, stop = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < stop:
            found.append((start, stop, left[i][2], right[j][2]))
        if left[i][1] <= right[j][1]:
            i += 1
        else:
            j += 1
    return found


def _gridded(key: str, src: Layout, dst: Layout) -> Iterator[Cell]:
    """Cut along the borders of the pieces; for layouts that no mesh describes.

    A sweep along the dim with most borders: between two of them only the few pieces that reach
    across need to be looked at, which cut each other along the other dims.
    """
    boxes = [
        _Box(piece.region, rank, holds)
        for layout, holds in ((src, True), (dst, False))
        for rank in layout.ranks
        for piece in layout.pieces(rank)
        if not piece.region.is_empty
    ]
    dims = range(len(src.shape))
    if not dims:
        yield from _cells_within(key, boxes, None, ())
        return
    dim = max(dims, key=lambda d: len({end for box in boxes for end in box.ends(d)}))
    starting: dict[int, list[_Box]] = {}
    for box in boxes:
        starting.setdefault(box.region.start[dim], []).append(box)
    active: list[_Box] = []
    for low, high in pairwise(sorted({end for box in boxes for end in box.ends(dim)})):
        active = [box for box in active if box.region.stop[dim] > low] + starting.get(low, [])
        yield from _cells_within(key, active, dim, (low, high))


@dataclass(frozen=True, slots=True)
class _Box:
    """A piece of a rank: of the source where it `holds`, else of the destination."""

    region: Region
    rank: int
    holds: bool

    def ends(self, dim: int) -> tuple[int, int]:
        return self.region.start[dim], self.region.stop[dim]


def _cells_within(
    key: str, boxes: Sequence[_Box], dim: int | None, slab: tuple[int, ...]
) -> Iterator[Cell]:
    """The cells between two borders along `dim`; all of `boxes` reach from one to the other."""
    if all(box.holds for box in boxes):
        return
    runs = [
        [slab] if d == dim else list(pairwise(sorted({e for box in boxes for e in box.ends(d)})))
        for d in range(boxes[0].region.ndim)
    ]
    for corner in product(*runs):
        region = Region(tuple(run[0] for run in corner), tuple(run[1] for run in corner))
        within = [box for box in boxes if box.region.contains(region)]
        holders = tuple(box.rank for box in within if box.holds)
        receivers = tuple(box.rank for box in within if not box.holds)
        if not receivers:
            continue
        if not holders:
            text = f"no source rank holds {region}, which ranks {receivers} need"
            raise PlanError(Problem(key, "coverage", text))
        yield Cell(region, *_split(holders, receivers), region.numel)
