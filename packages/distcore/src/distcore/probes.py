"""Probes: whether there is a run, how large it is, and where in it this process stands.

All of them answer at once and need no peer. `group` is a process group, also one that is in no
default world, or None for the default world.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch.distributed as dist

from distcore.world import is_group, is_initialized

if TYPE_CHECKING:
    from distcore.world import Group

NOT_A_MEMBER: Final = -1


def is_available() -> bool:
    """Whether this build of torch has its distributed package."""
    return dist.is_available()


def backend() -> str | None:
    """`"torch"` where the default process group exists, else None.

    This names the library, not what carries the bytes, which can differ from device to device.
    """
    return "torch" if is_initialized() else None


def size(group: Group | int | None = None) -> int:
    """The number of ranks in `group`; 1 without a run, -1 for a rank outside the group."""
    if group is None:
        return dist.get_world_size() if is_initialized() else 1
    return NOT_A_MEMBER if isinstance(group, int) or not is_group(group) else group.size()


def rank(group: Group | int | None = None) -> int:
    """This process's position in `group`; 0 without a run, -1 for a rank outside the group.

    In the default world that is the global rank; in any other group count from 0 within it.
    """
    if group is None:
        return dist.get_rank() if is_initialized() else 0
    return NOT_A_MEMBER if isinstance(group, int) or not is_group(group) else group.rank()


def is_master(group: Group | int | None = None) -> bool:
    """Whether this process is the first of `group`; True without a run."""
    return rank(group) == 0


def is_distributed_run() -> bool:
    """Whether the default process group exists and has more than one rank.

    Looks at the live group, whatever made it and whatever carries it; `is_distributed_launch`
    reads only what the launcher announced.
    """
    return is_initialized() and dist.get_world_size() > 1


__all__ = [
    "backend",
    "is_available",
    "is_distributed_run",
    "is_initialized",
    "is_master",
    "rank",
    "size",
]
