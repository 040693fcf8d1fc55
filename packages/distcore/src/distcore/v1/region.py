"""Region: a half-open box in the index space of a tensor."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Final

from distcore.v1.errors import PlanError, Problem
from distcore.v1.integers import as_ints

_INT: Final = frozenset({int})


@dataclass(frozen=True, slots=True, order=True)
class Region:
    """The half-open box of all indices i with `start[d] <= i[d] < stop[d]` in every dim d.

    A region without dims has one element (a scalar); one with an empty dim has none. Both ends
    become tuples of plain ints. PlanError where an end is no sequence of ints, where the two
    differ in length, or where the start lies behind the stop.

    >>> box = Region((0, 2), (4, 6))
    >>> box.shape, box.numel
    ((4, 4), 16)
    >>> box.intersect(Region((2, 0), (8, 3)))
    Region(start=(2, 2), stop=(4, 3))
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __post_init__(self) -> None:
        start, stop = self.start, self.stop
        if (
            type(start) is not tuple
            or type(stop) is not tuple
            or not _INT.issuperset(map(type, start + stop))
        ):
            start, stop = as_ints(start, "region"), as_ints(stop, "region")
            object.__setattr__(self, "start", start)
            object.__setattr__(self, "stop", stop)
        if len(start) != len(stop):
            text = f"start {start} and stop {stop} differ in length"
            raise PlanError(Problem("region", "ndim", text))
        for low, high in zip(start, stop, strict=True):
            if low > high:
                text = f"start {start} lies behind stop {stop}"
                raise PlanError(Problem("region", "region", text))

    @classmethod
    def of_shape(cls, shape: tuple[int, ...]) -> Region:
        """The region of a whole tensor of `shape`."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.start)

    @property
    def shape(self) -> tuple[int, ...]:
        """The length of every dim."""
        return tuple(high - low for low, high in zip(self.start, self.stop, strict=True))

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def is_empty(self) -> bool:
        """Whether it holds no element."""
        return any(low == high for low, high in zip(self.start, self.stop, strict=True))

    def intersect(self, other: Region) -> Region | None:
        """The common box, or None where the two have no element in common."""
        self._same_ndim(other)
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        if any(low >= high for low, high in zip(start, stop, strict=True)):
            return None
        return Region(start, stop)

    def contains(self, region: Region) -> bool:
        """Whether every element of `region` lies in this one (an empty region always does)."""
        self._same_ndim(region)
        if region.is_empty:
            return True
        return all(
            mine <= low and high <= end
            for mine, low, high, end in zip(
                self.start, region.start, region.stop, self.stop, strict=True
            )
        )

    def translate(self, offset: tuple[int, ...]) -> Region:
        """The same box, moved by `offset` (one int per dim)."""
        if len(offset) != self.ndim:
            text = f"offset {offset} has {len(offset)} entries for {self.ndim} dims"
            raise PlanError(Problem("offset", "ndim", text))
        return Region(
            tuple(low + by for low, by in zip(self.start, offset, strict=True)),
            tuple(high + by for high, by in zip(self.stop, offset, strict=True)),
        )

    def relative_to(self, region: Region) -> Region:
        """The same box, in coordinates that begin at the start of `region`."""
        self._same_ndim(region)
        return self.translate(tuple(-low for low in region.start))

    def slices(self) -> tuple[slice, ...]:
        """One slice per dim, to index a tensor that begins at the origin of the region's space.

        PlanError where an index is negative: a slice would count it from the end.
        """
        if self.start and min(self.start) < 0:
            raise PlanError(Problem("region", "range", f"{self} has a negative index"))
        return tuple(slice(low, high) for low, high in zip(self.start, self.stop, strict=True))

    def _same_ndim(self, other: Region) -> None:
        if self.ndim != other.ndim:
            text = f"{self} has {self.ndim} dims, {other} has {other.ndim}"
            raise PlanError(Problem("region", "ndim", text))
