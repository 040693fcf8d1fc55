"""Council: what the ranks of a communicator tell each other at a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from distcore.testing import rank_threads
from distcore.v1 import Channel, DisagreementError, PeerError
from reshard.face.council import ROW_NBYTES, Council


class Gatherer:
    """A communicator that can do one thing, and does not say how many ranks it has."""

    device = None

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.rows = 0

    def allgather(self, sendbuf: torch.Tensor, recvbuf: torch.Tensor, stream: object) -> None:
        self.rows += 1
        assert sendbuf.numel() == ROW_NBYTES
        rows = self.channel.all_gather(sendbuf.numpy().tobytes())
        recvbuf.copy_(torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8).view(-1, 1024))


def council_of(channel: Channel, **more: Any) -> tuple[Council, Gatherer]:
    gatherer = Gatherer(channel)
    group: Any = SimpleNamespace(rank=channel.index, nccl_communicator=gatherer, **more)
    return Council.over(group, (None, None), None), gatherer


def told(channel: Channel, text: str) -> None:
    council, gatherer = council_of(channel, world_size=channel.size)
    assert council.device == torch.device("cpu")
    with council.step("open"):
        pass
    assert gatherer.rows == 1
    with council.step("the terms", lambda: text.replace("?", str(channel.index // 2))):
        pass


def test_a_difference_behind_what_has_room_is_a_difference() -> None:
    long = "a" * 2 * ROW_NBYTES
    rank_threads(3, told, long).values()
    for error in rank_threads(3, told, long + "?").raised(DisagreementError, within_s=3):
        assert "the terms" in str(error)
        assert set(error.values.values()) == {"a" * (ROW_NBYTES - 19)}


def failed(channel: Channel) -> None:
    council, _ = council_of(channel, world_size=channel.size)
    with council.failures("begin"):
        if channel.index == 1:
            raise KeyError("x" * 2 * ROW_NBYTES)
    with council.step("begin"):
        pass


def test_a_failure_before_the_step_is_the_failure_of_the_step() -> None:
    one, other = list(rank_threads(2, failed))
    assert isinstance(other.exception, KeyError)
    assert isinstance(one.exception, PeerError)
    assert "rank 1: KeyError: 'xxx" in str(one.exception)


def alone(channel: Channel) -> list[int]:
    rows = []
    for more in ({}, {"world_size": 1}, {"world_size": "two"}):
        council, gatherer = council_of(channel, **more)
        with council.step("nothing", lambda: str(channel.index)):
            pass
        rows.append(gatherer.rows)
    return rows


def test_without_a_number_of_ranks_nobody_is_asked() -> None:
    assert rank_threads(2, alone).values() == ([0, 0, 0], [0, 0, 0])
