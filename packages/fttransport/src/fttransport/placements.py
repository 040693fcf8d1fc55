"""Placements: DTensors as manifests describe them, compared with and made on this side's mesh."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from distcore.v1 import Layout, PlanError, describe_layout, layout_from
from distcore.v1.runtime import dtype_name, is_dtensor, layout_of
from fttransport.errors import LayoutMismatch
from fttransport.table import Entry

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh  # noqa: TID251 - a type
    from torch.distributed.tensor import DTensor  # noqa: TID251 - a type

_BESIDE = {"rank", "axes", "names"}
"""What a manifest says of a DTensor beside its layout."""


def own_layout(tensor: DTensor) -> tuple[Layout, int]:
    """The layout of a DTensor and this side's rank in it; PlanError where it has none.

    A mesh without axes is one rank that holds everything.
    """
    mesh = tensor.device_mesh
    if mesh.ndim == 0:
        rank = int(mesh.mesh.item())
        dtype = dtype_name(tensor.dtype)
        return Layout.replicated(shape=tuple(tensor.shape), dtype=dtype, ranks=[rank]), rank
    return layout_of(tensor), mesh.get_rank()


def note_layout(tensor: DTensor) -> dict[str, object]:
    """What a manifest says of a DTensor; PlanError where its layout cannot be told."""
    layout, rank = own_layout(tensor)
    names = tensor.device_mesh.mesh_dim_names
    note: dict[str, object] = {"rank": rank, "axes": tensor.device_mesh.ndim}
    note["names"] = None if names is None else list(names)
    return note | describe_layout(layout)


def source_layout(entry: Entry) -> tuple[Layout, int]:
    """The layout of a DTensor's entry and the source's rank in it; LayoutMismatch if it has none.

    The description comes from outside.
    """
    note = entry.layout or {}
    rank = note.get("rank")
    try:
        layout = layout_from({k: v for k, v in note.items() if k not in _BESIDE})
    except PlanError as error:
        raise LayoutMismatch(f"the source describes an impossible layout: {error}") from error
    if type(rank) is not int or rank not in layout.ranks:
        raise LayoutMismatch(f"the source has rank {rank!r}, which is not in its {layout}")
    return layout, rank


def why_not_alike(entry: Entry, target: Tensor) -> str | None:
    """Why the source's part is not the receiver's part of a tensor; None where it is."""
    if entry.layout is None:
        return "the source has a plain tensor, this side a DTensor" if is_dtensor(target) else None
    if not is_dtensor(target):
        return "the source has a DTensor, this side a plain tensor"
    theirs, their_rank = source_layout(entry)
    try:
        ours, rank = own_layout(target)
    except PlanError as error:
        return str(error)
    if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
        return f"the source has {theirs}, this side {ours}"
    if ours.pieces(rank) != theirs.pieces(their_rank):
        return (
            f"rank {their_rank} of the source's {theirs} holds another part than "
            f"rank {rank} of this side's {ours}"
        )
    return None


def make_dtensor(entry: Entry, local: Tensor, path: str) -> Tensor:
    """The DTensor of an entry over `local`, on a mesh of this side's ranks.

    Over all ranks in one axis it can communicate as any DTensor. On another mesh it has no groups,
    so that only its local part is of use; give the receiver DTensors to fill instead.
    LayoutMismatch where this process has no default group with the ranks of the layout.
    """
    layout, _ = source_layout(entry)
    form = layout.form
    dist = torch.distributed  # noqa: TID251 - where this side's ranks are looked up
    ready = dist.is_available() and dist.is_initialized()
    single = (entry.layout or {}).get("axes") == 0
    world = dist.get_world_size() if ready else 0
    if form is None or not ready or (max(form.ranks) >= world and not single):
        raise LayoutMismatch(
            f"state{path}: the source has a DTensor on ranks {list(layout.ranks)}, and this "
            "process has no such ranks to put it on; give state_dict= with the DTensors to fill"
        )
    from torch.distributed.device_mesh import DeviceMesh  # noqa: TID251 - makes one
    from torch.distributed.tensor import DTensor  # noqa: TID251 - makes one

    sizes = () if single else form.sizes
    # Making groups is collective, and a rank that heals is alone; the default group is there.
    there = len(sizes) == 1 and len(form.ranks) == world
    mesh = DeviceMesh(
        local.device.type,
        torch.tensor(form.ranks).reshape(sizes),
        mesh_dim_names=_names_of(entry, len(sizes)),
        _init_backend=there,
    )
    if single:
        return _on_single(local, mesh)
    return DTensor.from_local(
        local,
        mesh,
        [_placement(str(placement)) for placement in form.placements],
        run_check=False,
        shape=torch.Size(layout.shape),
        stride=torch.empty(layout.shape, device="meta").stride(),
    )


def _on_single(local: Tensor, mesh: DeviceMesh) -> Tensor:
    """A DTensor on a mesh without axes; torch's own way drops what another rank's mesh holds."""
    from torch.distributed.tensor import DTensor  # noqa: TID251 - makes one
    from torch.distributed.tensor._dtensor_spec import (  # noqa: TID251 - makes one
        DTensorSpec,
        TensorMeta,
    )

    meta = TensorMeta(local.shape, local.stride(), local.dtype)
    return DTensor(local, DTensorSpec(mesh, (), tensor_meta=meta), requires_grad=False)


def _names_of(entry: Entry, num_axes: int) -> tuple[str, ...] | None:
    """The names of the mesh's axes, where the source gives one to each."""
    names = (entry.layout or {}).get("names")
    if not isinstance(names, list) or len(names) != num_axes:
        return None
    return tuple(map(str, names)) or None


def _placement(text: str) -> Any:
    from torch.distributed.tensor import Replicate, Shard  # noqa: TID251 - their names
    from torch.distributed.tensor.placement_types import _StridedShard  # noqa: TID251 - one more

    numbers = [int(n) for n in re.findall(r"\d+", text)]
    if text == "R":
        return Replicate()
    if text.startswith("_S"):
        return _StridedShard(numbers[0], split_factor=numbers[1])
    return Shard(numbers[0])
