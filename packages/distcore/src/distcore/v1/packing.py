"""Packing: where each of many parts lies in one flat buffer, and how parts fill rounds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

ALIGNMENT: Final = 16


@dataclass(frozen=True, slots=True)
class Packing:
    """Parts one behind the other in a flat buffer of bytes; part i begins at `offsets[i]`.

    Offsets are multiples of the alignment, so that any dtype may be viewed there.

    >>> Packing.of([3, 0, 20])
    Packing(offsets=(0, 16, 16), sizes=(3, 0, 20), nbytes=36)
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    nbytes: int

    def __post_init__(self) -> None:
        if len(self.offsets) != len(self.sizes):
            raise ValueError(f"{len(self.offsets)} offsets for {len(self.sizes)} sizes")
        ends = [offset + size for offset, size in zip(self.offsets, self.sizes, strict=True)]
        if any(size < 0 for size in self.sizes) or any(offset < 0 for offset in self.offsets):
            raise ValueError("an offset or a size is negative")
        if any(
            end > offset for end, (_, offset) in zip(ends, pairwise(self.offsets), strict=False)
        ):
            raise ValueError("parts overlap, or are not in the order of their offsets")
        if max(ends, default=0) > self.nbytes:
            raise ValueError(f"the parts end behind the {self.nbytes} bytes of the buffer")

    @classmethod
    def of(cls, sizes: Iterable[int], *, alignment: int = ALIGNMENT) -> Packing:
        """Lay parts of `sizes` bytes one behind the other, each aligned."""
        offsets, end, sizes = [], 0, tuple(sizes)
        for size in sizes:
            offset = -(-end // alignment) * alignment
            offsets.append(offset)
            end = offset + size
        return cls(tuple(offsets), sizes, end)

    def slice_of(self, part: int) -> slice:
        """Where part `part` lies in the buffer."""
        return slice(self.offsets[part], self.offsets[part] + self.sizes[part])


def cut_rounds(sizes: Sequence[int], max_nbytes: int, *, max_parts: int) -> tuple[range, ...]:
    """Cut consecutive parts into rounds of at most `max_nbytes` and `max_parts` parts.

    Deterministic, so that two ranks that know the same sizes cut at the same places. A part
    that is larger than `max_nbytes` has a round of its own.

    >>> cut_rounds([4, 4, 9, 1], 8, max_parts=256)
    (range(0, 2), range(2, 3), range(3, 4))
    """
    if max_nbytes < 1 or max_parts < 1:
        raise ValueError(f"max_nbytes {max_nbytes} and max_parts {max_parts} must be positive")
    rounds, first, filled = [], 0, 0
    for part, size in enumerate(sizes):
        if part > first and (filled + size > max_nbytes or part - first >= max_parts):
            rounds.append(range(first, part))
            first, filled = part, 0
        filled += size
    if first < len(sizes):
        rounds.append(range(first, len(sizes)))
    return tuple(rounds)
