"""What stands for a group: nothing, a group object, or a channel."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch.distributed import ProcessGroup

from ckptx.channels import SoloChannel, channel_over
from distcore.testing import rank_threads
from distcore.v1 import Message, PlanError
from distcore.v1.runtime import GroupChannel, agree


def test_no_group_is_one_rank() -> None:
    with channel_over(None) as channel:
        assert (channel.rank, channel.index, channel.size, channel.ranks) == (0, 0, 1, (0,))
        assert channel.all_gather(b"row") == (b"row",)
        assert agree("x", {"a": 1}, channel) == {"a": 1}
        channel.start([], []).wait()
        assert not channel.scatters(0)
        with pytest.raises(PlanError, match="no peer"):
            channel.start([Message(1, (torch.zeros(1, dtype=torch.uint8),))], [])


def test_a_channel_is_used_as_it_is() -> None:
    solo = SoloChannel()
    with channel_over(solo) as channel:
        assert channel is solo


def test_a_group_object_gets_a_channel() -> None:
    def job(given: GroupChannel) -> int:
        with channel_over(given) as same:
            assert same is given
        with channel_over(cast(ProcessGroup, given.group)) as channel:
            assert isinstance(channel, GroupChannel)
            assert channel.group is given.group
            return len(channel.all_gather(b"x" * 64))

    assert rank_threads(2, job).values() == (2, 2)
