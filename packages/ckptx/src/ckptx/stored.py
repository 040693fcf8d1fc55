"""What a checkpoint holds of one tensor: its shape, its dtype, and which bytes of which file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod

from distcore.v1 import Region, itemsize


@dataclass(frozen=True, slots=True)
class Chunk:
    """One Region of a tensor as it lies in a file: row-major, without gaps, from byte `offset`."""

    region: Region
    file: str
    offset: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a checkpoint.

    `dtype` is named as torch names it without `torch.`. The chunks do not overlap; together they
    hold every element, unless the checkpoint has a hole, which a load finds out and refuses.
    """

    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[Chunk, ...]

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of all elements."""
        return self.numel * itemsize(self.dtype)


def runs(region: Region, chunk: Region) -> tuple[int, int]:
    """How `region` lies in the row-major `chunk` around it: (number of runs, elements of each).

    >>> runs(Region((0, 0), (2, 4)), Region((0, 0), (8, 4)))
    (1, 8)
    >>> runs(Region((0, 0), (8, 2)), Region((0, 0), (8, 4)))
    (8, 2)
    """
    length, dim = 1, region.ndim
    while dim:
        dim -= 1
        inner = region.stop[dim] - region.start[dim]
        length *= inner
        if inner != chunk.stop[dim] - chunk.start[dim]:
            break
    return prod(region.shape[:dim]), length


def position(index: tuple[int, ...], chunk: Region) -> int:
    """The place of the element at `index` in the row-major `chunk`, counted in elements.

    >>> position((2, 1), Region((1, 0), (8, 4)))
    5
    """
    at = 0
    for i, low, high in zip(index, chunk.start, chunk.stop, strict=True):
        at = at * (high - low) + i - low
    return at


def run_positions(region: Region, chunk: Region) -> Iterator[int]:
    """Where each run of `region` begins in the row-major `chunk`, counted in elements, in order.

    >>> list(run_positions(Region((1, 1), (3, 2)), Region((0, 0), (8, 4))))
    [5, 9]
    """
    _, length = runs(region, chunk)
    dim, inner = region.ndim, 1
    while dim and inner < length:
        dim -= 1
        inner *= region.stop[dim] - region.start[dim]
    tail = region.start[dim:]
    outer = zip(region.start[:dim], region.stop[:dim], strict=True)
    for head in product(*(range(low, high) for low, high in outer)):
        yield position((*head, *tail), chunk)
