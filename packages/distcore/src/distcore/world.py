"""World: the default process group, and what a group argument stands for."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias, cast

import torch.distributed as dist

from distcore.v1.channel import Channel
from distcore.v1.errors import PlanError, Problem
from distcore.v1.runtime.group_channel import GroupChannel

if TYPE_CHECKING:
    from distcore.v1.runtime.group_channel import TensorGroup

    Group: TypeAlias = "dist.ProcessGroup | TensorGroup"


def is_initialized() -> bool:
    """Whether the default process group exists."""
    return dist.is_available() and dist.is_initialized()


def world() -> dist.ProcessGroup:
    """The default process group. ValueError where there is none."""
    return dist.distributed_c10d._get_default_group()


def is_group(group: object) -> bool:
    """Whether `group` is a process group with this rank in it, and not torch's marker."""
    return all(hasattr(group, name) for name in ("rank", "size", "send", "recv"))


def is_in_world(group: object) -> bool:
    """Whether torch's default world knows the group."""
    if not is_initialized():
        return False
    try:
        dist.get_process_group_ranks(cast("dist.ProcessGroup", group))
    except (KeyError, TypeError):
        return False
    return True


def channel_of(group: object = None) -> Channel:
    """The channel over `group`: a process group, a channel already, or None for the world.

    Raises PlanError for anything else, such as the marker of a rank outside the group.
    """
    if group is None and is_initialized():
        group = world()
    if is_group(group):
        return GroupChannel(cast("TensorGroup", group))
    if hasattr(group, "all_gather") and hasattr(group, "start"):
        return cast("Channel", group)
    text = f"expected a process group with this rank in it, or a channel, got {group!r}"
    raise PlanError(Problem("group", "type", text))
