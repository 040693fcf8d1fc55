"""copies: what several ranks hold is equal, or all of them hear which box is not, and where."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ckptx.cell import Cell
from ckptx.copies import DIGEST_NBYTES, prove_equal
from ckptx.errors import CheckpointDisagreement
from ckptx.ways import MIN_STAGING_NBYTES, Ways
from distcore.testing import rank_threads
from distcore.v1 import Channel, Layout, PeerError, Region
from distcore.v1.runtime import Shard

WHOLE = Region((0, 0), (6, 4))
VALUES = torch.arange(24.0).reshape(6, 4)


def ways_over(channel: Any) -> Ways:
    return Ways(channel, MIN_STAGING_NBYTES, "auto", verify=True, timeout_s=5)


def shard_of(values: torch.Tensor, rank: int) -> Shard:
    return Shard.of(values, rank, Layout.replicated(shape=(6, 4), dtype="float32", ranks=[rank]))


@pytest.mark.parametrize("copy_nbytes", [4, 1 << 20])
def test_memory_may_lie_in_another_order(copy_nbytes: int) -> None:
    def job(channel: Channel) -> None:
        values = VALUES.t().contiguous().t() if channel.rank else VALUES
        shards = {"w": shard_of(values, channel.rank)}
        cells = [("w", Cell(WHOLE, (0, 1, 2)))]
        prove_equal(cells, shards, ways_over(channel), copy_nbytes=copy_nbytes)

    rank_threads(3, job).values()


def test_only_the_box_and_the_ranks_that_hold_it_count() -> None:
    """Rank 2 has other values, and the ranks differ outside the box."""

    def job(channel: Channel) -> None:
        values = VALUES.clone()
        values[0] = channel.rank
        if channel.rank == 2:
            values.zero_()
        cells = [("w", Cell(Region((1, 0), (6, 4)), (0, 1)))]
        shards = {"w": shard_of(values, channel.rank)}
        prove_equal(cells, shards, ways_over(channel), copy_nbytes=1 << 20)

    rank_threads(3, job).values()


def test_the_first_box_that_differs_is_named_with_the_ranks() -> None:
    low, high = Region((0, 0), (3, 4)), Region((3, 0), (6, 4))

    def job(channel: Channel) -> None:
        odd = VALUES.clone()
        odd[4, 1] = odd[5, 1] = -1 if channel.rank == 2 else odd[4, 1]
        shards = {"a": shard_of(VALUES, channel.rank), "w": shard_of(odd, channel.rank)}
        cells = [(key, Cell(box, (0, 1, 2))) for key in ("a", "w") for box in (low, high)]
        prove_equal(cells, shards, ways_over(channel), copy_nbytes=1 << 20)

    for error in rank_threads(3, job).raised(CheckpointDisagreement, within_s=5):
        assert f"the copies of 'w' in {high}" in str(error)
        assert error.values[0] == error.values[1] != error.values[2]


def test_a_copy_costs_eight_bytes() -> None:
    class Counted:
        """A channel that keeps the rows that it gathers."""

        def __init__(self, inner: Channel) -> None:
            self._inner = inner
            self.rows: list[bytes] = []

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        def all_gather(self, row: bytes, *, timeout_s: float | None = None) -> tuple[bytes, ...]:
            self.rows.append(row)
            return self._inner.all_gather(row, timeout_s=timeout_s)

    def told(channel: Channel, count: int) -> int:
        counted = Counted(channel)
        shards = {f"w{i}": shard_of(VALUES, channel.rank) for i in range(count)}
        cells = [(key, Cell(WHOLE, (0, 1))) for key in shards]
        prove_equal(cells, shards, ways_over(counted), copy_nbytes=1 << 20)
        return sum(map(len, counted.rows))

    def job(channel: Channel) -> int:
        return told(channel, 130) - told(channel, 30)

    assert rank_threads(2, job).values() == (100 * DIGEST_NBYTES,) * 2


def test_a_rank_that_cannot_read_its_copy_fails_all() -> None:
    def job(channel: Channel) -> None:
        shards = {} if channel.rank == 1 else {"w": shard_of(VALUES, channel.rank)}
        cells = [("w", Cell(WHOLE, (0, 1, 2)))]
        prove_equal(cells, shards, ways_over(channel), copy_nbytes=1 << 20)

    for error in rank_threads(3, job).raised(PeerError, within_s=5):
        assert list(error.failures) == [1]
        assert "KeyError" in error.failures[1]
