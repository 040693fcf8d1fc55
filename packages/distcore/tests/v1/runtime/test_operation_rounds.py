"""Cuts of point-to-point operations: alike at both ends, bounded, and never stuck."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distcore.v1.runtime.operation_rounds import Operation, cut_groups, in_pair_order

Traffic = dict[tuple[int, int], int]
"""(src, dst) -> how many buffers; both are positions."""


@st.composite
def traffic(draw: st.DrawFn) -> tuple[int, Traffic]:
    size = draw(st.integers(2, 6))
    pairs = st.sampled_from([(i, j) for i in range(size) for j in range(size) if i != j])
    return size, draw(st.dictionaries(pairs, st.integers(1, 9)))


def buffers(found: Traffic, index: int, *, sends: bool) -> dict[int, list[torch.Tensor]]:
    byte = torch.zeros(1, dtype=torch.uint8)
    if sends:
        return {dst: [byte] * count for (src, dst), count in found.items() if src == index}
    return {src: [byte] * count for (src, dst), count in found.items() if dst == index}


def groups_of(size: int, found: Traffic, max_operations: int) -> list[list[tuple[Operation, ...]]]:
    return [
        list(
            cut_groups(
                index,
                size,
                buffers(found, index, sends=True),
                buffers(found, index, sends=False),
                max_operations=max_operations,
            )
        )
        for index in range(size)
    ]


def play(groups: Sequence[Sequence[Sequence[Operation]]]) -> Traffic:
    """Run each rank's groups one after the other; a group ends when all its operations met.

    This is how NCCL works: operations of a group progress together, groups one by one. Raises
    where no rank can go on.
    """
    done: Traffic = Counter()
    left = [[Counter((op.sends, op.peer) for op in group) for group in own] for own in groups]
    while any(left):
        moved = False
        for src in range(len(left)):
            for dst in range(len(left)):
                if not (left[src] and left[dst]):
                    continue
                met = min(left[src][0][True, dst], left[dst][0][False, src])
                if met:
                    moved = True
                    left[src][0][True, dst] -= met
                    left[dst][0][False, src] -= met
                    done[src, dst] += met
        for own in left:
            while own and not +own[0]:
                own.pop(0)
                moved = True
        if not moved:
            raise RuntimeError("stuck")
    return dict(done)


@given(traffic(), st.integers(2, 8))
def test_cut_groups_are_bounded_and_meet(case: tuple[int, Traffic], max_operations: int) -> None:
    size, found = case
    groups = groups_of(size, found, max_operations)
    assert all(0 < len(group) <= max_operations for own in groups for group in own)
    assert play(groups) == found


@given(traffic())
def test_pair_order_meets_one_by_one(case: tuple[int, Traffic]) -> None:
    size, found = case
    groups = [
        [
            (operation,)
            for operation in in_pair_order(
                index, buffers(found, index, sends=True), buffers(found, index, sends=False)
            )
        ]
        for index in range(size)
    ]
    assert play(groups) == found


def test_the_simulation_sees_a_deadlock() -> None:
    byte = torch.zeros(1, dtype=torch.uint8)
    both_send_first = [
        [(Operation(True, peer, byte),), (Operation(False, peer, byte),)] for peer in (1, 0)
    ]
    with pytest.raises(RuntimeError, match="stuck"):
        play(both_send_first)


def test_a_pair_with_many_buffers_is_cut_at_256_operations() -> None:
    found = {(0, 1): 300, (1, 0): 300}
    assert [len(group) for group in groups_of(2, found, 256)[0]] == [256, 256, 88]


def test_many_ranks_with_one_buffer_each_are_cut_too() -> None:
    size = 300
    found = {(0, peer): 1 for peer in range(1, size)}
    assert [len(group) for group in groups_of(size, found, 256)[0]] == [128, 128, 43]


def test_buffers_keep_their_order() -> None:
    sent = [torch.tensor([k], dtype=torch.uint8) for k in range(5)]
    groups = cut_groups(0, 2, {1: sent}, {}, max_operations=4)
    assert [[op.buffer.item() for op in group] for group in groups] == [[0, 1], [2, 3], [4]]
