"""Matrix views: what counts as one matrix."""

from __future__ import annotations

from typing import Any

import pytest

from distcore.v1 import PlanError, Region
from ownerplan.matrix_view import Matrix, matrices_of


def test_flatten_takes_all_but_the_first_dim_together() -> None:
    assert matrices_of((8, 3, 2, 2)) == (Matrix(Region((0, 0, 0, 0), (8, 3, 2, 2)), 8, 12),)


def test_batch_takes_each_matrix_of_a_stack() -> None:
    found = matrices_of((2, 3, 4, 5), "batch")
    assert [(m.rows, m.cols) for m in found] == [(4, 5)] * 6
    assert found[4].region == Region((1, 1, 0, 0), (2, 2, 4, 5))


def test_batch_of_a_matrix_is_the_matrix() -> None:
    assert matrices_of((4, 5), "batch") == matrices_of((4, 5))


def test_heads_are_equal_blocks_of_rows() -> None:
    found = matrices_of((6, 5), 3)
    assert [m.region.start for m in found] == [(0, 0), (2, 0), (4, 0)]
    assert {(m.rows, m.cols) for m in found} == {(2, 5)}


def test_four_blocks_of_a_gated_attention() -> None:
    found = matrices_of((4608, 64), (2048, 2048, 256, 256))
    assert [m.rows for m in found] == [2048, 2048, 256, 256]
    assert found[3].region == Region((4352, 0), (4608, 64))


@pytest.mark.parametrize("shape", [(0, 4), (4, 0)])
def test_a_parameter_without_elements_has_no_matrices(shape: tuple[int, int]) -> None:
    assert matrices_of(shape) == ()


@pytest.mark.parametrize(
    ("shape", "view", "text"),
    [
        ((5,), "flatten", "two dims or more"),
        ((), "batch", "two dims or more"),
        ((6, 4), 4, "6 rows cannot be divided into 4 equal heads"),
        ((6, 4), 0, "0 equal heads"),
        ((6, 4), (4, 1), "do not add up to the 6 rows"),
        ((6, 4), (7, -1), "do not add up to the 6 rows"),
        ((6, 4), "rows", "expected 'flatten'"),
        ((6, 4), True, "expected 'flatten'"),
    ],
)
def test_views_that_do_not_fit_are_refused(shape: Any, view: Any, text: str) -> None:
    with pytest.raises(PlanError, match=text):
        matrices_of(shape, view)
