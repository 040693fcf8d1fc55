"""Layout from a mesh: who holds what, what it refuses, and what equals what."""

from __future__ import annotations

import copy
from itertools import product
from math import prod

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distcore.v1 import Layout, Mesh, MeshForm, Piece, Placement, PlanError, Reading, Region

Array = npt.NDArray[np.int64]
READINGS: list[Reading] = ["order", "index"]


def layout(
    shape: tuple[int, ...], mesh: Mesh, placements: list[str], reading: Reading = "order"
) -> Layout:
    return Layout.from_mesh(
        shape=shape, dtype="float32", mesh=mesh, placements=placements, reading=reading
    )


def rows(made: Layout) -> dict[int, tuple[int, int]]:
    """Start and stop of the only piece of every rank, along dim 0."""
    regions = {rank: made.pieces(rank)[0].region for rank in made.ranks}
    return {rank: (region.start[0], region.stop[0]) for rank, region in regions.items()}


def local_of(made: Layout, rank: int) -> Array:
    """The local tensor of `rank` where the tensor holds 0, 1, 2, ...; -1 where no piece lies."""
    whole = np.arange(prod(made.shape)).reshape(made.shape)
    local = np.full(made.local_shape(rank), -1)
    for piece in made.pieces(rank):
        assert (local[piece.local.slices()] == -1).all(), "two pieces overlap"
        local[piece.local.slices()] = whole[piece.region.slices()]
    return local


def refused(error: pytest.ExceptionInfo[PlanError]) -> list[tuple[str, str]]:
    return [(problem.where, problem.kind) for problem in error.value.problems]


# --- from a mesh


def test_ten_rows_over_four_ranks() -> None:
    made = layout((10,), [0, 1, 2, 3], ["S(0)"])
    assert rows(made) == {0: (0, 3), 1: (3, 6), 2: (6, 9), 3: (9, 10)}


def test_five_rows_over_two_axes() -> None:
    made = layout((5,), [[0, 1], [2, 3]], ["S(0)", "S(0)"])
    assert rows(made) == {0: (0, 2), 1: (2, 3), 2: (3, 4), 3: (4, 5)}


def test_two_rows_over_four_ranks_leave_two_empty() -> None:
    made = layout((2,), [0, 1, 2, 3], ["S(0)"])
    assert rows(made) == {0: (0, 1), 1: (1, 2), 2: (2, 2), 3: (2, 2)}
    assert made.local_shape(3) == (0,)


def test_the_mesh_says_which_rank_comes_first() -> None:
    made = layout((4,), [1, 0], ["S(0)"])
    assert made.ranks == (1, 0)
    assert rows(made) == {1: (0, 2), 0: (2, 4)}


def test_seven_rows_under_fsdp_over_tensor_parallelism() -> None:
    made = layout((7, 2), [[0, 1], [2, 3], [4, 5]], ["_S(0,2)", "S(0)"])
    assert rows(made) == {0: (0, 2), 1: (4, 5), 2: (2, 4), 3: (5, 6), 4: (4, 4), 5: (6, 7)}
    assert [made.local_shape(rank) for rank in (4, 5)] == [(0, 2), (1, 2)]


def test_a_bare_strided_shard_is_several_pieces() -> None:
    made = layout((8, 3), [0, 1], ["_S(0,2)"])
    assert made.pieces(0) == (
        Piece(Region((0, 0), (2, 3)), (0, 0)),
        Piece(Region((4, 0), (6, 3)), (2, 0)),
    )
    assert made.local_shape(0) == (4, 3)
    five = layout((5,), [0, 1], ["_S(0,2)"])
    assert [local_of(five, rank).tolist() for rank in (0, 1)] == [[0, 1, 3], [2, 4]]


def test_dims_cut_by_different_axes_are_boxes() -> None:
    made = layout((4, 6), [[10, 11], [12, 13]], ["S(-1)", "S(0)"])
    assert made.pieces(12) == (Piece(Region((0, 3), (2, 6)), (0, 0)),)


