"""Work items: shapes, and who holds how much."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ownerplan.layout import GlobalLayout
from ownerplan.work import Work, work_in_chunks, works_in_buffer


def test_work_is_a_value() -> None:
    work = Work([2, 3], [(0, 4), (1, 0), (2, 2)], [0, 1])  # type: ignore[arg-type]
    assert work == Work((2, 3), ((0, 4), (1, 0), (2, 2)), (0, 1))
    assert (work.numel, work.holders) == (6, (0, 2))


@pytest.mark.parametrize(
    ("shape", "held", "words"),
    [
        ((2, -3), (), "negative dim"),
        ((2, 3), ((0, 7),), "rank 0: holds 7 elements of 6"),
        ((2, 3), ((0, -1),), "rank 0: holds -1"),
        ((2, 3), ((0, 1), (0, 1)), "a rank is named twice"),
    ],
)
def test_what_is_no_work_is_refused(
    shape: tuple[int, ...], held: tuple[tuple[int, int], ...], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        Work(shape, held)


@given(
    shape=st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple), ranks=st.integers(1, 6)
)
def test_chunks_are_those_of_torch(shape: tuple[int, ...], ranks: int) -> None:
    pieces = torch.chunk(torch.empty(shape), ranks)
    wanted = tuple((rank, piece.numel()) for rank, piece in enumerate(pieces) if piece.numel())
    assert work_in_chunks(shape, ranks).held == wanted


def test_what_has_no_dims_lies_on_every_rank() -> None:
    assert work_in_chunks((), 2).held == ((0, 1), (1, 1))


def test_the_matrices_of_a_buffer_take_part() -> None:
    layout = GlobalLayout.build([(4, 2, 3), (5,), (3, 6)], 2)
    mesh = SimpleNamespace(mesh=[1, 0])
    assert works_in_buffer(layout, mesh) == [
        Work((4, 2, 3), ((1, 24),)),
        Work((3, 6), ((0, 18),)),
    ]
    assert works_in_buffer(layout, mesh, [1]) == [Work((5,), ((0, 5),))]
