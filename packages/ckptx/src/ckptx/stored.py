"""What a checkpoint holds of one entry: of a tensor its shape, its dtype, and which bytes of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Literal

from distcore.v1 import Region, itemsize


@dataclass(frozen=True, slots=True)
class Chunk:
    """One Region of a tensor as it lies in a file, without gaps, from byte `offset` on.

    It lies row-major, or with its dims in another `order`, from the slowest to the fastest, as a
    transposed tensor may have been stored. `crc` is the CRC-32 of all its bytes, where known.
    """

    region: Region
    file: str
    offset: int
    order: tuple[int, ...] = ()
    crc: int | None = None

    def in_file(self, region: Region) -> Region:
        """A box of the tensor with its dims in the order of the file."""
        return _permuted(region, self.order) if self.order else region

    def from_file(self, region: Region) -> Region:
        """The reverse of `in_file`."""
        return _permuted(region, self.dims_in_file()) if self.order else region

    def dims_in_file(self) -> tuple[int, ...]:
        """Where in the order of the file each dim of the tensor stands."""
        return tuple(self.order.index(dim) for dim in range(len(self.order)))


def _permuted(region: Region, order: tuple[int, ...]) -> Region:
    return Region(
        tuple(region.start[dim] for dim in order), tuple(region.stop[dim] for dim in order)
    )


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


@dataclass(frozen=True, slots=True)
class StoredValue:
    """An entry that is no tensor: a number, a string, lists and dicts of them.

    Its `nbytes` bytes lie in `file` from byte `offset` on: `form` says how, as an archive of
    torch (`"torch"`) or as text (`"json"`, where `text` has it). `Checkpoint.value` reads it.
    """

    file: str
    offset: int
    nbytes: int
    form: Literal["torch", "json"]
    text: str = ""


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