def test_a_scalar_and_a_tensor_without_elements() -> None:
    scalar = layout((), [4, 7], ["R"])
    assert scalar.pieces(7) == (Piece(Region((), ()), ()),)
    assert (scalar.local_shape(7), scalar.nbytes) == ((), 4)
    nothing = layout((0, 4), [0, 1], ["S(1)"])
    assert (nothing.local_shape(1), nothing.nbytes) == ((0, 2), 0)


def test_an_empty_shard_keeps_the_local_shape_of_the_other_dims() -> None:
    made = layout((1, 8), [[0, 1], [2, 3]], ["S(0)", "_S(1,2)"])
    assert made.local_shape(2) == (0, 4)
    assert all(piece.region.is_empty for piece in made.pieces(2))


def test_replicated() -> None:
    made = Layout.replicated(shape=(3, 2), dtype="int8", ranks=(5, 2))
    assert made.ranks == (5, 2)
    assert made.pieces(5) == made.pieces(2) == (Piece(Region((0, 0), (3, 2)), (0, 0)),)


def test_form_says_what_it_was_made_from() -> None:
    made = layout((7,), [[0, 1, 2], [3, 4, 5]], ["R", "S(-1)"])
    expected = MeshForm(tuple(range(6)), (2, 3), (Placement(None), Placement(0)), "order")
    assert made.form == expected
    assert [expected.coordinates(at) for at in range(6)] == list(product(range(2), range(3)))


def test_the_text_of_a_layout_tells_every_mesh_apart() -> None:
    made = layout((7,), [[0, 1, 2], [8, 7, 5]], ["_S(0,3)", "S(0)"])
    assert repr(made) == (
        "Layout(shape=(7,), dtype='float32', mesh=(2, 3) over ranks 0-2,8,7,5, "
        "[_S(0,3), S(0)] by order)"
    )
    swapped = [*range(10), 11, 10, *range(12, 20)]
    assert repr(layout((7,), list(range(20)), ["R"])) != repr(layout((7,), swapped, ["R"]))


def test_ten_thousand_ranks_are_named_not_listed() -> None:
    made = layout((10**6,), list(range(10_000)), ["S(0)"])
    assert made.pieces(9_999)[0].region == Region((999_900,), (10**6,))
    assert len(repr(made)) < 200


axes = st.lists(
    st.tuples(
        st.integers(1, 3),
        st.sampled_from(["R", "S(0)", "S(1)", "S(-1)", "_S(0,2)", "_S(0,3)", "_S(1,2)", "_S(1,6)"]),
    ),
    min_size=1,
    max_size=3,
)


@given(st.tuples(st.integers(0, 9), st.integers(0, 9)), axes, st.sampled_from(READINGS))
def test_the_pieces_tile_every_local_tensor_and_cover_the_tensor(
    shape: tuple[int, int], axes: list[tuple[int, str]], reading: Reading
) -> None:
    sizes = [size for size, _ in axes]
    mesh: Mesh = np.arange(prod(sizes)).reshape(sizes).tolist()
    made = layout(shape, mesh, [form for _, form in axes], reading)
    replicas = prod(size for size, form in axes if form == "R")
    times = np.zeros(prod(shape), dtype=np.int64)
    for rank in made.ranks:
        local = local_of(made, rank)
        assert (local >= 0).all()
        times[local.ravel()] += 1
    assert (times == replicas).all()


