"""Placement: its text form, torch.chunk's cuts, and the two readings of strided cuts."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distcore.v1 import Interval, Placement, PlanError, Reading
from distcore.v1.placement import cut, cutting_order, intervals

READINGS: list[Reading] = ["order", "index"]
GRID = [(dp, tp) for dp in range(3) for tp in range(2)]


def parsed(*forms: str) -> list[Placement]:
    return [Placement.parse(form, 1) for form in forms]


def held(
    length: int, forms: list[str], sizes: list[int], at: list[int], reading: Reading = "order"
) -> list[int]:
    """The indices that the rank at `at` holds, in local order."""
    found = intervals(0, length, parsed(*forms), sizes, at, reading=reading)
    assert found[0].place == 0
    for one, after in pairwise(found):
        assert after.place == one.place + one.length
    return [i for one in found for i in range(one.start, one.start + one.length)]


@pytest.mark.parametrize(
    ("form", "placement"),
    [
        ("R", Placement(None)),
        ("S(0)", Placement(0)),
        ("S(-1)", Placement(2)),
        ("_S(1,2)", Placement(1, 2)),
        ("_S(-3, 4)", Placement(0, 4)),
        ("_S(0,1)", Placement(0)),
    ],
)
def test_parse(form: str, placement: Placement) -> None:
    assert Placement.parse(form, 3) == placement
    assert Placement.parse(str(placement), 3) == placement


@pytest.mark.parametrize(
    "form",
    [
        "",
        "r",
        "S",
        "S()",
        "S(0",
        "S(0) ",
        "S(0.0)",
        "S(a)",
        "_S(0)",
        "_S(0,-2)",
        "P(sum)",
        "S(\u0663)",
    ],
)
def test_a_form_that_is_none_is_refused(form: str) -> None:
    with pytest.raises(PlanError, match="none of 'R', "):
        Placement.parse(form, 9)


@pytest.mark.parametrize("form", [None, 0, b"R", ("S", 0)])
def test_a_placement_that_is_no_text_is_refused(form: object) -> None:
    with pytest.raises(PlanError, match="none of 'R', "):
        Placement.parse(form, 9)  # type: ignore[arg-type]


@pytest.mark.parametrize(("form", "ndim"), [("S(2)", 2), ("S(-3)", 2), ("S(0)", 0), ("_S(1,2)", 1)])
def test_a_dim_that_the_tensor_lacks_is_refused(form: str, ndim: int) -> None:
    with pytest.raises(PlanError, match=f"a {ndim}-d tensor lacks"):
        Placement.parse(form, ndim)


@pytest.mark.parametrize(
    ("dim", "factor"),
    [(-1, 1), (0, 0), (0, -2), (None, 2), (0.0, 1), (0, 2.0), (True, 1), (0, True)],
)
def test_a_wrong_placement_is_refused(dim: int | None, factor: int) -> None:
    with pytest.raises(PlanError) as caught:
        Placement(dim, factor)
    assert [problem.where for problem in caught.value.problems] == ["placement"]


def test_a_split_factor_below_one_is_refused() -> None:
    with pytest.raises(PlanError, match="below 1"):
        Placement.parse("_S(0,0)", 1)


@pytest.mark.parametrize(
    ("length", "parts", "runs"),
    [
        (10, 4, [(0, 3), (3, 3), (6, 3), (9, 1)]),
        (2, 4, [(0, 1), (1, 1), (2, 0), (2, 0)]),
        (5, 4, [(0, 2), (2, 2), (4, 1), (5, 0)]),
        (0, 2, [(0, 0), (0, 0)]),
        (7, 1, [(0, 7)]),
    ],
)
def test_cut(length: int, parts: int, runs: list[tuple[int, int]]) -> None:
    assert [cut(0, length, parts, part) for part in range(parts)] == runs
    assert [cut(3, length, parts, part) for part in range(parts)] == [
        (start + 3, n) for start, n in runs
    ]


@given(st.integers(0, 40), st.integers(1, 9))
def test_the_parts_of_a_cut_lie_one_behind_the_other(length: int, parts: int) -> None:
    runs = [cut(0, length, parts, part) for part in range(parts)]
    assert [i for start, n in runs for i in range(start, start + n)] == list(range(length))


@pytest.mark.parametrize(
    ("forms", "sizes", "order"),
    [
        (["S(0)", "S(0)"], [2, 3], (0, 1)),
        (["_S(0,3)", "S(0)"], [2, 3], (1, 0)),
        (["_S(0,2)", "_S(0,2)", "S(0)"], [4, 3, 2], (2, 0, 1)),
        (["_S(0,6)", "_S(0,2)", "S(0)"], [4, 3, 2], (2, 1, 0)),
        (["R", "_S(0,2)", "R", "S(0)"], [5, 4, 3, 2], (3, 1)),
        (["R", "R"], [2, 2], ()),
        (["_S(0,2)"], [2], None),
        (["_S(0,3)", "S(0)"], [2, 2], None),
        (["S(0)", "_S(0,2)"], [2, 2], None),
    ],
)
def test_cutting_order(forms: list[str], sizes: list[int], order: tuple[int, ...] | None) -> None:
    assert cutting_order(0, parsed(*forms), sizes) == order


def test_tensor_parallelism_cuts_before_fsdp() -> None:
    # 7 rows, dp 3 x tp 2: the smallest case in which torch's own offsets are wrong.
    rows = {(dp, tp): held(7, ["_S(0,2)", "S(0)"], [3, 2], [dp, tp]) for dp, tp in GRID}
    assert rows == {
        (0, 0): [0, 1],
        (0, 1): [4],
        (1, 0): [2, 3],
        (1, 1): [5],
        (2, 0): [],
        (2, 1): [6],
    }


def test_the_index_reading_of_the_same_placements() -> None:
    rows = {(dp, tp): held(7, ["_S(0,2)", "S(0)"], [3, 2], [dp, tp], "index") for dp, tp in GRID}
    assert rows == {
        (0, 0): [0, 1],
        (0, 1): [4],
        (1, 0): [2, 3],
        (1, 1): [5],
        (2, 0): [6],
        (2, 1): [],
    }


@pytest.mark.parametrize(
    ("length", "factor", "ranks"),
    [
        (5, 2, [[0, 1, 3], [2, 4]]),
        (8, 2, [[0, 1, 4, 5], [2, 3, 6, 7]]),
        (9, 2, [[0, 1, 5], [2, 3, 6], [4, 7], [8]]),
        (3, 5, [[0, 1, 2], []]),
        (0, 2, [[], []]),
        (3, 10**17, [[0, 1, 2], [], []]),
    ],
)
def test_a_bare_strided_cut_takes_a_part_of_every_run(
    length: int, factor: int, ranks: list[list[int]]
) -> None:
    form, size = [f"_S(0,{factor})"], [len(ranks)]
    assert [held(length, form, size, [rank]) for rank in range(len(ranks))] == ranks


def test_an_empty_shard_lies_where_its_cut_ends() -> None:
    assert intervals(0, 2, parsed("S(0)"), [4], [3]) == (Interval(2, 0, 0),)
    nested = parsed("S(0)", "S(0)")
    for reading in READINGS:
        assert intervals(0, 3, nested, [2, 4], [0, 3], reading=reading) == (Interval(2, 0, 0),)
    over = parsed("_S(0,2)", "S(0)")
    assert intervals(0, 7, over, [3, 2], [2, 0], reading="order") == (Interval(4, 0, 0),)
    assert intervals(0, 7, over, [3, 2], [2, 1], reading="index") == (Interval(7, 0, 0),)


def test_one_dim_without_an_order_has_the_whole_tensor_read_by_index() -> None:
    # dim 0 alone would be read by order, but no order of cuts explains dim 1.
    placements = [Placement.parse(form, 2) for form in ("_S(0,2)", "S(0)", "_S(1,5)")]
    assert cutting_order(0, placements, [3, 2, 2]) == (1, 0)
    assert intervals(0, 7, placements, [3, 2, 2], [2, 0, 0]) == (Interval(6, 1, 0),)


def test_runs_lie_one_behind_the_other_in_the_local_dim() -> None:
    assert intervals(0, 9, parsed("_S(0,3)"), [2], [1]) == (
        Interval(2, 1, 0),
        Interval(5, 1, 1),
        Interval(8, 1, 2),
    )


def test_neighbouring_runs_are_one_interval() -> None:
    assert intervals(0, 8, parsed("_S(0,2)", "S(0)"), [2, 2], [0, 0], reading="index") == (
        Interval(0, 2, 0),
    )
    assert intervals(0, 4, parsed("_S(0,4)"), [1], [0]) == (Interval(0, 4, 0),)


@given(
    st.integers(0, 24),
    st.lists(
        st.tuples(st.sampled_from(["R", "S(0)", "_S(0,2)", "_S(0,3)"]), st.integers(1, 3)),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from(READINGS),
)
def test_the_ranks_of_a_mesh_share_the_dim_out(
    length: int, axes: list[tuple[str, int]], reading: Reading
) -> None:
    forms, sizes = [form for form, _ in axes], [size for _, size in axes]
    everything: list[int] = []
    replicas = 1
    places: list[list[int]] = [[]]
    for form, size in axes:
        places = [[*place, i] for place in places for i in range(size)]
        replicas *= size if form == "R" else 1
    for place in places:
        everything += held(length, forms, sizes, place, reading)
    assert sorted(everything) == sorted(list(range(length)) * replicas)
