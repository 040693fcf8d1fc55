"""Runs of a box in a row-major chunk, against numpy's own idea of it."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ckptx.stored import Chunk, StoredTensor, position, run_positions, runs
from distcore.v1 import Region


@st.composite
def boxes(draw: st.DrawFn) -> tuple[Region, Region]:
    """A box, not empty, and the chunk around it, which need not begin at the origin."""
    lows, starts, stops, highs = [], [], [], []
    for _ in range(draw(st.integers(0, 3))):
        low, start, stop, high = sorted(draw(st.tuples(*[st.integers(0, 5)] * 4)))
        lows.append(low)
        starts.append(start)
        stops.append(max(stop, start + 1))
        highs.append(max(high, start + 1, stop))
    chunk = Region(tuple(lows), tuple(highs))
    return Region(tuple(starts), tuple(stops)), chunk


@given(boxes())
def test_runs_hold_the_elements_of_the_box_in_order(pair: tuple[Region, Region]) -> None:
    region, chunk = pair
    table = np.arange(chunk.numel).reshape(chunk.shape)
    expected = table[region.relative_to(chunk).slices()].ravel().tolist()
    count, length = runs(region, chunk)
    begins = list(run_positions(region, chunk))
    assert len(begins) == count
    assert [at + i for at in begins for i in range(length)] == expected
    assert position(region.start, chunk) == expected[0]


@given(boxes())
def test_runs_are_as_long_as_they_can_be_within_a_dim(pair: tuple[Region, Region]) -> None:
    region, chunk = pair
    count, length = runs(region, chunk)
    if region == chunk:
        assert (count, length) == (1, chunk.numel)
    assert count * length == region.numel


def test_sizes() -> None:
    stored = StoredTensor((3, 4), "bfloat16", (Chunk(Region((0, 0), (3, 4)), "x", 8),))
    assert (stored.numel, stored.nbytes) == (12, 24)
    assert StoredTensor((), "float64", ()).nbytes == 8
