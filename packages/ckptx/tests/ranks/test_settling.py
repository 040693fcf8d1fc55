"""settling: blocks that several ranks have read in parts are judged by all of them together."""

from __future__ import annotations

import pytest

from ckptx import FormatError
from ckptx.integrity import Inspector, Integrity, blocks_of
from ckptx.settling import settle
from ckptx.stored import Chunk, StoredTensor
from ckptx.ways import MIN_STAGING_NBYTES, Ways
from distcore.testing import rank_threads
from distcore.v1 import Channel, PeerError, Region

DATA = bytes(i * 7 % 256 for i in range(90))
INTEGRITY = Integrity({"f": tuple(blocks_of(10, memoryview(DATA)))}, {"f": 100})
TENSORS = {"w": StoredTensor((90,), "uint8", (Chunk(Region((0,), (90,)), "dir/f", 10),))}


def ways_over(channel: Channel) -> Ways:
    return Ways(channel, MIN_STAGING_NBYTES, "auto", verify=True, timeout_s=5)


def saw(inspector: Inspector, low: int, high: int, *, damaged: int | None = None) -> None:
    """A part of the block was read; one byte of it may be wrong."""
    data = bytearray(DATA[low:high])
    if damaged is not None:
        data[damaged - low] ^= 64
    inspector.watch("dir/f", 10 + low, [memoryview(data)])


@pytest.mark.parametrize("damaged", [None, 5, 89])
def test_each_rank_has_read_a_part(damaged: int | None) -> None:
    def job(channel: Channel) -> None:
        inspector = Inspector(INTEGRITY, TENSORS)
        low, high = 30 * channel.rank, 30 * channel.rank + 30
        mine = damaged if damaged is not None and low <= damaged < high else None
        saw(inspector, low, high, damaged=mine)
        settle(inspector, ways_over(channel))

    outcomes = rank_threads(3, job)
    if damaged is None:
        outcomes.values()
        return
    # Whoever has read the damaged part, all three see it in the block.
    for error in outcomes.raised(FormatError, within_s=5):
        assert (error.file, error.key, error.offset) == ("dir/f", "w", 10)


def test_a_block_that_one_rank_has_read_whole_fails_all() -> None:
    def job(channel: Channel) -> None:
        inspector = Inspector(INTEGRITY, TENSORS)
        if channel.rank == 1:
            saw(inspector, 0, 90, damaged=44)
        settle(inspector, ways_over(channel))

    for error in rank_threads(2, job).raised(PeerError, within_s=5):
        assert list(error.failures) == [1]
        assert "tensor 'w', byte 10: damaged" in error.failures[1]


@pytest.mark.parametrize("damaged", [None, 70])
def test_what_is_incomplete_is_kept_for_the_next_time(damaged: int | None) -> None:
    def job(channel: Channel) -> None:
        inspector = Inspector(INTEGRITY, TENSORS)
        if channel.rank == 0:
            saw(inspector, 0, 50)
        settle(inspector, ways_over(channel))
        if channel.rank == 1:
            saw(inspector, 50, 90, damaged=damaged)
        settle(inspector, ways_over(channel))

    outcomes = rank_threads(2, job)
    if damaged is None:
        outcomes.values()
    else:
        for error in outcomes.raised(PeerError, within_s=5):
            assert list(error.failures) == [1]


def test_nothing_read_is_nothing_told() -> None:
    def job(channel: Channel) -> None:
        settle(Inspector(INTEGRITY, TENSORS), ways_over(channel))

    rank_threads(2, job).values()
