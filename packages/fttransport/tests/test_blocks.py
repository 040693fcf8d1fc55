"""Blocks of views of one storage and of small tensors, as literals."""

from __future__ import annotations

import pytest
import torch

from fttransport import blocks as blocks_module
from fttransport.blocks import SMALL_NBYTES, Blocks, find_blocks, on_host
from fttransport.memory import Spans, contiguous_stride, is_dense, used_span

LARGE = SMALL_NBYTES


def blocks_of(tensors: list[torch.Tensor]) -> Blocks:
    return find_blocks(tensors, Spans.of(tensors))


def test_overlapping_views_share_a_block_and_others_do_not() -> None:
    n = LARGE
    flat = torch.arange(10 * n, dtype=torch.int32).to(torch.uint8)
    found = blocks_of(
        [flat[5 * n : 6 * n], flat[:n], flat[n // 2 : 2 * n], flat[n:n], flat[9 * n :]]
    )
    ranges = [flat[5 * n : 6 * n], flat[: 2 * n], flat[9 * n :]]
    assert [block.tolist() for block in found.blocks] == [one.tolist() for one in ranges]
    assert [block.data_ptr() for block in found.blocks] == [one.data_ptr() for one in ranges]
    assert found.block.tolist() == [0, 1, 1, -1, 2]
    assert found.offset.tolist() == [0, 0, n // 2, 0, 0]
    assert found.strides == {}


def test_small_tensors_of_a_dtype_are_copied_into_one_block() -> None:
    a, b = torch.tensor([1, 2], dtype=torch.uint8), torch.tensor(3, dtype=torch.uint8)
    c, d = torch.tensor([[4.0]]), torch.tensor([5.0])
    alone = torch.tensor([6], dtype=torch.int16)
    found = blocks_of([a, c, alone, b, d])
    a.zero_()
    alone.zero_()
    assert [block.tolist() for block in found.blocks] == [
        [1, 2, 3],
        [0, 0, 128, 64, 0, 0, 160, 64],
        [0, 0],
    ]
    assert found.block.tolist() == [0, 1, 2, 0, 1]
    assert found.offset.tolist() == [0, 0, 0, 2, 4]


def test_packs_are_bounded_one_by_one_and_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks_module, "PACK_NBYTES", 8)
    monkeypatch.setattr(blocks_module, "PACKED_NBYTES", 24)
    tensors = [torch.full((4,), i, dtype=torch.uint8) for i in range(9)]
    found = blocks_of(tensors)
    assert found.block.tolist() == [0, 0, 1, 1, 2, 2, 3, 4, 5]
    assert found.offset.tolist() == [0, 4, 0, 4, 0, 4, 0, 0, 0]
    assert found.blocks[5].data_ptr() == tensors[8].data_ptr()


def test_blocks_do_not_depend_on_where_tensors_lie() -> None:
    flat = torch.arange(8.0)
    apart = [flat[6:8].clone(), flat[0:2].clone(), flat[3:5].clone()]
    together = [flat[6:8], flat[0:2], flat[3:5]]
    one, other = blocks_of(apart), blocks_of(together)
    assert [b.tolist() for b in one.blocks] == [b.tolist() for b in other.blocks]
    assert one.offset.tolist() == other.offset.tolist() == [0, 8, 16]


def test_blocks_share_the_tensors_memory_unless_copied() -> None:
    w = torch.zeros(4)
    (block,) = blocks_of([w]).blocks
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


def test_spans_tell_who_shares_bytes_with_whom() -> None:
    m = torch.zeros(4, 6)
    tensors = [m[2:], torch.zeros(3), m[:, 1], m[0, :1], m[:0], m[3], m[0, 2:3].view(1)]
    spans = Spans.of(tensors)
    assert spans.nbytes.tolist() == [48, 12, 76, 4, 0, 24, 4]
    assert spans.contiguous == [True, True, False, True, True, True, True]
    alone, groups = spans.overlapping()
    assert sorted(alone) == [1, 3]
    assert groups == [[2, 6, 0, 5]]
