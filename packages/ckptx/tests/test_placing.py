"""placing: every element once, by true bytes; compared with the document's cases."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptx import CheckpointPlanError, plan_save
from distcore.v1 import Layout, Piece, Region

MIB = 1 << 20


def whole(nbytes: int, *ranks: int) -> Layout:
    return Layout.replicated(shape=(nbytes,), dtype="uint8", ranks=ranks)


def loads(layouts: dict[str, Layout], size: int, **options: bool) -> list[int]:
    plan = plan_save(layouts, tuple(range(size)), **options)
    return [plan.written_nbytes(rank) for rank in range(size)]


@pytest.mark.parametrize("split", [True, False])
def test_what_one_rank_holds_is_placed_first(split: bool) -> None:
    """A is on both ranks, b on rank 0: 100 each, where placing in order gives 200 and 0."""
    assert loads({"a": whole(100 * MIB, 0, 1), "b": whole(100 * MIB, 0)}, 2, split=split) == [
        100 * MIB,
        100 * MIB,
    ]


def test_a_huge_tensor_is_split() -> None:
    """Whole, the largest alone makes a rank write 1024; in parts, 129 is the least."""
    sizes = [1024, *[1] * 8]
    layouts = {f"t{i}": whole(size * MIB, *range(8)) for i, size in enumerate(sizes)}
    assert max(loads(layouts, 8)) <= 1.01 * 129 * MIB
    assert max(loads(layouts, 8, split=False)) == 1024 * MIB
    assert plan_save(layouts, range(8)).lower_bound_slowest == 129 * MIB


def test_tensors_that_the_ranks_do_not_hold_are_all_named() -> None:
    part = Layout(shape=(8,), dtype="uint8", pieces={0: [Piece(Region((0,), (3,)), (0,))]})
    with pytest.raises(CheckpointPlanError) as caught:
        plan_save({"a": part, "b": part, "c": whole(4, 0)}, (0, 1))
    assert [(p.where, p.kind) for p in caught.value.problems] == [
        ("a", "coverage"),
        ("b", "coverage"),
    ]
    assert "hold 3 of 8" in caught.value.problems[0].text


@given(st.data())
def test_every_element_is_written_once_by_a_rank_that_holds_it(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 4))
    layouts = {}
    for name in data.draw(st.lists(st.sampled_from("abc"), unique=True)):
        shape = data.draw(st.lists(st.integers(0, 5), max_size=3).map(tuple))
        mesh = list(range(size))
        choices = ["R", *(f"S({dim})" for dim in range(len(shape)))]
        placement = data.draw(st.sampled_from(choices))
        layouts[name] = Layout.from_mesh(
            shape=shape, dtype="int16", mesh=mesh, placements=[placement]
        )
    split = data.draw(st.booleans())
    plan = plan_save(layouts, range(size), split=split, min_split=2)
    for name, layout in layouts.items():
        count = 0
        for rank, writes in plan.writes.items():
            for write in (w for w in writes if w.key == name):
                count += write.region.numel
                held = [piece.region for piece in layout.pieces(rank)]
                assert any(box.contains(write.region) for box in held)
        assert count == Region.of_shape(layout.shape).numel
    assert max(map(plan.written_nbytes, range(size))) >= plan.lower_bound_slowest
