"""Tensors cut out of the memory of blocks."""

from __future__ import annotations

import numpy as np
import torch

from fttransport.table import Form, TensorTable
from fttransport.views import views_of

PAIR = Form("int16", (2,), (1,), 0, None)
MATRIX = Form("int16", (2, 2), (2, 1), 0, None)
TURNED = Form("int16", (2, 2), (1, 2), 0, None)
BYTES = Form("uint8", (3,), (1,), 0, None)
EMPTY = Form("float32", (0, 3), (3, 1), 0, None)


def table_of(*rows: tuple[Form, int, int]) -> TensorTable:
    forms = list(dict.fromkeys(row[0] for row in rows))
    columns = [[forms.index(form), block, offset] for form, block, offset in rows]
    return TensorTable(forms, *np.array(columns, dtype=np.int64).T)


def block_of(count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.int16).view(torch.uint8)


def test_tensors_that_lie_end_to_end_are_cut_in_order_of_their_offsets() -> None:
    table = table_of((MATRIX, 0, 4), (PAIR, 0, 0), (PAIR, 0, 12))
    block = block_of(8)
    found = views_of(table, [0, 1, 2], [block])
    assert found[0].tolist() == [[2, 3], [4, 5]]
    assert found[1].tolist() == [0, 1]
    assert found[2].tolist() == [6, 7]
    assert found[1].data_ptr() == block.data_ptr()


def test_gaps_strides_and_several_dtypes_are_taken_one_by_one() -> None:
    block = block_of(8)
    gap = views_of(table_of((PAIR, 0, 0), (PAIR, 0, 6)), [0, 1], [block])
    assert [gap[0].tolist(), gap[1].tolist()] == [[0, 1], [3, 4]]
    turned = views_of(table_of((PAIR, 0, 0), (TURNED, 0, 4)), [0, 1], [block])
    assert turned[1].tolist() == [[2, 4], [3, 5]]
    mixed = views_of(table_of((PAIR, 0, 0), (BYTES, 0, 4)), [0, 1], [block])
    assert mixed[1].tolist() == [2, 0, 3]
    tied = views_of(table_of((PAIR, 0, 2), (PAIR, 0, 2)), [0, 1], [block])
    assert tied[0].data_ptr() == tied[1].data_ptr() == block.data_ptr() + 2


def test_only_what_is_wanted_is_made_and_the_empty_lie_nowhere() -> None:
    table = table_of((PAIR, 0, 0), (EMPTY, -1, 0), (PAIR, 1, 2), (PAIR, 0, 4))
    found = views_of(table, [1, 2, 2], [block_of(4), block_of(4)])
    assert sorted(found) == [1, 2]
    assert found[1].shape == (0, 3)
    assert found[2].tolist() == [1, 2]
    assert views_of(table, [], []) == {}
