"""Rosters: records of all ranks held against each other, without ranks."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from distcore.v1 import DisagreementError, Layout, PlanError, describe_layout
from reshard.records import Record, Row
from reshard.roster import merge, wire_dtype


def form(mesh: list[int], placement: str, reading: str = "order") -> str:
    table = {"format": 1, "ranks": mesh, "mesh": [len(mesh)], "placements": [placement]}
    return json.dumps(table | {"reading": reading})


ROW = Row("w", (5,), "float32", form([0, 1], "S(0)"), (), "", "", has_values=True)
PLAIN = replace(ROW, form=None)


def record(ranks: tuple[int, ...], src: list[Row], dst: list[Row], terms: str = "") -> Record:
    return Record(ranks, terms, tuple(src), tuple(dst))


def test_plain_tensors_are_whole_on_all_who_give_them() -> None:
    records = [record((0, 1), [ROW], [PLAIN]), record((2,), [], [PLAIN])]
    roster = merge(records, (0, 1, 2), casts={})
    assert roster.src.layouts["w"].ranks == (0, 1)
    assert roster.dst.layouts["w"] == Layout.replicated(
        shape=(5,), dtype="float32", ranks=(0, 1, 2)
    )
    assert roster.has_values


def test_one_rank_that_fits_only_the_reading_by_index_decides() -> None:
    """pytorch#168134: which reading torch followed shows in the local shapes of all ranks."""
    rows = [replace(ROW, form=form([0, 1], "_S(0,2)", reading)) for reading in ("order", "index")]
    records = [record((0,), [rows[0]], [PLAIN]), record((1,), [rows[1]], [PLAIN])]
    layout = merge(records, (0, 1), casts={}).src.layouts["w"]
    assert describe_layout(layout)["reading"] == "index"


def test_ranks_that_are_missing_are_named() -> None:
    records = [record((0,), [ROW], [PLAIN]), record((1,), [], [PLAIN])]
    with pytest.raises(PlanError, match="w: rank 1 is in the mesh of the source, but gives no"):
        merge(records, (0, 1), casts={})
    with pytest.raises(PlanError, match=r"rank 1 is in the mesh .* not in the group of \[0\]"):
        merge(records[:1], (0,), casts={})


def test_what_ranks_describe_differently_is_shown_per_rank() -> None:
    other = replace(ROW, shape=(6,))
    records = [record((0,), [ROW], [PLAIN]), record((1,), [other], [PLAIN])]
    with pytest.raises(DisagreementError) as caught:
        merge(records, (0, 1), casts={})
    assert caught.value.label == "the source of 'w'"
    assert caught.value.values[0].startswith("w: float32 [5], mesh [2] of ranks [0, 1]")
    assert caught.value.values[1].startswith("w: float32 [6]")


def test_options_are_compared_first() -> None:
    records = [record((0,), [], [], "a"), record((1,), [], [], "b")]
    with pytest.raises(DisagreementError, match="'reshard options': rank 0: a; rank 1: b"):
        merge(records, (0, 1), casts={})


def test_dtypes_may_differ_where_that_is_allowed() -> None:
    records = [record((0, 1), [ROW], [replace(PLAIN, dtype="int8")])]
    with pytest.raises(PlanError, match="the destination int8"):
        merge(records, (0, 1), casts={"*": True, "w": False})
    assert merge(records, (0, 1), casts={"w": True}).dst.layouts["w"].dtype == "int8"


def test_a_partial_destination_is_refused() -> None:
    partial = replace(ROW, form=form([0, 1], "R"), partial=(0,), op="sum")
    with pytest.raises(PlanError, match="w: a destination cannot be partial"):
        merge([record((0, 1), [ROW], [partial])], (0, 1), casts={})


@pytest.mark.parametrize(
    ("src", "dst", "wire"),
    [
        ("float32", "bfloat16", "bfloat16"),
        ("bfloat16", "float32", "bfloat16"),
        ("float16", "bfloat16", "bfloat16"),
    ],
)
def test_the_narrower_dtype_travels(src: str, dst: str, wire: str) -> None:
    assert wire_dtype(src, dst) == wire
