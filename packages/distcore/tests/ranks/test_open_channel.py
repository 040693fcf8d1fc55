"""Tests of channel_over: whatever a face is given as its group becomes a channel."""

import pytest
import torch

from distcore.testing import rank_threads
from distcore.v1 import Message, PlanError
from distcore.v1.runtime import GroupChannel, SoloChannel, agree, channel_over


def test_without_a_group_it_is_one_rank() -> None:
    with channel_over(None) as channel:
        assert (channel.rank, channel.index, channel.size, channel.ranks) == (0, 0, 1, (0,))
        assert channel.all_gather(b"row") == (b"row",)
        assert agree("value", 3, channel) == 3
        channel.start([], []).wait()


def test_a_single_rank_refuses_messages() -> None:
    message = Message(1, (torch.zeros(1, dtype=torch.uint8),))
    with pytest.raises(PlanError, match="no peer"):
        SoloChannel().start([message], [])
    assert not SoloChannel().scatters(0)


def test_a_channel_is_used_as_it_is_and_stays_open() -> None:
    def use(channel: GroupChannel) -> bool:
        with channel_over(channel) as same:
            kept = same is channel
        return kept and agree("still open", 1, channel) == 1

    assert rank_threads(2, use).values() == (True, True)


def test_a_group_gets_a_channel_that_is_closed_at_the_end() -> None:
    def use(channel: GroupChannel) -> object:
        opened = channel_over(channel.group)  # type: ignore[arg-type]
        with opened as other:
            value = agree("value", other.size, other)
        opened.close()
        return value

    assert rank_threads(2, use).values() == (2, 2)
