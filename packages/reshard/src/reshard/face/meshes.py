"""Meshes and placements, as the face takes them: by what they have, not by their type."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

from reshard.face.duck_types import Mesh, RankTable


def mesh_rank_tensor(mesh: Mesh) -> RankTable:
    """The ranks of a mesh as they are kept in it; ValueError where there are none."""
    for name in ("mesh", "_mesh"):
        table: RankTable | None = getattr(mesh, name, None)
        if table is not None:
            return table
    text = f"a {type(mesh).__name__} does not expose its ranks: expected an attribute mesh or _mesh"
    raise ValueError(text)


def mesh_ranks(mesh: Mesh) -> list[int]:
    """The ranks of a mesh, row-major."""
    return [int(rank) for rank in mesh_rank_tensor(mesh).flatten().tolist()]


def mesh_signature(mesh: Mesh) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and ranks of a mesh; equal for meshes that are alike."""
    table = mesh_rank_tensor(mesh)  # once: a DeviceMesh makes it anew each time
    sizes = tuple(int(size) for size in table.shape)
    return sizes, tuple(int(rank) for rank in table.flatten().tolist())


def mesh_coordinates(mesh: Mesh) -> dict[int, tuple[int, ...]]:
    """The coordinates of every rank of a mesh, in mesh order."""
    sizes, ranks = mesh_signature(mesh)
    found = {}
    for position, rank in enumerate(ranks):
        digits = []
        for size in reversed(sizes):
            position, digit = divmod(position, size)
            digits.append(digit)
        found[rank] = tuple(reversed(digits))
    return found


def normalize_shard_dim(dim: int, tensor_ndim: int) -> int:
    """The dim counted from the front; ValueError where the tensor has no such dim."""
    if not -tensor_ndim <= dim < tensor_ndim:
        have = f"{-tensor_ndim} to {tensor_ndim - 1}" if tensor_ndim else "none"
        text = f"Shard dim {dim} is invalid for a {tensor_ndim}D tensor: expected one of {have}"
        raise ValueError(text)
    return dim + tensor_ndim if dim < 0 else dim


def shard_dim(placement: object) -> int | None:
    """The dim that a placement cuts as it is given, None where it repeats the tensor.

    NotImplementedError where it does neither. A strided placement is told by its `split_factor`
    first: it has a dim too, and in some releases of torch it is a kind of Shard.
    """
    dim: Any = getattr(placement, "dim", None)
    if not hasattr(placement, "split_factor") and not _is(placement, "is_partial"):
        if dim is not None and not isinstance(dim, bool):
            return index(dim)
        if _is(placement, "is_replicate") or type(placement).__name__ == "Replicate":
            return None
    text = f"{placement!r}: only Shard and Replicate are supported here"
    if _is(placement, "is_partial"):
        text += "; reshard.transfer reduces a partial source on the way"
    raise NotImplementedError(text)


def placement_signature(
    placements: Sequence[object], tensor_ndim: int
) -> tuple[tuple[str, int | None], ...]:
    """Name and dim of every placement, dims counted from the front."""
    found: list[tuple[str, int | None]] = []
    for placement in placements:
        dim = shard_dim(placement)
        if dim is None:
            found.append(("Replicate", None))
        else:
            found.append(("Shard", normalize_shard_dim(dim, tensor_ndim)))
    return tuple(found)


def validate_layout(
    mesh: Mesh, placements: Sequence[object], global_shape: Sequence[int], name: str
) -> None:
    """Raise where a side (`name` is "src" or "src_placement", or of "dst") cannot be laid out.

    ValueError for a count of placements that is not the mesh's, a rank that stands in it twice,
    or a dim that the tensor lacks; NotImplementedError for a placement that is not known.
    """
    validate_mesh(*mesh_signature(mesh), placements, name)
    placement_signature(placements, len(global_shape))


def validate_mesh(
    sizes: Sequence[int], ranks: Sequence[int], placements: Sequence[object], name: str
) -> None:
    """ValueError where placements are not one per axis, or a rank stands in the mesh twice."""
    name = name.removesuffix("_placement")
    if len(placements) != len(sizes):
        text = f"{name}_placement has {len(placements)} entries for a {len(sizes)}D mesh."
        raise ValueError(f"{text} Expected one per mesh axis, {sizes}")
    if len(set(ranks)) != len(ranks):
        raise ValueError(f"{name}_mesh: expected every rank once, got {list(ranks)}")


def _is(placement: object, method: str) -> bool:
    told = getattr(placement, method, None)
    return bool(told()) if callable(told) else False
