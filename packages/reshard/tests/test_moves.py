"""Moves: many transfers at a time."""

from __future__ import annotations

from distcore.v1 import Plan, Region, Transfer
from reshard.moves import Moves

BOX, CELL = Region((0, 0), (2, 3)), Region((), ())


def made() -> Moves:
    moves = Moves()
    moves.add(2, BOX, 24, [1, 0], [5, 6])
    moves.add(0, CELL, 4, [3], [5])
    return moves


def test_a_plan_is_by_key_then_sender_then_receiver() -> None:
    assert made().plan(["a", "b", "c"]) == Plan(
        [Transfer("a", 3, 5, CELL), Transfer("c", 0, 6, BOX), Transfer("c", 1, 5, BOX)]
    )


def test_ranks_too_large_to_be_joined_are_ordered_all_the_same() -> None:
    moves = Moves()
    moves.add(0, CELL, 4, [1 << 40, 7], [1, 1 << 40])
    assert [(t.src, t.dst) for t in moves.plan(["a"])] == [(7, 1 << 40), (1 << 40, 1)]


def test_joined_has_both() -> None:
    other = Moves()
    other.add(1, CELL, 4, [9], [9])
    assert [t.key for t in Moves.joined(made(), other).plan(["a", "b", "c"])] == [
        "a",
        "b",
        "c",
        "c",
    ]
    assert len(Moves.joined(Moves(), Moves()).plan([])) == 0


def test_the_busiest_sender_and_receiver() -> None:
    assert made().busiest({}, 1) == (24, 28)
    nodes = {0: 0, 1: 0, 3: 0, 5: 0, 6: 1}
    assert made().busiest(nodes, 10) == (240, 240)
    assert Moves().busiest({}, 1) == (0, 0)
