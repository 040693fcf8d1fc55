"""The strategies yield legal values, and the odd ones among them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
from hypothesis import find, given
from hypothesis import strategies as st

from distcore.testing import strategies
from distcore.testing.strategies import PlacedMesh
from distcore.v1 import Layout, Plan, Region


@given(strategies.layouts(), st.data())
def test_every_region_lies_in_the_tensor(layout: Layout, data: st.DataObject) -> None:
    rank = data.draw(st.sampled_from(layout.ranks))
    whole = Region.of_shape(layout.shape)
    assert all(whole.contains(piece.region) for piece in layout.pieces(rank))


@given(strategies.layouts())
def test_a_layout_holds_every_element(layout: Layout) -> None:
    held = sum(piece.region.numel for rank in layout.ranks for piece in layout.pieces(rank))
    assert held >= Region.of_shape(layout.shape).numel


@given(strategies.layout_pairs())
def test_a_pair_is_of_one_tensor(pair: tuple[Layout, Layout]) -> None:
    assert (pair[0].shape, pair[0].dtype) == (pair[1].shape, pair[1].dtype)


@given(strategies.plans(num_ranks=3))
def test_a_plan_stays_within_its_ranks(plan: Plan) -> None:
    assert set(plan.ranks) <= {0, 1, 2}
    assert Plan.from_json(plan.to_json()) == plan


@given(strategies.regions((4, 0)))
def test_a_region_lies_within_the_shape_asked_for(region: Region) -> None:
    assert Region((0, 0), (4, 0)).contains(region)


ODD: dict[str, Callable[[Layout], bool]] = {
    "no dims": lambda layout: layout.shape == (),
    "no elements": lambda layout: 0 in layout.shape,
    "several pieces": lambda layout: any(len(layout.pieces(rank)) > 1 for rank in layout.ranks),
    "made of pieces": lambda layout: layout.form is None and len(layout.ranks) > 1,
    "three axes": lambda layout: layout.form is not None and len(layout.form.sizes) == 3,
    "ranks out of order": lambda layout: list(layout.ranks) != sorted(layout.ranks),
    "strided": lambda layout: "_S" in repr(layout),
}


@pytest.mark.parametrize("odd", ODD)
def test_odd_layouts_are_found(odd: str) -> None:
    assert ODD[odd](find(strategies.layouts(), ODD[odd]))


@given(strategies.placed_meshes(2, strided=False))
def test_plain_placements_only(placed: PlacedMesh) -> None:
    assert set(placed.placements) <= {"R", "S(0)", "S(1)"}


def test_strategies_load_no_torch() -> None:
    """So that a planner's tests start at once."""
    code = "import sys; from distcore.testing import strategies; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
