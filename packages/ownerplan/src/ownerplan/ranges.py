"""Range: a run of elements in a flat buffer."""

from __future__ import annotations

from dataclasses import dataclass

from distcore.v1 import PlanError, Problem


@dataclass(frozen=True, slots=True)
class Range:
    """`numel` elements from `start` on; neither is negative.

    >>> Range(start=4, numel=3).end
    7
    """

    start: int
    numel: int

    def __post_init__(self) -> None:
        if self.start < 0 or self.numel < 0:
            text = f"start {self.start} and numel {self.numel} must not be negative"
            raise PlanError(Problem("range", "range", text))

    @property
    def end(self) -> int:
        """The first element behind the run."""
        return self.start + self.numel


def intersect_ranges(a: Range, b: Range) -> Range:
    """The run that lies in both; where there is none, `numel` is 0 and `start` the later start.

    >>> intersect_ranges(Range(0, 6), Range(4, 8))
    Range(start=4, numel=2)
    >>> intersect_ranges(Range(0, 2), Range(5, 1))
    Range(start=5, numel=0)
    """
    start = max(a.start, b.start)
    return Range(start, max(0, min(a.end, b.end) - start))
