"""The group argument: a channel, a group, or nothing at all."""

from __future__ import annotations

import pytest
import torch

from distcore.testing import rank_threads
from distcore.v1 import Channel, Message, PlanError
from distcore.v1.runtime import GroupChannel
from reshard import transfer
from reshard.channels import SoloChannel, open_channel


def test_without_a_group_there_is_one_rank() -> None:
    src, dst = {"w": torch.arange(3.0)}, {"w": torch.zeros(3)}
    report = transfer(src, dst)
    assert dst["w"].tolist() == [0.0, 1.0, 2.0]
    assert (report.nbytes_local, report.nbytes_sent) == (12, 0)


def test_a_single_rank_has_no_peer() -> None:
    channel = SoloChannel()
    channel.start([], []).wait()
    with pytest.raises(PlanError, match="no peer"):
        channel.start([Message(1, ())], [])


def opened(channel: Channel) -> bool:
    own = open_channel(channel)
    own.close()
    assert isinstance(channel, GroupChannel)
    made = open_channel(channel.group)  # type: ignore[arg-type]
    made.close()
    return own.channel is channel and made.channel is made.made and own.made is None


def test_a_channel_stays_the_callers() -> None:
    assert rank_threads(2, opened).values() == (True, True)
