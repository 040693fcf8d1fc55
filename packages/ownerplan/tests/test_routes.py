"""Routes: what travels to an owner and back, and where it lies."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from distcore.v1 import Layout, Piece, PlanError, Region, Transfer
from ownerplan import FlatBuffer, GlobalLayout
from ownerplan.routes import LocalBox, Route, holders_of, local_box, plan_gather, plan_scatter


def on_mesh(shape: tuple[int, ...], mesh: object, placements: list[str]) -> Layout:
    return Layout.from_mesh(
        shape=shape,
        dtype="bfloat16",
        mesh=mesh,  # type: ignore[arg-type]
        placements=placements,
    )


def rows(start: int, stop: int, cols: int = 2) -> Region:
    return Region((start, 0), (stop, cols))


def route(key: str, layout: Layout, region: Region, owner: int) -> Route:
    return Route(key, region, holders_of(key, layout, region), owner)


ROWS = on_mesh((5, 2), [0, 1, 2, 3], ["S(0)"])


def test_shards_go_to_the_owner_and_back() -> None:
    """Chunks of two rows, of which the last rank has none."""
    one = route("w", ROWS, rows(0, 5), owner=1)
    there = plan_gather([one])
    assert list(there) == [
        Transfer("w", 0, 1, rows(0, 2)),
        Transfer("w", 1, 1, rows(2, 4)),
        Transfer("w", 2, 1, rows(4, 5)),
    ]
    assert [one.held_by(rank) for rank in range(4)] == [4, 4, 2, 0]
    assert plan_scatter([one]) == there.inverse()


def test_an_owner_need_not_hold_anything() -> None:
    there = plan_gather([route("w", ROWS, rows(0, 5), owner=3)])
    assert [transfer.dst for transfer in there] == [3, 3, 3]


def test_only_the_block_of_a_view_travels() -> None:
    there = plan_gather([route("v", ROWS, rows(3, 5), owner=0)])
    assert list(there) == [Transfer("v", 1, 0, rows(3, 4)), Transfer("v", 2, 0, rows(4, 5))]


def test_replicas_send_once_and_all_receive() -> None:
    """Each replica pair holds one half; the owner sends its own to itself."""
    layout = on_mesh((4, 2), [[0, 1], [2, 3]], ["R", "S(0)"])
    routes = [route("a", layout, rows(0, 4), owner=0), route("b", layout, rows(0, 4), owner=0)]
    assert [(t.key, t.src) for t in plan_gather(routes)] == [
        ("a", 0),
        ("a", 1),
        ("b", 0),
        ("b", 3),  # rank 1 has sent already
    ]
    back = plan_scatter(routes[:1])
    assert [(t.dst, t.region) for t in back] == [
        (0, rows(0, 2)),
        (2, rows(0, 2)),
        (1, rows(2, 4)),
        (3, rows(2, 4)),
    ]


def test_a_flat_buffer_travels_in_its_order() -> None:
    """The worked example of five ranks: tensor 1 has 12 elements on rank 1 and 4 on rank 2."""
    layout = GlobalLayout.build(((2, 6), (4, 4), (4, 4), (1, 2), (1, 6)), 5)
    flat = FlatBuffer(layout, SimpleNamespace(mesh=[0, 1, 2, 3, 4]))
    segments, matrices = flat.segments("bfloat16"), flat.matrices()
    owners = {0: 0, 1: 1, 2: 3, 3: 2, 4: 4}
    routes = [route(str(at), segments, m.region, owners[at]) for at, m in enumerate(matrices)]
    crossing = [t for t in plan_gather(routes) if t.src != t.dst]
    assert [(t.key, t.src, t.dst, t.region.numel) for t in crossing] == [
        ("1", 2, 1, 4),
        ("2", 2, 3, 4),
    ]


def test_elements_that_nobody_holds_are_found() -> None:
    layout = Layout(shape=(4, 2), dtype="bfloat16", pieces={0: [Piece(rows(0, 3), (0, 0))]})
    with pytest.raises(PlanError, match="hold 6 different elements"):
        plan_gather([route("w", layout, rows(0, 4), owner=0)])


def test_the_local_box_of_a_block() -> None:
    """Rank 1 has the rows 2 and 3; of the block from row 3 on it holds its second row."""
    found = local_box(ROWS, rows(3, 5), 1)
    assert found == LocalBox(rows(1, 2), (Piece(rows(3, 4), (0, 0)),))
    assert local_box(ROWS, rows(0, 2), 1) is None
    assert local_box(ROWS, rows(0, 5), 3) is None


def test_the_local_box_of_strided_pieces() -> None:
    layout = on_mesh((8, 2), [[0, 1], [2, 3]], ["_S(0,2)", "S(0)"])
    assert [piece.region for piece in layout.pieces(2)] == [rows(2, 4)]
    found = local_box(layout, rows(3, 8), 2)
    assert found == LocalBox(rows(1, 2), (Piece(rows(3, 4), (0, 0)),))


def test_pieces_with_a_gap_between_them_are_no_box() -> None:
    pieces = [Piece(rows(0, 1), (0, 0)), Piece(rows(1, 2), (2, 0))]
    layout = Layout(shape=(2, 2), dtype="bfloat16", pieces={0: pieces})
    with pytest.raises(PlanError, match="no box of its local tensor"):
        local_box(layout, rows(0, 2), 0)
