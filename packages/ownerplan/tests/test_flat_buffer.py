"""Flat buffers: their matrices as Regions, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distcore.v1 import PlanError, Region
from ownerplan import FlatBuffer, GlobalLayout, OwnerMuon
from ownerplan.matrix_view import Matrix

LAYOUT = GlobalLayout.build(((4, 2, 3), (5,), (3, 6)), 2)


def test_matrices_are_where_the_layout_has_them() -> None:
    assert FlatBuffer(LAYOUT).matrices() == (
        Matrix(Region((0,), (24,)), 4, 6),
        Matrix(Region((24,), (42,)), 3, 6),
    )


def test_views_cut_a_tensor_in_order() -> None:
    found = FlatBuffer(LAYOUT, tensors=(0, 2), views={2: (1, 2)}).matrices("batch")
    assert [(m.region.start[0], m.region.stop[0], m.rows, m.cols) for m in found] == [
        (0, 6, 2, 3),
        (6, 12, 2, 3),
        (12, 18, 2, 3),
        (18, 24, 2, 3),
        (24, 30, 1, 6),
        (30, 42, 2, 6),
    ]


def test_segments_are_in_buffer_order() -> None:
    layout = GlobalLayout.build(((8, 4),), 4)
    mesh = SimpleNamespace(mesh=[[0, 1], [2, 3]])
    found = FlatBuffer(layout, mesh).segments("float32")
    starts = {rank: found.pieces(rank)[0].region.start[0] for rank in found.ranks}
    assert starts == {0: 0, 2: 8, 1: 16, 3: 24}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"tensors": (3,)}, "the layout has 3 tensors"),
        ({"tensors": (0, 0)}, "listed more than once"),
        ({"views": {7: "batch"}}, "tensor 7"),
    ],
)
def test_tensors_that_are_not_there_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(PlanError, match=text):
        FlatBuffer(LAYOUT, **options)


def test_a_plain_segment_needs_a_mesh() -> None:
    with pytest.raises(PlanError, match="needs the mesh"):
        FlatBuffer(LAYOUT).segments("float32")


def test_a_segment_has_one_dim() -> None:
    group = {"params": [torch.nn.Parameter(torch.zeros(6, 7))], "flat": FlatBuffer(LAYOUT)}
    with pytest.raises(PlanError, match="expected a segment of one dim"):
        OwnerMuon([group])
