"""Layout: where the tensors of a group lie in one flat buffer, and which rank holds which part.

All numbers are elements. Importing this needs no torch; shapes may be `torch.Size` or any tuple.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod

from distcore.v1 import PlanError, Problem
from ownerplan.placements import (
    BlockAtomic,
    LocalRanks,
    Placement,
    Ranks,
    RowAtomic,
    TensorAtomic,
    axes_of,
    count_shards,
    shard_indices,
)
from ownerplan.ranges import Range, intersect_ranges
from ownerplan.rows import place_rows

__all__ = [
    "BlockAtomic",
    "GlobalLayout",
    "Holders",
    "Range",
    "RowAtomic",
    "TensorAtomic",
    "intersect_ranges",
    "non_leading_numel",
]

Shape = tuple[int, ...]


def non_leading_numel(shape: Iterable[int]) -> int:
    """The elements of a row: the product of all dims but the first.

    >>> non_leading_numel((4, 2, 3)), non_leading_numel((5,))
    (6, 1)
    """
    return prod(tuple(shape)[1:])


@dataclass(frozen=True, slots=True)
class GlobalLayout:
    """Which elements of one flat buffer are whose.

    - `tensor_shapes`, `tensor_to_offset`: of each tensor, by its index. Index order need not be
      buffer order, and there may be gaps.
    - `size`: elements of the buffer, gaps and padding included.
    - `rank_to_offset`: where each segment starts; it ends where the next one starts. Without it,
      the segments are equal, as many as the mesh has parts.

    Raises:
        PlanError: a shape without dims, or with an empty or negative dim behind the first; tensors
            that overlap or leave the buffer; segments that do not cover it in order. A ValueError
            that lists all problems.

    >>> layout = GlobalLayout.build([(6, 4), (4, 4)], 2)
    >>> layout.tensor_to_offset, layout.size, layout.rank_to_offset
    ((0, 24), 40, (0, 20))
    """

    tensor_shapes: tuple[Shape, ...]
    tensor_to_offset: tuple[int, ...]
    size: int
    rank_to_offset: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        shapes = tuple(
            shape if isinstance(shape, tuple) else tuple(shape) for shape in self.tensor_shapes
        )
        object.__setattr__(self, "tensor_shapes", shapes)
        object.__setattr__(self, "tensor_to_offset", tuple(self.tensor_to_offset))
        if self.rank_to_offset is not None:
            object.__setattr__(self, "rank_to_offset", tuple(self.rank_to_offset))
        problems = [*_shape_problems(shapes), *self._segment_problems()]
        if not problems:
            problems = list(self._offset_problems())
        if problems:
            raise PlanError(problems)

    @classmethod
    def build(cls, shapes: Iterable[Shape], dp_size: int) -> GlobalLayout:
        """The layout in which every one of `dp_size` equal segments ends between rows."""
        return cls.build_for_row_atomic(shapes, dp_size)

    @classmethod
    def build_for_row_atomic(
        cls, shapes: Iterable[Shape], dp_size: int, *, block_size: int = 1
    ) -> GlobalLayout:
        """As `build`, with segments that end between blocks of `block_size` rows."""
        shapes = tuple(shapes)
        problems = list(_shape_problems(shapes))
        for name, value in (("dp_size", dp_size), ("block_size", block_size)):
            if value < 1:
                problems.append(Problem(name, "range", f"{value} is below 1"))
        problems += [
            Problem(
                f"tensor {at}", "shape", f"{shape[0]} rows are not whole blocks of {block_size}"
            )
            for at, shape in enumerate(shapes)
            if block_size > 1 and shape and shape[0] % block_size
        ]
        if problems:
            raise PlanError(problems)
        offsets, size = place_rows(shapes, dp_size, block_size)
        starts = tuple(at * (size // dp_size) for at in range(dp_size))
        return cls(shapes, offsets, size, starts)

    @classmethod
    def build_for_tensor_atomic(
        cls, shapes: Iterable[Shape], owners: Iterable[int], dp_size: int
    ) -> GlobalLayout:
        """Each tensor whole in the segment `owners` says, index order inside, without padding."""
        shapes, owners = tuple(shapes), tuple(owners)
        problems = list(_shape_problems(shapes))
        if len(owners) != len(shapes):
            text = f"{len(owners)} owners for {len(shapes)} tensors"
            problems.append(Problem("owners", "length", text))
        problems += [
            Problem(f"tensor {at}", "range", f"segment {owner} is not one of {dp_size}")
            for at, owner in enumerate(owners)
            if not 0 <= owner < dp_size
        ]
        if problems or dp_size < 1:
            raise PlanError(problems or [Problem("dp_size", "range", f"{dp_size} is below 1")])
        sizes = [0] * dp_size
        for shape, owner in zip(shapes, owners, strict=True):
            sizes[owner] += prod(shape)
        *starts, size = accumulate(sizes, initial=0)
        cursors, offsets = list(starts), []
        for shape, owner in zip(shapes, owners, strict=True):
            offsets.append(cursors[owner])
            cursors[owner] += prod(shape)
        return cls(shapes, tuple(offsets), size, tuple(starts))

    @classmethod
    def from_ranges(
        cls, shapes: Iterable[Shape], tensors: Iterable[Range], segments: Iterable[Range]
    ) -> GlobalLayout:
        """The layout of a buffer that exists: where its tensors and its segments lie."""
        shapes, tensors, segments = tuple(shapes), tuple(tensors), tuple(segments)
        problems = [
            Problem(f"tensor {at}", "numel", f"shape {tuple(shape)} has not {held.numel} elements")
            for at, (shape, held) in enumerate(zip(shapes, tensors, strict=False))
            if prod(shape) != held.numel
        ]
        end = 0
        for at, segment in enumerate(segments):
            if segment.start != end:
                text = f"starts at {segment.start}, the one before ends at {end}"
                problems.append(Problem(f"segment {at}", "offset", text))
            end = segment.end
        if problems:
            raise PlanError(problems)
        starts = tuple(segment.start for segment in segments)
        return cls(shapes, tuple(held.start for held in tensors), end, starts)

    @property
    def dp_size(self) -> int:
        """The number of segments; known only where `rank_to_offset` is given."""
        if self.rank_to_offset is None:
            text = "the layout was made without it; its segments are those of the mesh"
            raise PlanError(Problem("rank_to_offset", "missing", text))
        return len(self.rank_to_offset)

    @property
    def has_equal_shard_sizes(self) -> bool:
        """Whether all segments have the same size."""
        if self.rank_to_offset is None:
            return True
        return len({self.rank_size(at) for at in range(self.dp_size)}) <= 1

    def rank_size(self, index: int) -> int:
        """The elements of segment `index`."""
        return self._segment(index, self.dp_size, 1).numel

    def get_tensor_range(self, tensor_index: int) -> Range:
        """Where a tensor lies."""
        return Range(self.tensor_to_offset[tensor_index], prod(self.tensor_shapes[tensor_index]))

    def get_rank_range(
        self, mesh: Ranks, placements: Sequence[Placement], global_rank: int
    ) -> Range:
        """What a rank holds of the buffer.

        Only the axes whose placement is a shard cut it, the last of them being the most
        significant digit. Where there are more segments than parts, a rank holds a run of them.
        ValueError for a rank outside the mesh, or where segments and parts do not match.
        """
        indices = shard_indices(mesh, placements)
        if global_rank not in indices:
            text = f"is not in the mesh of the ranks {sorted(indices)}"
            raise PlanError(Problem(f"rank {global_rank}", "rank", text))
        parts = count_shards(mesh, placements)
        return self._segment(indices[global_rank], *self._segments_per_part(parts))

    def get_local_range(self, mesh: LocalRanks, placements: Sequence[Placement]) -> Range:
        """What this process holds of the buffer."""
        return self.get_rank_range(mesh, placements, mesh.get_rank())

    def get_rank_ranges(self, mesh: Ranks) -> dict[int, Range]:
        """Global rank -> what it holds, in buffer order, where every axis cuts the buffer."""
        indices = shard_indices(mesh, (RowAtomic(),) * axes_of(mesh))
        parts = self._segments_per_part(len(indices))
        ranges = {rank: self._segment(index, *parts) for rank, index in indices.items()}
        return dict(sorted(ranges.items(), key=lambda entry: (entry[1].start, entry[0])))

    def _segments_per_part(self, parts: int) -> tuple[int, int]:
        """The number of segments, and how many of them make a part."""
        segments = parts if self.rank_to_offset is None else len(self.rank_to_offset)
        if parts < 1 or segments % parts:
            text = f"{segments} segments cannot be dealt evenly to {parts} parts of the mesh"
            raise PlanError(Problem("mesh", "size", text))
        if self.rank_to_offset is None and self.size % segments:
            text = f"{self.size} elements are not {segments} equal segments; give rank_to_offset"
            raise PlanError(Problem("size", "size", text))
        return segments, segments // parts

    def _segment(self, index: int, segments: int, run: int) -> Range:
        """The elements of the `index`-th run of so many segments."""
        if not 0 <= index < segments // run:
            raise PlanError(Problem(f"segment {index}", "range", f"there are {segments // run}"))
        first, last = index * run, (index + 1) * run
        if self.rank_to_offset is None:
            each = self.size // segments
            return Range(first * each, run * each)
        start = self.rank_to_offset[first]
        end = self.rank_to_offset[last] if last < segments else self.size
        return Range(start, end - start)

    def _segment_problems(self) -> Iterator[Problem]:
        if self.size < 0:
            yield Problem("size", "range", f"{self.size} is negative")
        if len(self.tensor_to_offset) != len(self.tensor_shapes):
            text = f"{len(self.tensor_to_offset)} offsets for {len(self.tensor_shapes)} tensors"
            yield Problem("tensor_to_offset", "length", text)
        starts = self.rank_to_offset
        if starts is None:
            return
        if not starts or starts[0] != 0:
            yield Problem("rank_to_offset", "offset", f"{starts} does not start with 0")
        elif any(low > high for low, high in pairwise((*starts, self.size))):
            text = f"{starts} does not rise up to the size {self.size}"
            yield Problem("rank_to_offset", "offset", text)

    def _offset_problems(self) -> Iterator[Problem]:
        """What is wrong with the places of tensors whose shapes are right."""
        held = []
        for at, offset in enumerate(self.tensor_to_offset):
            end = offset + prod(self.tensor_shapes[at])
            if offset < 0 or end > self.size:
                text = f"[{offset}, {end}) leaves the buffer of {self.size}"
                yield Problem(f"tensor {at}", "offset", text)
            if end > offset:
                held.append((offset, end, at))
        for (_, end, one), (start, _, other) in pairwise(sorted(held)):
            if start < end:
                yield Problem(f"tensor {other}", "overlap", f"shares elements with tensor {one}")


def _shape_problems(shapes: Iterable[Shape]) -> Iterator[Problem]:
    for at, shape in enumerate(shapes):
        if not shape:
            yield Problem(f"tensor {at}", "shape", "has no dims, and so no rows")
        elif shape[0] < 0 or any(side < 1 for side in shape[1:]):
            text = f"{tuple(shape)} has rows without elements, or a negative dim"
            yield Problem(f"tensor {at}", "shape", text)


class Holders:
    """Who holds what of a run of the buffer, found without a look at every rank."""

    def __init__(self, ranges: dict[int, Range]) -> None:
        """Take what each rank holds; the ranges do not overlap and are in buffer order."""
        self._held = [(held, rank) for rank, held in ranges.items() if held.numel]
        self._starts = [held.start for held, _ in self._held]

    def of(self, run: Range) -> list[tuple[int, Range]]:
        """The ranks that hold some of `run` and what they hold of it, in buffer order."""
        found = []
        for held, rank in self._held[max(0, bisect_right(self._starts, run.start) - 1) :]:
            if held.start >= run.end:
                break
            part = intersect_ranges(held, run)
            if part.numel:
                found.append((rank, part))
        return found
