"""ways: what the caller said about an exchange is checked, and holds for every step of it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch

from ckptx import CheckpointPlanError
from ckptx.ways import MIN_STAGING_NBYTES, Ways, seconds_of
from distcore.testing import rank_threads
from distcore.v1 import Channel, Layout, PeerError, Piece, Plan, Region, Transfer
from distcore.v1.runtime import Shard, SoloChannel

WHOLE = Region((0,), (64,))


def ways_over(channel: Any, **options: Any) -> Ways:
    given = {
        "max_staging_bytes": MIN_STAGING_NBYTES,
        "same_host": "auto",
        "verify": True,
        "timeout_s": 5,
    }
    return Ways(channel, **{**given, **options})


@pytest.mark.parametrize(
    ("timeout", "seconds"), [(None, None), (2, 2.0), (timedelta(minutes=1), 60.0), (0.5, 0.5)]
)
def test_seconds(timeout: float | timedelta | None, seconds: float | None) -> None:
    assert seconds_of(timeout) == seconds


def test_staging_that_is_too_small_is_refused() -> None:
    ways_over(SoloChannel()).check()
    with pytest.raises(CheckpointPlanError, match="max_staging_bytes: 131071 is below 131072"):
        ways_over(SoloChannel(), max_staging_bytes=MIN_STAGING_NBYTES - 1).check()


def test_a_step_that_fails_on_one_rank_fails_on_all() -> None:
    def job(channel: Channel) -> int:
        ways = ways_over(channel)
        assert ways.together("count", lambda: channel.rank + 1) == channel.rank + 1

        def fail() -> int:
            if channel.rank == 2:
                raise LookupError("nothing here")
            return 0

        return ways.together("look", fail)

    for error in rank_threads(3, job).raised(PeerError, within_s=5):
        assert error.label == "look"
        assert list(error.failures) == [2]
        assert "nothing here" in error.failures[2]


def test_a_rank_that_does_not_come_is_not_waited_for_longer_than_was_said() -> None:
    def job(channel: Channel) -> None:
        if channel.rank:
            ways_over(channel, timeout_s=0.5).together("count", lambda: 0)

    outcomes = rank_threads(2, job)
    assert isinstance(outcomes[1].exception, TimeoutError)
    assert 0.4 <= outcomes[1].seconds <= 5


def test_rows_come_in_group_order_whatever_their_lengths() -> None:
    def job(channel: Channel) -> tuple[bytes, ...]:
        return ways_over(channel).rows(b"x" * (3000 * channel.rank))

    for rows in rank_threads(3, job).values():
        assert rows == (b"", b"x" * 3000, b"x" * 6000)


def sent(channel: Channel, tapped: Callable[..., Any], *, prove: bool) -> list[int]:
    """64 bytes from rank 0 to rank 1, one bit of which flips on the way."""

    def flip(buffer: torch.Tensor) -> None:
        if buffer.numel() >= 64:
            buffer[9] ^= 1

    plan = Plan([Transfer("w", 0, 1, WHOLE)])
    layout = Layout(
        shape=(64,), dtype="uint8", pieces={rank: (Piece(WHOLE, (0,)),) for rank in (0, 1)}
    )
    memory = torch.full((64,), channel.rank, dtype=torch.uint8)
    shards = {"w": Shard.of(memory, channel.rank, layout)}
    wire = tapped(channel, flip if channel.rank == 0 else lambda _: None)
    ways_over(wire).execute(plan, shards, shards, staging_nbytes=MIN_STAGING_NBYTES, prove=prove)
    found: list[int] = memory.tolist()
    return found


def test_an_exchange_is_proven_where_that_was_asked_for(tapped: Callable[..., Any]) -> None:
    found = rank_threads(2, lambda channel: sent(channel, tapped, prove=True))
    for error in found.raised(PeerError, within_s=5):
        assert "w" in str(error)


def test_an_exchange_is_not_proven_otherwise(tapped: Callable[..., Any]) -> None:
    arrived = rank_threads(2, lambda channel: sent(channel, tapped, prove=False)).values()[1]
    assert sum(arrived) == 1


@pytest.mark.parametrize("same_host", ["auto", "off"])
def test_ranks_on_one_host_use_memory_unless_it_is_off(
    same_host: str, tapped: Callable[..., Any]
) -> None:
    """The exchange's messages are counted; only sockets carry any."""
    seen: list[int] = []

    def job(channel: Channel) -> None:
        layout = Layout.replicated(shape=(64,), dtype="uint8", ranks=(0, 1))
        memory = torch.full((64,), channel.rank, dtype=torch.uint8)
        shards = {"w": Shard.of(memory, channel.rank, layout)}
        plan = Plan([Transfer("w", 0, 1, WHOLE)])
        counted = tapped(channel, lambda buffer: seen.append(buffer.numel()), same_host=True)
        ways = ways_over(counted, same_host=same_host)
        ways.execute(plan, shards, shards, staging_nbytes=MIN_STAGING_NBYTES, prove=False)
        assert not memory.any()

    rank_threads(2, job).values()
    assert sum(seen) == (64 if same_host == "off" else 0)
