"""The exact owners for one flat buffer, held against trying all."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ownerplan.assignment import assign_owner_work
from ownerplan.layout import GlobalLayout, Holders, Range
from ownerplan.sweep import Stretch, fewest_moved, least_ceiling


def test_a_chain_is_pushed_along() -> None:
    """E11: 336 must lie on rank 0; each next one then goes one rank further."""
    stretches = [
        Stretch(336, (0,), (16,)),
        Stretch(384, (0, 1), (8, 16)),
        Stretch(336, (1, 2), (8, 8)),
        Stretch(384, (2, 3), (16, 8)),
    ]
    assert least_ceiling(stretches, [0] * 4) == 384
    assert fewest_moved(stretches, [0] * 4, 384) == [0, 1, 2, 3]


def test_a_rank_inside_is_free_for_its_tensor() -> None:
    stretches = [
        Stretch(5, (0,), (5,)),
        Stretch(4, (0, 1, 2), (2, 4, 2)),
        Stretch(5, (2,), (5,)),
    ]
    assert least_ceiling(stretches, [0] * 3) == 5
    assert fewest_moved(stretches, [0] * 3, 5) == [0, 1, 2]


def test_a_higher_ceiling_moves_less() -> None:
    stretches = [Stretch(5, (0,), (5,)), Stretch(4, (0, 1), (7, 1))]
    assert fewest_moved(stretches, [0, 0], 5) == [0, 1]
    assert fewest_moved(stretches, [0, 0], 9) == [0, 0]


def test_of_equals_the_first_in_the_buffer_is_chosen() -> None:
    assert fewest_moved([Stretch(1, (0, 1, 2), (4, 4, 4))], [0, 0, 0], 1) == [0]


def test_loads_from_before_count() -> None:
    stretches = [Stretch(1, (0, 1), (2, 2))]
    assert least_ceiling(stretches, [3, 0]) == 3
    assert fewest_moved(stretches, [3, 0], 3) == [1]


def test_nothing_has_no_load() -> None:
    assert least_ceiling([], [0, 0]) == 0
    assert least_ceiling([], []) == 0
    assert fewest_moved([], [0, 0], 0) == []


@st.composite
def buffers(draw: st.DrawFn) -> GlobalLayout:
    """Tensors in any order and with gaps, over ranks with segments of any size, empty ones too."""
    shapes = draw(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4)), max_size=6))
    order = draw(st.permutations(range(len(shapes))))
    offsets, end = [0] * len(shapes), 0
    for index in order:
        offsets[index] = end + draw(st.integers(0, 2))
        end = offsets[index] + shapes[index][0] * shapes[index][1]
    cuts = sorted(draw(st.lists(st.integers(0, end), max_size=4)))
    return GlobalLayout(tuple(shapes), tuple(offsets), end, (0, *cuts))


@given(layout=buffers(), costs=st.lists(st.integers(0, 20), min_size=6, max_size=6), data=st.data())
def test_the_optimal_policy_is_that_of_trying_all(
    layout: GlobalLayout, costs: list[int], data: st.DataObject
) -> None:
    ranks = data.draw(st.permutations(range(layout.dp_size)))
    before = data.draw(st.lists(st.integers(0, 9), min_size=len(ranks), max_size=len(ranks)))
    mesh = SimpleNamespace(mesh=list(ranks))
    by_shape = dict(zip(layout.tensor_shapes, costs, strict=False))
    cost_of = [by_shape[shape] for shape in layout.tensor_shapes]
    ranges = layout.get_rank_ranges(mesh)
    indices = range(len(cost_of))
    held = [dict(holders_of(ranges, layout.get_tensor_range(index))) for index in indices]

    def value(owners: dict[int, int]) -> tuple[int, int]:
        """The makespan and the elements that stay, negated."""
        loads = list(before)
        for index, owner in owners.items():
            loads[owner] += cost_of[index]
        return max(loads), -sum(held[index][owner] for index, owner in owners.items())

    best = min(value(dict(zip(indices, owners, strict=True))) for owners in product(*held))
    found = {
        policy: assign_owner_work(
            layout,
            mesh,
            indices,
            by_shape.__getitem__,
            policy=policy,
            initial_load=dict(enumerate(before)),
        )
        for policy in ("greedy", "optimal")
    }
    assert value(found["optimal"]) == best
    assert value(found["optimal"])[0] <= value(found["greedy"])[0]


def holders_of(ranges: dict[int, Range], run: Range) -> list[tuple[int, int]]:
    return [(rank, part.numel) for rank, part in Holders(ranges).of(run)]


@pytest.mark.parametrize("cost", [0.1, 1e-9, 1e300])
def test_floats_are_costs_too(cost: float) -> None:
    layout = GlobalLayout.build([(4, 4), (3, 8), (4, 4), (3, 8)], 4)
    mesh = SimpleNamespace(mesh=[0, 1, 2, 3])
    owners = assign_owner_work(layout, mesh, range(4), lambda shape: cost, policy="optimal")
    assert sorted(owners.values()) == [0, 1, 2, 3]