@pytest.mark.parametrize(
    ("mesh", "placements", "problems"),
    [
        ([], ["R"], [("mesh", "mesh")]),
        ([[]], ["R", "R"], [("mesh", "mesh")]),
        ([[0], 1], ["R", "R"], [("mesh", "mesh")]),
        ([[0, 1], [2]], ["R", "R"], [("mesh", "mesh")]),
        (3, ["R"], [("mesh", "mesh")]),
        ("01", ["R"], [("mesh", "mesh")]),
        (["01", "23"], ["R", "R"], [("mesh", "type")]),
        ([0.5], ["R"], [("mesh", "type")]),
        ([True, 2], ["R"], [("mesh", "type")]),
        ([0, -1], ["R"], [("mesh", "ranks")]),
        ([0, 1, 0], ["R"], [("mesh", "ranks")]),
        ([0, 1], "R", [("placements", "type")]),
        ([0, 1], [], [("placements", "count")]),
        ([0, 1], ["R", "S(0)"], [("placements", "count")]),
        (
            [[0, 1]],
            ["S(2)", "P(sum)"],
            [("placements[0]", "placement"), ("placements[1]", "placement")],
        ),
    ],
)
def test_what_is_no_mesh_is_refused(
    mesh: Mesh, placements: list[str], problems: list[tuple[str, str]]
) -> None:
    with pytest.raises(PlanError) as caught:
        layout((4, 4), mesh, placements)
    assert refused(caught) == problems


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(PlanError, match=r"rank -1 .* rank 0 stands in it 2 times") as caught:
        layout((4,), [0, -1, 0], ["x", "S(4)"], "guess")  # type: ignore[arg-type]
    assert refused(caught) == [
        ("mesh", "ranks"),
        ("mesh", "ranks"),
        ("placements", "count"),
        ("placements[0]", "placement"),
        ("placements[1]", "placement"),
        ("reading", "reading"),
    ]


@pytest.mark.parametrize(
    ("shape", "dtype", "where"),
    [((-1,), "int8", "shape"), ((2.5,), "int8", "shape"), ((2,), "torch.int8", "dtype")],
)
def test_a_wrong_shape_or_dtype_is_refused(shape: tuple[int], dtype: str, where: str) -> None:
    with pytest.raises(PlanError) as caught:
        Layout.replicated(shape=shape, dtype=dtype, ranks=[0])
    assert [problem.where for problem in caught.value.problems] == [where]
    with pytest.raises(PlanError) as caught:
        Layout(shape=shape, dtype=dtype, pieces={0: [Piece(Region((0,), (1,)), (0,))]})
    assert [problem.where for problem in caught.value.problems] == [where]


def test_the_local_shape_of_a_rank_outside_is_refused() -> None:
    made = layout((4,), [0, 1], ["S(0)"])
    assert made.pieces(2) == ()
    with pytest.raises(PlanError, match="rank 2: not among the ranks 0-1 of"):
        made.local_shape(2)


# --- equality


def test_equal_layouts_from_different_meshes_hash_equal() -> None:
    flat, square = layout((4,), [0, 1], ["S(0)"]), layout((4,), [[0], [1]], ["S(0)", "R"])
    assert len({flat, square}) == 1
    even = [layout((8,), [[0, 1], [2, 3]], ["_S(0,2)", "S(0)"], r) for r in READINGS]
    assert len(set(even)) == 1


def test_layouts_that_differ_are_unequal() -> None:
    made = layout((4, 4), [0, 1], ["S(0)"])
    others = [
        layout((4, 4), [0, 1], ["S(1)"]),
        layout((4, 4), [1, 0], ["S(0)"]),
        layout((4, 4), [0, 2], ["S(0)"]),
        layout((4, 5), [0, 1], ["S(0)"]),
        Layout.from_mesh(shape=(4, 4), dtype="int32", mesh=[0, 1], placements=["S(0)"]),
        Layout(shape=(4, 4), dtype="float32", pieces={0: made.pieces(0), 1: made.pieces(0)}),
    ]
    assert made not in others
    assert made != "made"
    seven = [layout((7,), [[0, 1], [2, 3], [4, 5]], ["_S(0,2)", "S(0)"], r) for r in READINGS]
    assert seven[0] != seven[1]


def test_a_copy_is_equal() -> None:
    made = layout((7,), [0, 1], ["S(0)"])
    assert copy.deepcopy(made) == made
