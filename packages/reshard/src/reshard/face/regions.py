"""Regions in the face's form, ((start, stop), ...): which rank holds which, and what they share."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from reshard.face.duck_types import Mesh, Region
from reshard.face.meshes import (
    mesh_coordinates,
    mesh_signature,
    normalize_shard_dim,
    shard_dim,
)


def compute_shard_slices(
    global_shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinates: Sequence[int],
    placements: Sequence[object],
) -> tuple[slice, ...]:
    """What the rank at `coordinates` holds, a slice per tensor dim.

    Every axis that cuts a dim cuts what the axes before it have left, as torch.chunk does: n
    over k ranks in runs of ceil(n / k), the last ones shorter or empty.

    >>> from types import SimpleNamespace
    >>> cuts = [SimpleNamespace(dim=0)]
    >>> [compute_shard_slices((10,), (4,), (at,), cuts)[0].stop for at in range(4)]
    [3, 6, 9, 10]
    """
    held = [(0, int(n)) for n in global_shape]
    for size, coordinate, placement in zip(mesh_shape, coordinates, placements, strict=True):
        dim = shard_dim(placement)
        if dim is None:
            continue
        dim = normalize_shard_dim(dim, len(held))
        start, stop = held[dim]
        step = -(-(stop - start) // size)
        low = min(stop, start + coordinate * step)
        held[dim] = low, min(stop, low + step)
    return tuple(slice(start, stop) for start, stop in held)


def rank_regions(
    mesh: Mesh, placements: Sequence[object], global_shape: Sequence[int]
) -> dict[int, Region]:
    """The Region of every rank of a mesh, in mesh order."""
    sizes, _ = mesh_signature(mesh)
    return {
        rank: tuple(
            (held.start, held.stop)
            for held in compute_shard_slices(global_shape, sizes, coordinates, placements)
        )
        for rank, coordinates in mesh_coordinates(mesh).items()
    }


def intersect(left: Region, right: Region) -> Region | None:
    """What two Regions have in common; None where that is no element.

    >>> intersect(((0, 4),), ((2, 6),)), intersect((), ())
    (((2, 4),), ())
    """
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(left, right, strict=True))
    return common if all(start < stop for start, stop in common) else None


def local_slices(overlap: Region, owner_region: Region) -> tuple[slice, ...]:
    """Where a part of a Region lies in the local tensor of its owner."""
    return tuple(
        slice(start - low, stop - low)
        for (start, stop), (low, _) in zip(overlap, owner_region, strict=True)
    )


def region_shape(region: Region) -> tuple[int, ...]:
    """The length of every dim."""
    return tuple(stop - start for start, stop in region)


def region_numel(region: Region) -> int:
    """The number of elements; 1 for a scalar."""
    return prod(region_shape(region))


def region_view_is_contiguous(region: Region, parent_region: Region) -> bool:
    """Whether a part lies in order in a row-major local tensor of the parent.

    So it is where every dim behind the first one that has more than one index is whole; dims
    in which the part has a single index do not matter.
    """
    cut = False
    for (start, stop), (low, high) in zip(reversed(region), reversed(parent_region), strict=True):
        if cut and stop - start > 1:
            return False
        cut = cut or stop - start < high - low
    return True
