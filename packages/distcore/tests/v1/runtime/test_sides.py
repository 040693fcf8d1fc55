"""Sides: a rank's share of a plan, and all that is wrong with its tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from distcore.v1 import Piece, Plan, Region, Transfer
from distcore.v1.runtime import Shard
from distcore.v1.runtime.disputes import DTYPE_CODES
from distcore.v1.runtime.sides import Sides

REGION = Region((0, 0), (4, 3))
HALF = Region((0, 0), (2, 3))
PLAN = Plan(
    [
        Transfer("w", 0, 1, REGION),
        Transfer("w", 0, 2, HALF),
        Transfer("w", 0, 0, REGION),
        Transfer("v", 1, 0, HALF),
        Transfer("u", 1, 2, HALF),
        Transfer("w", 0, 1, REGION),
    ]
)


@dataclass
class Place:
    """What the sides ask of a channel."""

    rank: int
    ranks: tuple[int, ...] = (0, 1, 2)
    device: str = "cpu"


def sides_of(rank: int, sources: dict[str, Any], destinations: dict[str, Any]) -> Sides:
    channel: Any = Place(rank)
    return Sides.of(PLAN, channel, (sources, destinations))


def zeros(*keys: str, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    return {key: torch.zeros(4, 3, dtype=dtype) for key in keys}


def kinds(sides: Sides) -> list[tuple[str, str]]:
    return [(problem.where, problem.kind) for problem in sides.problems]


def test_a_rank_has_its_parts_by_peer() -> None:
    sides = sides_of(0, zeros("w"), zeros("w", "v"))
    assert [(part.key, part.region, part.nbytes) for part in sides.copies] == [("w", REGION, 48)]
    assert {peer: [part.nbytes for part in parts] for peer, parts in sides.sends.items()} == {
        1: [48, 48],
        2: [24],
    }
    assert {peer: [part.key for part in parts] for peer, parts in sides.receives.items()} == {
        1: ["v"]
    }
    assert sides.rows == ({1: [0, 5], 2: [1]}, {1: [3]})
    assert sides.problems == []
    assert sides.is_contiguous


def test_keys_that_the_rank_does_not_use_are_not_looked_at() -> None:
    assert sides_of(2, {"w": None}, {**zeros("w", "u"), "v": "nonsense"}).problems == []


def test_every_problem_is_found_at_once() -> None:
    sides = sides_of(0, {}, {"w": torch.zeros(3, 3), "v": [1]})
    assert kinds(sides) == [
        ("rank 0, 'w'", "missing"),
        ("rank 0, 'v'", "type"),
        ("rank 0, 'w'", "region"),
    ]


def test_a_part_that_is_not_contiguous_is_noticed() -> None:
    turned = torch.zeros(3, 4).t()
    assert not sides_of(0, {"w": turned}, zeros("w", "v")).is_contiguous
    # Of what stays on the rank it does not matter.
    sides = sides_of(0, zeros("w"), {"w": turned, "v": torch.zeros(4, 3)})
    assert sides.is_contiguous


def test_a_part_in_several_pieces_is_not_contiguous() -> None:
    pieces = (Piece(HALF, (0, 0)), Piece(Region((2, 0), (4, 3)), (2, 0)))
    shard = Shard(torch.zeros(4, 3), pieces)
    assert not sides_of(0, {"w": shard}, zeros("w", "v")).is_contiguous


def test_ranks_outside_the_group_are_named() -> None:
    channel: Any = Place(0, ranks=(0, 1))
    sides = Sides.of(PLAN, channel, (zeros("w"), zeros("w", "v")))
    assert kinds(sides) == [("rank 2", "rank")]


def test_a_copy_between_dtypes_is_a_problem() -> None:
    sides = sides_of(0, zeros("w"), {**zeros("w", dtype=torch.int32), **zeros("v")})
    assert kinds(sides) == [("rank 0, 'w'", "dtype")]


@pytest.mark.parametrize("shape", [(1, 3), (4, 1)])
def test_an_expanded_destination_is_a_problem_and_an_expanded_source_is_not(
    shape: tuple[int, int],
) -> None:
    expanded = {"w": torch.zeros(shape).expand(4, 3)}
    assert kinds(sides_of(0, expanded, zeros("w", "v"))) == []
    assert kinds(sides_of(0, zeros("w"), {**expanded, **zeros("v")})) == [("rank 0, 'w'", "stride")]
    one = {"w": torch.zeros(4, 3), "v": torch.zeros(4, 1).expand(4, 1)}
    assert "stride" not in dict(kinds(sides_of(0, zeros("w"), one))).values()


# Dtypes, which no rank can see of another


def balance(dtypes: dict[int, tuple[torch.dtype, torch.dtype]]) -> int:
    """The sum over all ranks, each with one dtype for its sources and one for destinations."""
    keys = ("u", "v", "w")
    total = 0
    for rank, (out, into) in dtypes.items():
        sides = sides_of(rank, zeros(*keys, dtype=out), zeros(*keys, dtype=into))
        total += sides.dtype_balance()
    return total % 2**64


def test_dtypes_that_fit_balance_to_zero() -> None:
    f32 = torch.float32
    assert balance(dict.fromkeys(range(3), (f32, f32))) == 0


@pytest.mark.parametrize("rank", range(3))
def test_a_dtype_that_differs_does_not(rank: int) -> None:
    f32, i32 = torch.float32, torch.int32
    dtypes = dict.fromkeys(range(3), (f32, f32))
    assert balance({**dtypes, rank: (f32, i32)}) != 0
    # Rank 2 sends nothing, so its sources' dtype says nothing.
    assert (balance({**dtypes, rank: (i32, f32)}) != 0) == (rank != 2)


def test_the_codes_of_a_rank_say_what_it_sends_and_receives() -> None:
    sides = sides_of(0, zeros("w", dtype=torch.int8), zeros("w", "v", dtype=torch.bool))
    f = DTYPE_CODES
    assert PLAN.keys == ("w", "v", "u")
    assert list(sides.dtypes(PLAN)) == [f["int8"], 0, 0, f["bool"], 0, 0]
