"""Placements: DTensors as manifests describe them, compared with and made on this side's mesh."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from distcore.v1 import Layout, PlanError, layout_from
from distcore.v1.runtime import is_dtensor, layout_of
from fttransport.errors import LayoutMismatch
from fttransport.manifest import Entry

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh  # noqa: TID251 - a type


def source_layout(entry: Entry) -> tuple[Layout, int]:
    """The layout of a DTensor's entry and the source's rank in it; LayoutMismatch if it has none.

    The description comes from outside.
    """
    note = entry.layout or {}
    rank = note.get("rank")
    try:
        layout = layout_from({k: v for k, v in note.items() if k != "rank"})
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
        ours = layout_of(target)
    except PlanError as error:
        return str(error)
    if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
        return f"the source has {theirs}, this side {ours}"
    rank = target.device_mesh.get_rank()
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
    if form is None or not ready or max(form.ranks) >= dist.get_world_size():
        raise LayoutMismatch(
            f"state{path}: the source has a DTensor on ranks {list(layout.ranks)}, and this "
            "process has no such ranks to put it on; give state_dict= with the DTensors to fill"
        )
    from torch.distributed.tensor import DTensor  # noqa: TID251 - makes one

    mesh = _mesh_of(form.ranks, form.sizes, local.device.type)
    return DTensor.from_local(
        local,
        mesh,
        [_placement(str(placement)) for placement in form.placements],
        run_check=False,
        shape=torch.Size(layout.shape),
        stride=torch.empty(layout.shape, device="meta").stride(),
    )


def _mesh_of(ranks: tuple[int, ...], sizes: tuple[int, ...], device: str) -> DeviceMesh:
    from torch.distributed.device_mesh import DeviceMesh  # noqa: TID251 - makes one

    # Making groups is collective, and a rank that heals is alone; the default group is there.
    world = torch.distributed.get_world_size()  # noqa: TID251 - whether the default group serves
    alone = len(sizes) == 1 and len(ranks) == world
    return DeviceMesh(device, torch.tensor(ranks).reshape(sizes), _init_backend=alone)


def _placement(text: str) -> Any:
    from torch.distributed.tensor import Replicate, Shard  # noqa: TID251 - their names
    from torch.distributed.tensor.placement_types import _StridedShard  # noqa: TID251 - one more

    numbers = [int(n) for n in re.findall(r"\d+", text)]
    if text == "R":
        return Replicate()
    if text.startswith("_S"):
        return _StridedShard(numbers[0], split_factor=numbers[1])
    return Shard(numbers[0])
