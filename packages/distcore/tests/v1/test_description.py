"""A described layout is read back whole, and data that describe none are refused by name."""

from __future__ import annotations

import json

import pytest
from hypothesis import given

from distcore.testing import strategies
from distcore.v1 import Layout, PlanError, describe_layout, layout_from


@given(strategies.layouts())
def test_a_layout_comes_back_through_json(layout: Layout) -> None:
    again = layout_from(json.loads(json.dumps(describe_layout(layout))))
    assert again == layout
    assert again.form == layout.form


def test_the_form_of_a_mesh_is_pinned() -> None:
    layout = Layout.from_mesh(
        shape=(4, 2), dtype="int8", mesh=[[3, 1], [0, 2]], placements=["_S(0,2)", "S(0)"]
    )
    assert describe_layout(layout) == {
        "format": 1,
        "shape": [4, 2],
        "dtype": "int8",
        "ranks": [3, 1, 0, 2],
        "mesh": [2, 2],
        "placements": ["_S(0,2)", "S(0)"],
        "reading": "order",
    }


MESH = describe_layout(Layout.replicated(shape=(2,), dtype="int8", ranks=[0, 1]))
WRONG: list[object] = [
    None,
    [],
    {**MESH, "format": 2},
    {**MESH, "dtype": 8},
    {**MESH, "dtype": "float7"},
    {**MESH, "shape": "2"},
    {**MESH, "shape": [-1]},
    {**MESH, "mesh": [3]},
    {**MESH, "mesh": [0]},
    {**MESH, "ranks": [0, 0]},
    {**MESH, "placements": ["Q"]},
    {**MESH, "reading": "other"},
    {**MESH, "pieces": [[0, [0]]]},
    {**MESH, "pieces": [[0, [0], [3], [0]]]},
    {**MESH, "pieces": [[0, 0, 3, 0]]},
]


@pytest.mark.parametrize("description", WRONG)
def test_what_describes_no_layout_is_refused(description: object) -> None:
    with pytest.raises(PlanError):
        layout_from(description)
