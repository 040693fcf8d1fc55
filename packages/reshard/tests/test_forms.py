"""Forms: each told once, read back as the same layouts."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distcore.testing.strategies import layouts
from distcore.v1 import Layout, PlanError
from reshard.forms import FormReader, Forms


def test_tensors_of_one_mesh_share_a_form() -> None:
    forms = Forms()
    numbers = [
        forms.number(
            Layout.from_mesh(shape=shape, dtype="int8", mesh=[0, 1], placements=[placement])
        )
        for shape, placement in (((4,), "S(0)"), ((9, 2), "S(0)"), ((4,), "R"))
    ]
    assert numbers == [0, 0, 1]
    assert len(forms.told()) == 2


@given(st.lists(layouts(), max_size=5))
def test_layouts_are_read_back(found: list[Layout]) -> None:
    forms = Forms()
    numbers = [forms.number(layout) for layout in found]
    reader = FormReader(json.loads(json.dumps(forms.told())))
    for layout, number in zip(found, numbers, strict=True):
        assert reader.layout(layout.shape, layout.dtype, number) == layout


def test_what_is_no_form_is_refused() -> None:
    with pytest.raises(PlanError, match="not a list of objects"):
        FormReader("w")
    with pytest.raises(PlanError, match="there is no form 1 among 1"):
        FormReader([{}]).layout((4,), "int8", 1)
