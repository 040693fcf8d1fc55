"""The channel over the ranks of a DeviceMesh."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Final

import torch.distributed as dist  # noqa: TID251 - a mesh over part of the world needs a group
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store  # noqa: TID251

from distcore.v1 import PlanError, Problem
from distcore.v1.runtime import GroupChannel, OpenChannel

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh  # noqa: TID251 - a type

_TIMEOUT: Final = timedelta(minutes=30)


def mesh_ranks(mesh: DeviceMesh) -> tuple[int, ...]:
    """The global ranks of a mesh, ascending."""
    return tuple(sorted(mesh.mesh.flatten().tolist()))


def open_mesh_channel(mesh: DeviceMesh) -> OpenChannel:
    """Open the channel over all ranks of a mesh.

    The default group serves where the mesh is the whole world, and the mesh's own group where it
    has one axis. Any other mesh gets a new group: then the call is collective over its ranks, and
    over no others.
    """
    ranks = mesh_ranks(mesh)
    if dist.get_rank() not in ranks:
        text = f"rank {dist.get_rank()} is not in the mesh of the ranks {ranks}"
        raise PlanError(Problem("device_mesh", "rank", text))
    if len(ranks) == dist.get_world_size():
        group = dist.group.WORLD
    elif mesh.ndim == 1:
        group = mesh.get_group()
    elif mesh.device_type == "cpu":
        channel = GroupChannel(_gloo_group(ranks), ranks=ranks)
        return OpenChannel(channel, channel)
    else:
        group = dist.new_group(list(ranks), use_local_synchronization=True)
    if group is None:
        raise PlanError(Problem("device_mesh", "group", "there is no default process group"))
    device = None if mesh.device_type == "cpu" else mesh.device_type
    channel = GroupChannel(group, device=device)
    return OpenChannel(channel, channel)


def _gloo_group(ranks: tuple[int, ...]) -> dist.ProcessGroupGloo:
    """A group of these ranks alone.

    `new_group` among a part of the world names a group by how many groups the caller is in, so
    ranks that are in more of them than others would wait for each other for ever. This name counts
    only the groups that were made here of the same ranks.
    """
    store, rank = _get_default_store(), dist.get_rank()
    name = "ownerplan/" + "-".join(map(str, ranks))
    number = store.add(f"{name}/made by {rank}", 1)
    apart = PrefixStore(f"{name}/{number}", store)
    return dist.ProcessGroupGloo(apart, ranks.index(rank), len(ranks), _TIMEOUT)
