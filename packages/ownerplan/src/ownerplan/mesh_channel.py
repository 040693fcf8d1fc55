"""The channel over the ranks of a DeviceMesh."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist  # noqa: TID251 - a mesh over part of the world needs a group

from distcore.v1 import PlanError, Problem
from distcore.v1.runtime import GroupChannel, OpenChannel

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh  # noqa: TID251 - a type


def mesh_ranks(mesh: DeviceMesh) -> tuple[int, ...]:
    """The global ranks of a mesh, ascending."""
    return tuple(sorted(mesh.mesh.flatten().tolist()))


def open_mesh_channel(mesh: DeviceMesh) -> OpenChannel:
    """Open the channel over all ranks of a mesh.

    The default group serves where the mesh is the whole world, and the mesh's own group where it
    has one axis. Any other mesh gets a new group: then the call is collective over its ranks.
    """
    ranks = mesh_ranks(mesh)
    if dist.get_rank() not in ranks:
        text = f"rank {dist.get_rank()} is not in the mesh of the ranks {ranks}"
        raise PlanError(Problem("device_mesh", "rank", text))
    if len(ranks) == dist.get_world_size():
        group = dist.group.WORLD
    elif mesh.ndim == 1:
        group = mesh.get_group()
    else:
        group = dist.new_group(list(ranks), use_local_synchronization=True)
    if group is None:
        raise PlanError(Problem("device_mesh", "group", "there is no default process group"))
    device = None if mesh.device_type == "cpu" else mesh.device_type
    channel = GroupChannel(group, device=device)
    return OpenChannel(channel, channel)
