"""Worlds for thread ranks: groups with a store, which torch's default world does not know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch._C._distributed_c10d import HashStore, PrefixStore
from torch.distributed import ProcessGroup

from distcore.v1.runtime import GroupChannel

WorldOf = Callable[[GroupChannel], ProcessGroup]


@pytest.fixture
def world_of() -> WorldOf:
    """Make a rank's channel into a group with a store that all ranks of the test share."""
    store = HashStore()
    kind = ProcessGroup.BackendType.GLOO

    def make(channel: GroupChannel) -> ProcessGroup:
        group: Any = ProcessGroup(PrefixStore("world", store), channel.index, channel.size)
        group._set_default_backend(kind)
        group._register_backend(torch.device("cpu"), kind, channel.group)
        return cast("ProcessGroup", group)

    return make
