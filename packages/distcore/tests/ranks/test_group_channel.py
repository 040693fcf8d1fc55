"""GroupChannel over real gloo groups, as threads."""

from __future__ import annotations

import time

import pytest
import torch

from distcore.testing import rank_threads
from distcore.v1.channel import Channel, Message
from distcore.v1.errors import ChannelError, ChannelTimeout, DisagreementError, PlanError
from distcore.v1.runtime.group_channel import GroupChannel


def filled(value: int, nbytes: int) -> torch.Tensor:
    return torch.full((nbytes,), value, dtype=torch.uint8)


def test_every_rank_sends_to_every_other_rank() -> None:
    def exchange(channel: Channel) -> dict[int, list[list[int]]]:
        peers = [rank for rank in channel.ranks if rank != channel.rank]
        sends = [
            Message(peer, (filled(channel.rank, 2), filled(9, 0), filled(10 + peer, 1)))
            for peer in peers
        ]
        receives = [Message(peer, (filled(0, 2), filled(0, 0), filled(0, 1))) for peer in peers]
        channel.start(sends, receives).wait()
        return {got.peer: [buffer.tolist() for buffer in got.buffers] for got in receives}

    assert rank_threads(3, exchange).values() == (
        {1: [[1, 1], [], [10]], 2: [[2, 2], [], [10]]},
        {0: [[0, 0], [], [11]], 2: [[2, 2], [], [11]]},
        {0: [[0, 0], [], [12]], 1: [[1, 1], [], [12]]},
    )


def test_all_gather_returns_rows_by_index() -> None:
    gathered = rank_threads(3, lambda channel: channel.all_gather(bytes([channel.rank]) * 2))
    assert gathered.values() == ((b"\0\0", b"\1\1", b"\2\2"),) * 3


def test_rows_of_different_lengths_raise_on_every_rank() -> None:
    outcomes = rank_threads(3, lambda channel: channel.all_gather(b"x" * (8 + channel.rank)))
    for error in outcomes.raised(DisagreementError, within_s=3):
        assert error.values == {0: "8 bytes", 1: "9 bytes", 2: "10 bytes"}


def test_a_group_of_one_needs_no_peer() -> None:
    def alone(channel: Channel) -> tuple[bytes, ...]:
        channel.start([], []).wait()
        return channel.all_gather(b"row")

    assert rank_threads(1, alone).values() == ((b"row",),)


def test_a_silent_peer_is_a_timeout_that_names_it() -> None:
    def rank_one_is_silent(channel: Channel) -> None:
        if channel.rank == 1:
            time.sleep(1)
            return
        begin = time.monotonic()
        with pytest.raises(ChannelTimeout, match="rank 1") as caught:
            channel.start([], [Message(1, (filled(0, 4),))], timeout_s=0.3).wait()
        assert time.monotonic() - begin < 0.9
        assert (caught.value.peer, caught.value.usable) == (1, False)
        with pytest.raises(ChannelError, match="broke before"):
            channel.all_gather(b"row")

    rank_threads(2, rank_one_is_silent).values()


def test_the_channels_own_timeout_bounds_all_gather() -> None:
    def rank_one_is_silent(channel: GroupChannel) -> None:
        if channel.rank == 1:
            time.sleep(1)
            return
        with pytest.raises(ChannelTimeout):
            GroupChannel(channel.group, timeout_s=0.3).all_gather(b"row")

    rank_threads(2, rank_one_is_silent).values()


@pytest.mark.parametrize("peer", [0, 2, -1])
def test_a_peer_that_is_no_other_rank_is_refused(peer: int) -> None:
    def wrong(channel: Channel) -> None:
        channel.start([Message(peer if channel.rank == 0 else 1, (filled(0, 1),))], [])

    rank_threads(2, wrong).raised(PlanError)


def test_a_second_message_for_one_peer_is_refused() -> None:
    def twice(channel: Channel) -> None:
        message = Message(1 - channel.rank, (filled(0, 1),))
        channel.start([message, message], [])

    rank_threads(2, twice).raised(PlanError)


def test_no_group_is_refused() -> None:
    with pytest.raises(PlanError, match="process group"):
        GroupChannel(-100)  # type: ignore[arg-type]


def test_global_ranks_may_be_given_for_a_group_outside_the_default_world() -> None:
    def named(channel: GroupChannel) -> tuple[int, tuple[int, ...], tuple[bytes, ...]]:
        other = GroupChannel(channel.group, ranks=[7, 3])
        peer = 3 if other.rank == 7 else 7
        got = filled(0, 1)
        other.start([Message(peer, (filled(other.rank, 1),))], [Message(peer, (got,))]).wait()
        return other.rank, other.ranks, (bytes(got.tolist()),)

    assert rank_threads(2, named).values() == ((7, (7, 3), (b"\3",)), (3, (7, 3), (b"\7",)))
