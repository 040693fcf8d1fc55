"""Partial sources: who reduces what."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distcore.testing.strategies import placed_meshes, shapes
from distcore.v1 import Layout, Region
from reshard.partial import Reduction, gather_plan, owner_layout, slabs_of


def layout(shape: tuple[int, ...], mesh: list[list[int]], *placements: str) -> Layout:
    return Layout.from_mesh(shape=shape, dtype="float32", mesh=mesh, placements=placements)


def test_a_team_shares_the_work_by_rows() -> None:
    slabs = slabs_of(layout((5, 2), [[0, 1]], "R", "R"), (1,))
    assert {rank: (s.low, s.high, s.team) for rank, s in slabs.items()} == {
        0: (0, 2, (0, 1)),
        1: (2, 5, (0, 1)),
    }


def test_replicas_share_the_work_too() -> None:
    """Axis 0 repeats the summands, axis 1 is summed: each rank reduces a quarter, of its row."""
    slabs = slabs_of(layout((8,), [[0, 1], [2, 3]], "R", "R"), (1,))
    assert {rank: (s.low, s.high, s.team) for rank, s in slabs.items()} == {
        0: (0, 2, (0, 1)),
        1: (2, 4, (0, 1)),
        2: (4, 6, (2, 3)),
        3: (6, 8, (2, 3)),
    }
    moves = [(t.key, t.src, t.dst, t.region.start) for t in gather_plan({"w": slabs})]
    assert moves == [
        ("w\n1", 1, 0, (0,)),
        ("w\n0", 0, 1, (2,)),
        ("w\n3", 3, 2, (4,)),
        ("w\n2", 2, 3, (6,)),
    ]


@given(shape=shapes(), data=st.data())
def test_slabs_hold_every_element_once(shape: tuple[int, ...], data: st.DataObject) -> None:
    placed = data.draw(placed_meshes(len(shape)))
    whole = Layout.from_mesh(
        shape=shape, dtype="int8", mesh=placed.mesh, placements=placed.placements
    )
    repeated = [axis for axis, form in enumerate(placed.placements) if form == "R"]
    if not repeated:
        return
    slabs = slabs_of(whole, repeated[:1])
    owners = owner_layout(whole, slabs, "int8")
    count = torch.zeros(shape, dtype=torch.int64)
    for rank in owners.ranks:
        for piece in owners.pieces(rank):
            count[piece.region.slices()] += 1
            assert any(held.region.contains(piece.region) for held in whole.pieces(rank))
    assert count.numel() == 0 or count.min() == count.max() == 1


@pytest.mark.parametrize(
    ("op", "expected"),
    [("sum", [4.0, 6.0]), ("avg", [2.0, 3.0]), ("max", [3.0, 4.0]), ("min", [1.0, 2.0]),
     ("product", [3.0, 8.0])],
)  # fmt: skip
def test_reduce(op: str, expected: list[float]) -> None:
    slabs = slabs_of(layout((4,), [[0, 1]], "R", "R"), (1,))
    local = torch.tensor([1.0, 2.0, 9.0, 9.0])
    reduction = Reduction.of(slabs[0], local, op, "float32", 0)
    reduction.summands[1].copy_(torch.tensor([3.0, 4.0]))
    reduction.reduce()
    assert reduction.result.tolist() == expected


def test_few_bits_are_rounded_once() -> None:
    """256 + 1 + 1 is 258 in bfloat16; added up in bfloat16 it stays 256."""
    slabs = slabs_of(layout((3,), [[0, 1, 2]], "R", "R"), (1,))
    local = torch.tensor([256.0] * 3).bfloat16()
    reduction = Reduction.of(slabs[0], local, "sum", "bfloat16", 0)
    for summand in reduction.summands.values():
        summand.fill_(1)
    reduction.reduce()
    assert reduction.result.tolist() == [258.0]


def test_a_tensor_without_elements_has_one_empty_owner() -> None:
    empty = layout((0, 3), [[0, 1]], "R", "R")
    owners = owner_layout(empty, slabs_of(empty, (1,)), "float32")
    assert owners.ranks == (0,)
    assert owners.pieces(0)[0].region == Region((0, 0), (0, 0))
