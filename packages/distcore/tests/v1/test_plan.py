"""Plan: a sequence of Transfers, its JSON form, its digest, its inverse, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from array import array
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distcore.v1 import Columns, Plan, PlanError, Region, Transfer

WEIGHT = Transfer("w", 0, 1, Region((0, 2), (4, 6)))
SCALAR = Transfer("step", 3, 3, Region((), ()))
EMPTY = Transfer("b", 2, 0, Region((5,), (5,)))
THREE = [WEIGHT, SCALAR, EMPTY]

NDIMS = {"a": 0, "b": 1, "layers.0.weight": 2, "": 3}


@st.composite
def transfer(draw: st.DrawFn) -> Transfer:
    key = draw(st.sampled_from(sorted(NDIMS)))
    corners = draw(st.tuples(*[st.tuples(st.integers(0, 9), st.integers(0, 9))] * NDIMS[key]))
    region = Region(tuple(map(min, corners)), tuple(map(max, corners)))
    return Transfer(key, draw(st.integers(0, 5)), draw(st.integers(0, 5)), region)


transfers = st.lists(transfer(), max_size=8)


def refused(error: pytest.ExceptionInfo[PlanError]) -> list[tuple[str, str]]:
    return [(problem.where, problem.kind) for problem in error.value.problems]


# --- one transfer


def test_a_transfer_of_numpy_ints_is_the_same_transfer() -> None:
    made = Transfer("w", np.int64(0), np.int32(1), Region(np.array([0, 2]), (4, 6)))  # type: ignore[arg-type]
    assert made == WEIGHT
    assert [type(rank) for rank in (made.src, made.dst)] == [int, int]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"key": 5}, ("key", "type")),
        ({"key": b"w"}, ("key", "type")),
        ({"src": -1}, ("w", "range")),
        ({"dst": -2}, ("w", "range")),
        ({"src": True}, ("src", "type")),
        ({"dst": 1.0}, ("dst", "type")),
        ({"region": ((0,), (1,))}, ("region", "type")),
        ({"region": Region((-1,), (1,))}, ("w", "range")),
    ],
)
def test_a_wrong_transfer_is_refused(fields: dict[str, object], problem: tuple[str, str]) -> None:
    with pytest.raises(PlanError) as caught:
        replace(WEIGHT, **fields)  # type: ignore[arg-type]
    assert refused(caught) == [problem]


# --- a sequence


def test_a_plan_is_a_sequence_of_transfers() -> None:
    plan = Plan(THREE)
    assert len(plan) == 3
    assert list(plan) == THREE
    assert list(reversed(plan)) == THREE[::-1]
    assert [plan[0], plan[-1], plan[np.int64(1)]] == [WEIGHT, EMPTY, SCALAR]  # type: ignore[call-overload]
    assert plan[-3] == WEIGHT
    assert plan[1:] == (SCALAR, EMPTY)
    assert plan[::-2] == (EMPTY, WEIGHT)
    assert plan[5:] == ()
    assert SCALAR in plan
    assert replace(SCALAR, src=4) not in plan
    assert "w" not in plan  # type: ignore[comparison-overlap]
    assert (plan.index(EMPTY), plan.count(WEIGHT)) == (2, 1)


@pytest.mark.parametrize("at", [3, -4, 10**30])
def test_an_index_outside_is_an_index_error(at: int) -> None:
    with pytest.raises(IndexError, match="of 3"):
        Plan(THREE)[at]


def test_keys_are_in_order_of_appearance_and_ranks_ascend() -> None:
    plan = Plan([*THREE, WEIGHT])
    assert plan.keys == ("w", "step", "b")
    assert plan.ranks == (0, 1, 2, 3)


def test_a_plan_without_transfers() -> None:
    plan = Plan()
    assert (list(plan), plan.keys, plan.ranks) == ([], (), ())
    assert plan == Plan(iter(())) == Plan.from_json(plan.to_json()) == plan.inverse()
    assert not plan


def test_a_plan_can_be_made_of_a_plan_or_of_a_generator() -> None:
    plan = Plan(THREE)
    assert Plan(plan) == Plan(one for one in THREE) == plan


def test_the_text_of_a_large_plan_is_short() -> None:
    assert len(repr(Plan(THREE * 1000))) < 100


def strangers() -> Iterator[object]:
    yield WEIGHT
    yield ("w", 0, 1, WEIGHT.region)
    yield None
    yield Transfer("w", 0, 1, Region((0,), (1,)))


def test_every_stranger_among_the_transfers_is_named() -> None:
    with pytest.raises(PlanError, match=r"transfer 1: .* is a tuple, not a Transfer") as caught:
        Plan(strangers())  # type: ignore[arg-type]
    assert refused(caught) == [("transfer 1", "type"), ("transfer 2", "type"), ("w", "ndim")]


def test_a_number_beyond_64_bits_is_refused() -> None:
    with pytest.raises(PlanError, match="64 bits") as caught:
        Plan([Transfer("w", 0, 1, Region((0,), (2**63,)))])
    assert refused(caught) == [("w", "range")]


# --- digest and inverse


def test_the_digest_is_the_same_on_every_machine() -> None:
    assert Plan(THREE).digest == "e9551573a986ac946168467532d5bd6a"


@given(transfers, transfers)
def test_digests_are_equal_exactly_for_equal_transfers(
    some: list[Transfer], others: list[Transfer]
) -> None:
    one, other = Plan(some), Plan(others)
    assert (one.digest == other.digest) == (some == others)
    assert (one == other) == (some == others)
    assert Plan(list(some)).digest == one.digest
    assert hash(Plan(list(some))) == hash(one)


@given(transfers.filter(bool), st.data())
def test_any_one_change_changes_the_digest(some: list[Transfer], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(some) - 1))
    old = some[at]
    grown = tuple(n + 1 for n in old.region.stop)
    for new in (
        replace(old, src=old.src + 1),
        replace(old, dst=old.dst + 1),
        replace(old, key=old.key + ".x", region=Region((), ())),
        replace(old, region=Region(old.region.start, grown)),
    ):
        changed = Plan([*some[:at], new, *some[at + 1 :]])
        assert (changed.digest == Plan(some).digest) == (new == old)


@given(transfers)
def test_the_inverse_sends_everything_back(some: list[Transfer]) -> None:
    plan = Plan(some)
    back = plan.inverse()
    assert list(back) == [replace(one, src=one.dst, dst=one.src) for one in some]
    assert back.inverse() == plan


def test_a_plan_is_no_tuple() -> None:
    assert Plan(THREE) != tuple(THREE)
    assert Plan(THREE) != Plan(THREE).digest


# --- the JSON form (the corpus in tests/conformance holds the right and wrong texts)


@given(transfers)
def test_the_json_form_comes_back_equal(some: list[Transfer]) -> None:
    plan = Plan(some)
    again = Plan.from_json(plan.to_json())
    assert list(again) == some
    assert (again.digest, again.keys) == (plan.digest, plan.keys)


@pytest.mark.parametrize("key", ["", "a.b/c", 'quo"te\\', "\n\x00", "\u00e9\U0001f600", "\ud800"])
def test_a_key_may_be_any_text(key: str) -> None:
    plan = Plan([replace(WEIGHT, key=key)])
    again = Plan.from_json(plan.to_json())
    assert (again.keys, again.digest) == ((key,), plan.digest)
    assert plan.to_json().isascii()


def test_the_json_form_is_read_from_bytes_too() -> None:
    plan = Plan(THREE)
    assert Plan.from_json(plan.to_json().encode()) == plan  # type: ignore[arg-type]


def test_a_text_of_a_thousand_problems_names_some_and_counts_the_rest() -> None:
    table = json.loads(Plan([EMPTY] * 1000).to_json())
    table["coords"] = [5, 4] * 1000
    with pytest.raises(PlanError, match=r"transfer 0: start behind stop.* and 980 more") as caught:
        Plan.from_json(json.dumps(table))
    assert len(caught.value.problems) == 1000


# --- columns


def columns(**changed: object) -> Columns:
    return replace(Plan(THREE).columns, **changed)  # type: ignore[arg-type]


def ints(*values: int) -> array[int]:
    return array("q", values)


def test_columns_hold_the_table() -> None:
    assert Plan(THREE).columns == Columns(
        keys=("w", "step", "b"),
        key=ints(0, 1, 2),
        src=ints(0, 3, 2),
        dst=ints(1, 3, 0),
        at=ints(0, 4, 4, 6),
        coords=ints(0, 2, 4, 6, 5, 5),
    )
    assert Plan.from_columns(columns()) == Plan(THREE)


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"keys": ["w", "step", "b"]}, ("keys", "type")),
        ({"keys": ("w", "step", 3)}, ("keys", "type")),
        ({"keys": ("w", "step", "w")}, ("keys", "duplicate")),
        ({"keys": ("w", "step", "b", "c")}, ("keys", "order")),
        ({"keys": ("w", "step")}, ("key", "range")),
        ({"key": ints(1, 0, 2)}, ("keys", "order")),
        ({"key": ints(0, 1)}, ("src", "length")),
        ({"src": [0, 3, 2]}, ("src", "type")),
        ({"src": array("i", [0, 3, 2])}, ("src", "type")),
        ({"src": ints(0, 3)}, ("src", "length")),
        ({"dst": ints(1, 3, 0, 0)}, ("dst", "length")),
        ({"dst": ints(1, -3, 0)}, ("dst", "range")),
        ({"at": ints(0, 4, 4)}, ("at", "length")),
        ({"at": ints(1, 4, 4, 6)}, ("at", "length")),
        ({"at": ints(0, 4, 4, 5)}, ("at", "length")),
        ({"at": ints(0, 3, 4, 6)}, ("w", "ndim")),
        ({"at": ints(0, 6, 4, 6)}, ("step", "ndim")),
        ({"coords": ints(0, 2, 4, 1, 5, 5)}, ("w", "region")),
        ({"coords": ints(0, -2, 4, 6, 5, 5)}, ("w", "range")),
    ],
)
def test_wrong_columns_are_refused(changed: dict[str, object], problem: tuple[str, str]) -> None:
    with pytest.raises(PlanError) as caught:
        Plan.from_columns(columns(**changed))
    assert refused(caught)[0] == problem


def test_a_key_whose_rows_differ_in_dims_is_refused() -> None:
    with pytest.raises(PlanError, match="transfer 1 has 0 dims, an earlier one") as caught:
        Plan.from_columns(
            Columns(("w",), ints(0, 0), ints(0, 0), ints(1, 1), ints(0, 2, 2), ints(0, 4))
        )
    assert refused(caught) == [("w", "ndim")]


# --- scale

A_MILLION = """
import json, resource
from distcore.v1 import Plan, Region, Transfer

def made():
    for i in range(1_000_000):
        yield Transfer(f"layers.{i % 1000}", i % 64, (i + 1) % 64, Region((i, 0), (i + 4, 4096)))

def cpu_s():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime

before = cpu_s()
plan = Plan(made())
digest, back = plan.digest, plan.inverse().digest
seconds = cpu_s() - before
assert digest != back
assert Plan.from_json(plan.to_json()).digest == digest
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"transfers": len(plan), "cpu_s": seconds, "peak_kib": peak}))
"""


def test_a_million_transfers_take_under_ten_seconds_and_one_gib() -> None:
    # Processor time, not time on the clock: other tests may share the machine.
    done = subprocess.run([sys.executable, "-c", A_MILLION], capture_output=True, check=True)
    found = json.loads(done.stdout)
    assert found["transfers"] == 1_000_000
    assert found["cpu_s"] < 10
    assert found["peak_kib"] < 2**20
