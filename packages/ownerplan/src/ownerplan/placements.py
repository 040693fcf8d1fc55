"""Placements: how a flat buffer is cut along an axis of a mesh.

Any object with the method `is_shard()` is a placement here, those of torch too. An axis whose
placement is a shard cuts the buffer; along any other axis all ranks hold the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol, runtime_checkable

from distcore.v1 import PlanError, Problem


@runtime_checkable
class Placement(Protocol):
    """What a mesh axis does to the buffer."""

    def is_shard(self) -> bool:
        """Whether the axis cuts the buffer."""
        ...


@dataclass(frozen=True, slots=True)
class _Cut:
    @property
    def dim(self) -> int:
        """The dim of every tensor that may be cut."""
        return 0

    def is_shard(self, dim: int | None = None) -> bool:
        """True: the axis cuts the buffer, and tensors only in dim 0."""
        return dim in (None, 0)

    def is_replicate(self) -> bool:
        """False: ranks along the axis hold different elements."""
        return False

    def is_partial(self) -> bool:
        """False: what a rank holds is final."""
        return False


@dataclass(frozen=True, slots=True)
class RowAtomic(_Cut):
    """The buffer is cut between rows: a row (an index of dim 0) lies on one rank."""


@dataclass(frozen=True, slots=True)
class BlockAtomic(_Cut):
    """The buffer is cut between blocks of `block_size` rows."""

    block_size: int = 1

    def __post_init__(self) -> None:
        if self.block_size < 1:
            text = f"block_size {self.block_size} is below 1"
            raise PlanError(Problem("BlockAtomic", "range", text))


@dataclass(frozen=True, slots=True)
class TensorAtomic(_Cut):
    """The buffer is cut between tensors: each lies on one rank as a whole."""


class Ranks(Protocol):
    """What planning needs of a mesh: the global ranks, nested one level per axis.

    A DeviceMesh has it (a tensor under `mesh`), and so has anything else with a list there.
    """

    @property
    def mesh(self) -> object:
        """The ranks, as nested lists or as an array with `tolist()`."""
        ...


class LocalRanks(Ranks, Protocol):
    """A mesh that knows this process too."""

    def get_rank(self) -> int:
        """The global rank of this process."""
        ...


def count_shards(mesh: Ranks, placements: Sequence[Placement]) -> int:
    """Into how many parts the placements cut the buffer."""
    sizes, _ = _coordinates(mesh)
    _check(sizes, placements)
    return prod(size for size, cut in zip(sizes, placements, strict=True) if cut.is_shard())


def shard_indices(mesh: Ranks, placements: Sequence[Placement]) -> dict[int, int]:
    """Global rank -> which part of the buffer it holds, in the order of the mesh.

    The last axis that cuts is the most significant digit: over the mesh [[0, 1], [2, 3]], cut
    along both axes, the parts lie on the ranks 0, 2, 1, 3.

    Raises:
        PlanError: the mesh is ragged, names a rank twice, or has another number of axes.
    """
    sizes, ranks = _coordinates(mesh)
    _check(sizes, placements)
    strides, stride = [], 1
    for size, placement in zip(sizes, placements, strict=True):
        strides.append(stride if placement.is_shard() else 0)
        stride *= size if placement.is_shard() else 1
    return {
        rank: sum(at * stride for at, stride in zip(place, strides, strict=True))
        for rank, place in ranks.items()
    }


def buffer_order(mesh: Ranks) -> tuple[int, ...]:
    """The global ranks in the order of their parts, where every axis cuts the buffer.

    >>> from types import SimpleNamespace
    >>> buffer_order(SimpleNamespace(mesh=[[0, 1], [2, 3]]))
    (0, 2, 1, 3)
    """
    sizes, _ = _coordinates(mesh)
    indices = shard_indices(mesh, (RowAtomic(),) * len(sizes))
    return tuple(sorted(indices, key=indices.__getitem__))


def axes_of(mesh: Ranks) -> int:
    """The number of axes of a mesh."""
    return len(_coordinates(mesh)[0])


def _check(sizes: Sequence[int], placements: Sequence[Placement]) -> None:
    if len(placements) != len(sizes):
        text = f"{len(placements)} placements for a mesh of {len(sizes)} axes"
        raise PlanError(Problem("placements", "length", text))


def _coordinates(mesh: Ranks) -> tuple[list[int], dict[int, tuple[int, ...]]]:
    """The size of each axis, and every rank's place along the axes."""
    nested = mesh.mesh
    nested = nested.tolist() if hasattr(nested, "tolist") else nested
    level: list[tuple[tuple[int, ...], object]] = [((), nested)]
    sizes: list[int] = []
    while level and isinstance(level[0][1], list | tuple):
        sizes.append(len(level[0][1]))
        level = [
            ((*place, at), value)
            for place, held in level
            for at, value in enumerate(_row(held, sizes[-1]))
        ]
    ranks = {value: place for place, value in level if isinstance(value, int)}
    if not sizes or len(ranks) != len(level):
        text = f"{nested!r} are not different ranks, nested alike in lists"
        raise PlanError(Problem("mesh", "ranks", text))
    return sizes, ranks


def _row(held: object, size: int) -> Sequence[object]:
    if isinstance(held, list | tuple) and len(held) == size:
        return held
    raise PlanError(Problem("mesh", "ragged", f"{held!r} is not a list of {size}, as others are"))
