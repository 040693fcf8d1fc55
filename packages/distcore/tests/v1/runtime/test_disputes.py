"""Disputes: a plan as a table to compare, and the keys whose two ends differ in dtype."""

from __future__ import annotations

import json

from distcore.testing import rank_threads
from distcore.v1 import Channel, Plan, Region, Transfer
from distcore.v1.runtime.disputes import DTYPE_CODES, describe_plan, dtype_dispute

REGION = Region((0, 1), (4, 3))


def table_of(transfers: list[Transfer], options: str = "some") -> dict[str, str]:
    found = json.loads(describe_plan(Plan(transfers), options))
    assert isinstance(found, dict)
    return found


def test_a_plan_is_shown_by_key() -> None:
    table = table_of([Transfer("w", 0, dst, REGION) for dst in (1, 2, 3, 4)])
    assert list(table) == ["(options)", "w", "(order of the transfers)"]
    assert table["(options)"] == "some"
    shown = "0>1 [0, 1]-[4, 3], 0>2 [0, 1]-[4, 3], 0>3 [0, 1]-[4, 3], ...; "
    assert table["w"].startswith(f"4 transfers ({shown}")


def test_a_difference_in_any_transfer_shows_in_its_key_alone() -> None:
    alike = [Transfer(key, 0, 1, REGION) for key in "vw"] + [Transfer("w", 0, 1, REGION)] * 8
    other = [*alike[:-1], Transfer("w", 0, 1, Region((0, 1), (4, 2)))]
    one, two = table_of(alike), table_of(other)
    assert [key for key in one if one[key] != two[key]] == ["w"]


def test_another_order_shows_even_where_every_key_is_alike() -> None:
    a, b, c = (Transfer(key, 0, dst, REGION) for key, dst in (("v", 1), ("w", 1), ("v", 2)))
    one, two = table_of([a, b, c]), table_of([a, c, b])
    assert [key for key in one if one[key] != two[key]] == ["(order of the transfers)"]


def test_an_empty_plan_can_be_shown() -> None:
    assert list(table_of([])) == ["(options)", "(order of the transfers)"]


def test_codes_of_dtypes_fit_a_byte() -> None:
    assert DTYPE_CODES[""] == 0
    assert sorted(DTYPE_CODES.values()) == list(range(len(DTYPE_CODES)))
    assert len(DTYPE_CODES) < 256


def test_the_keys_whose_ends_differ_are_named() -> None:
    plan = Plan([Transfer(key, 0, 1, REGION) for key in "abc"] + [Transfer("b", 1, 1, REGION)])
    f32, i64 = DTYPE_CODES["float32"], DTYPE_CODES["int64"]
    rows = {0: bytes([f32, 0, f32, 0, i64, 0]), 1: bytes([0, f32, 0, i64, 0, i64]), 2: bytes(6)}

    def dispute(channel: Channel) -> dict[int, str]:
        return dict(dtype_dispute(plan, rows[channel.rank], channel).values)

    assert (
        rank_threads(3, dispute).values()
        == (
            {
                0: "'b' is float32 as a source",
                1: "'b' is int64 as a destination",
                2: "no part in it",
            },
        )
        * 3
    )
