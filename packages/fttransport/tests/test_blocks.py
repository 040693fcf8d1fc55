"""Blocks of views of one storage, as literals."""

from __future__ import annotations

import torch

from fttransport.blocks import Place, find_blocks, on_host
from fttransport.memory import contiguous_stride, is_dense, used_span


def test_overlapping_views_share_a_block_and_others_do_not() -> None:
    flat = torch.arange(100, dtype=torch.uint8)
    blocks, places = find_blocks([flat[50:60], flat[0:10], flat[5:20], flat[10:10], flat[90:]])
    assert [block.tolist() for block in blocks] == [
        list(range(50, 60)),
        list(range(20)),
        list(range(90, 100)),
    ]
    assert places == [
        Place(0, 0, (1,)),
        Place(1, 0, (1,)),
        Place(1, 5, (1,)),
        Place(-1, 0, (1,)),
        Place(2, 0, (1,)),
    ]


def test_blocks_share_the_tensors_memory_unless_copied() -> None:
    w = torch.zeros(4)
    (block,), _ = find_blocks([w])
    (alias,) = on_host([block], copied=False)
    (copy,) = on_host([block], copied=True)
    w.fill_(1)
    assert alias.view(torch.float32).tolist() == [1] * 4
    assert copy.view(torch.float32).tolist() == [0] * 4


def test_spans_and_strides() -> None:
    matrix = torch.zeros(4, 6)
    assert used_span(matrix[1:3]) == (24, 72)
    assert used_span(matrix[:, 1]) == (4, 80)
    assert used_span(matrix[:0]) == (0, 0)
    assert contiguous_stride((2, 3, 4)) == (12, 4, 1)
    assert contiguous_stride((2, 0, 4)) == (4, 4, 1)
    assert contiguous_stride(()) == ()
    assert is_dense((2, 3), (1, 2))
    assert not is_dense((2, 3), (4, 1))
    assert not is_dense((3,), (0,))
    assert is_dense((1,), (7,))
