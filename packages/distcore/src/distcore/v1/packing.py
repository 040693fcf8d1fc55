"""Packing: where each of many parts lies in one flat buffer, and how parts fill rounds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from distcore.v1.errors import PlanError, Problem
from distcore.v1.integers import as_int, as_ints

ALIGNMENT: Final = 16


@dataclass(frozen=True, slots=True)
class Packing:
    """Parts one behind the other in a flat buffer of bytes; part i begins at `offsets[i]`.

    Parts lie in the order of their offsets, never overlap, and end within `nbytes`; anything else
    raises PlanError. `Packing.of` aligns every offset, so that any dtype may be viewed there.

    >>> Packing.of([3, 0, 20])
    Packing(offsets=(0, 16, 16), sizes=(3, 0, 20), nbytes=36)
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    nbytes: int

    def __post_init__(self) -> None:
        offsets, sizes = as_ints(self.offsets, "offsets"), as_ints(self.sizes, "sizes")
        object.__setattr__(self, "offsets", offsets)
        object.__setattr__(self, "sizes", sizes)
        object.__setattr__(self, "nbytes", as_int(self.nbytes, "nbytes"))
        if len(offsets) != len(sizes):
            text = f"{len(offsets)} offsets for {len(sizes)} sizes"
            raise PlanError(Problem("offsets", "length", text))
        end = 0
        for part, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
            where = f"part {part}"
            if size < 0:
                raise PlanError(Problem(where, "range", f"its size {size} is negative"))
            if offset < end:
                text = f"it begins at {offset}, but the part before it ends at {end}"
                raise PlanError(Problem(where, "overlap", text))
            end = offset + size
        if end > self.nbytes:
            text = f"the parts end at {end}, behind the {self.nbytes} bytes of the buffer"
            raise PlanError(Problem("nbytes", "range", text))

    @classmethod
    def of(cls, sizes: Iterable[int], *, alignment: int = ALIGNMENT) -> Packing:
        """Lay parts of `sizes` bytes one behind the other, each at a multiple of `alignment`."""
        if as_int(alignment, "alignment") < 1:
            raise PlanError(Problem("alignment", "range", f"{alignment} is below 1"))
        offsets, end, sizes = [], 0, as_ints(sizes, "sizes")
        for size in sizes:
            offset = -(-end // alignment) * alignment
            offsets.append(offset)
            end = offset + size
        return cls(tuple(offsets), sizes, max(end, 0))

    def slice_of(self, part: int) -> slice:
        """Where part `part` lies in the buffer."""
        return slice(self.offsets[part], self.offsets[part] + self.sizes[part])


def cut_rounds(sizes: Sequence[int], max_nbytes: int, *, max_parts: int) -> tuple[range, ...]:
    """Cut consecutive parts into rounds of at most `max_nbytes` and `max_parts` parts.

    Deterministic, so that two ranks that know the same sizes cut at the same places. A part
    that is larger than `max_nbytes` has a round of its own. PlanError where a limit is below 1 or
    a size is negative.

    >>> cut_rounds([4, 4, 9, 1], 8, max_parts=256)
    (range(0, 2), range(2, 3), range(3, 4))
    """
    for where, limit in (("max_nbytes", max_nbytes), ("max_parts", max_parts)):
        if as_int(limit, where) < 1:
            raise PlanError(Problem(where, "range", f"{limit} is below 1"))
    if min(sizes, default=0) < 0:
        raise PlanError(Problem("sizes", "range", f"{min(sizes)} is negative"))
    rounds, first, filled = [], 0, 0
    for part, size in enumerate(sizes):
        if part > first and (filled + size > max_nbytes or part - first >= max_parts):
            rounds.append(range(first, part))
            first, filled = part, 0
        filled += size
    if first < len(sizes):
        rounds.append(range(first, len(sizes)))
    return tuple(rounds)
