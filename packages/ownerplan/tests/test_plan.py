"""Owners over all groups at once: right values, proofs by brute force, errors."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from itertools import product
from math import prod
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ownerplan import GlobalLayout, Work, flop_cost_fn, ns_cost_fn, plan_owners, works_in_buffer
from ownerplan.report import Policy

POLICIES: tuple[Policy, ...] = ("joint", "greedy", "optimal")
each_policy = pytest.mark.parametrize("policy", POLICIES)


def area(shape: Sequence[int]) -> int:
    return prod(shape)


@each_policy
def test_no_groups_are_legal(policy: Policy) -> None:
    plan = plan_owners([], 3, policy=policy)
    assert (plan.owners, plan.makespan, plan.lower_bound, plan.ratio) == ((), 0, 0, 1.0)
    assert plan.loads == (0, 0, 0)
    assert plan.bytes_per_rank == (0, 0, 0)


@each_policy
def test_groups_without_items_keep_their_place(policy: Policy) -> None:
    plan = plan_owners([[], [(2, 2)], []], 2, policy=policy)
    assert plan.owners == ((), (0,), ())


def test_groups_even_out_only_together() -> None:
    groups = [[(4, 4), (2, 2)]] * 4
    alone = plan_owners(groups, 2, policy="greedy", cost_fn=area)
    joint = plan_owners(groups, 2, cost_fn=area)
    assert alone.owners == ((0, 1),) * 4
    assert (alone.loads, alone.makespan, alone.lower_bound) == ((64, 16), 64, 40)
    assert alone.ratio == 1.6
    assert (joint.loads, joint.ratio) == ((40, 40), 1.0)


def test_without_a_cost_function_five_newton_schulz_steps_count() -> None:
    plan = plan_owners([[(6, 4), (4, 4)]], 1)
    assert plan.costs == ((504, 336),)
    assert plan.makespan == 840


def test_the_largest_item_is_a_bound() -> None:
    plan = plan_owners([[(8, 8), (1, 1)]], 4, cost_fn=area)
    assert (plan.makespan, plan.lower_bound) == (64, 64)


def test_the_pigeonhole_bound_is_told() -> None:
    plan = plan_owners([[(1, 3)] * 3], 2, cost_fn=area)
    assert (plan.makespan, plan.lower_bound) == (6, 6)


def test_loads_from_before_count() -> None:
    plan = plan_owners([[(2, 2)]], 2, cost_fn=area, initial_load=[3, 0])
    assert plan.owners == ((1,),)
    assert plan.loads == (3, 4)


def test_any_rank_may_own_what_it_does_not_hold() -> None:
    """An owner need not have a shard: (1, 8) has one row, so one holder."""
    plan = plan_owners([[(1, 8), (1, 8)]], 2, cost_fn=area)
    assert plan.owners == ((0, 1),)
    assert plan_owners([[(1, 8), (1, 8)]], 2, cost_fn=area, candidates="holders").owners == (
        (0, 0),
    )


def test_candidates_are_kept() -> None:
    plan = plan_owners([[(2, 2), (2, 2)]], 3, cost_fn=area, candidates=[[[2], (1, 2)]])
    assert plan.owners == ((2, 1),)


def test_a_work_brings_its_own_candidates_and_cost() -> None:
    works = [Work((2, 2), candidates=(1,), cost=7), Work((2, 2))]
    plan = plan_owners([works], 2, cost_fn=area)
    assert plan.owners == ((1, 0),)
    assert plan.costs == ((7, 4),)


def test_work_of_one_buffer_is_taken_as_it_is() -> None:
    items = [
        SimpleNamespace(tensor_index=0, cost=5, candidates=[1]),
        SimpleNamespace(tensor_index=1, cost=5.5, candidates=[0, 1]),
    ]
    plan = plan_owners([items], 2)
    assert plan.owners == ((1, 0),)
    assert plan.total_bytes == 0
    assert plan_owners([items], 2, candidates="holders").owners == ((1, 0),)


def test_bytes_are_those_of_gather_and_scatter() -> None:
    """(5, 4) in rows over 4 ranks lies as 8, 8, 4, 0 elements."""
    plan = plan_owners([[(5, 4)]], 4, candidates=[[[3]]])
    assert plan.bytes_per_rank == (32, 32, 16, 80)
    assert plan.total_bytes == 160
    assert plan.bytes_lower_bound == 2 * 4 * (20 - 8)
    half = plan_owners([[(5, 4)]], 4, candidates=[[[3]]], dtype="bfloat16")
    assert half.bytes_per_rank == (16, 16, 8, 40)


def test_of_equal_makespans_the_one_with_fewer_bytes_is_chosen() -> None:
    """Both items cost the same, and each lies on the other rank than a tie would give."""
    works = [Work((2, 2), held=((1, 4),)), Work((2, 2), held=((0, 4),))]
    plan = plan_owners([works], 2)
    assert plan.owners == ((1, 0),)
    assert plan.total_bytes == plan.bytes_lower_bound == 0


def test_e6b_ties_are_broken_by_bytes() -> None:
    layout = GlobalLayout.build([(4, 8), (8, 8), (12, 8)], 3)
    works = works_in_buffer(layout, SimpleNamespace(mesh=[0, 1, 2]))
    plan = plan_owners([works], 3, candidates="holders")
    assert plan.owners == ((0, 0, 2),)
    assert plan.makespan == 3936
    assert plan.total_bytes == 4 * 2 * (32 + 32)
    greedy = plan_owners([works], 3, candidates="holders", policy="greedy")
    assert greedy.owners == ((0, 0, 1),)
    assert greedy.total_bytes == 4 * 2 * (32 + 64)


def test_e11_joint_and_optimal_reach_what_greedy_misses() -> None:
    layout = GlobalLayout.build([(4, 4), (3, 8), (4, 4), (3, 8)], 4)
    works = works_in_buffer(layout, SimpleNamespace(mesh=[0, 1, 2, 3]))
    spans = {
        policy: plan_owners([works], 4, candidates="holders", policy=policy).makespan
        for policy in POLICIES
    }
    assert spans == {"joint": 384, "greedy": 720, "optimal": 384}


def test_balance_is_by_cost_and_not_by_count() -> None:
    """With as many kinds of shapes as ranks, counting gives each rank one kind."""
    groups = [[(64, 64), (8, 8)]] * 6
    plan = plan_owners(groups, 2)
    assert plan.makespan == 3 * (ns_cost_fn(5)((64, 64)) + ns_cost_fn(5)((8, 8)))


def test_experts_of_their_own_balance_where_holders_could_not() -> None:
    """48 layers of 128 small experts in one buffer each: all ranks together reach the bound."""
    layers = [[(768, 2048)] * 128 for _ in range(4)]
    plan = plan_owners(layers, 64, cost_fn=flop_cost_fn(5))
    assert plan.ratio == 1.0


@each_policy
def test_the_same_input_gives_the_same_plan(policy: Policy) -> None:
    groups = [[(4, 4), (3, 8), (4, 4), (3, 8)]] * 5
    plans = [plan_owners(groups, 3, policy=policy) for _ in range(2)]
    assert plans[0] == plans[1]
    assert plans[0].digest == plans[1].digest
    assert len(plans[0].digest) == 32
    assert plans[0].digest != plan_owners(groups, 2, policy=policy).digest


def test_a_plan_is_written_as_json() -> None:
    plan = plan_owners([[(2, 2)]], 2, cost_fn=area)
    assert json.loads(plan.to_json()) == {
        "format": 1,
        "owners": [[0]],
        "costs": [[4]],
        "loads": [4, 0],
        "lower_bound": 4,
        "bytes_per_rank": [8, 8],
        "bytes_lower_bound": 16,
        "policy": "joint",
    }


def test_a_plan_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "load.png"
    plan_owners([[(2, 2)] * 3], 2).plot(str(path))
    assert path.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_a_plot_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'ownerplan\[cli\]'"):
        plan_owners([[(2, 2)]], 2).plot(str(tmp_path / "load.png"))


@pytest.mark.parametrize("num_ranks", [0, -1])
def test_there_must_be_a_rank(num_ranks: int) -> None:
    with pytest.raises(ValueError, match="num_ranks"):
        plan_owners([[(2, 2)]], num_ranks)


def test_what_is_no_item_is_refused() -> None:
    with pytest.raises(ValueError, match=r"item \(0, 1\): 3 is no shape"):
        plan_owners([[(2, 2), 3]], 2)  # type: ignore[list-item]


def test_candidates_must_be_ranks() -> None:
    with pytest.raises(ValueError, match=r"ranks \[2\] lie outside 0 to 1"):
        plan_owners([[(2, 2)]], 2, candidates=[[[2]]])
    with pytest.raises(ValueError, match="there is none"):
        plan_owners([[(0, 2)]], 2, candidates="holders")


def test_candidates_must_match_the_groups() -> None:
    with pytest.raises(ValueError, match=r"groups of \[1\] for groups of \[2\]"):
        plan_owners([[(2, 2)] * 2], 2, candidates=[[[0]]])


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="'best' is none of joint, greedy, optimal"):
        plan_owners([[(2, 2)]], 2, policy="best")  # type: ignore[arg-type]


def test_a_cost_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cost of item \(0, 0\)"):
        plan_owners([[(2, 2)]], 2, cost_fn=lambda shape: -1)


def test_planning_loads_no_torch() -> None:
    code = (
        "import sys, ownerplan; ownerplan.plan_owners([[(4, 4)]], 2); "
        "ownerplan.GlobalLayout.build([(4, 4)], 2); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


SMALL = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), max_size=3)


@given(groups=st.lists(SMALL, max_size=2), num_ranks=st.integers(1, 3), holders=st.booleans())
def test_optimal_is_the_least_and_never_worse(
    groups: list[list[tuple[int, int]]], num_ranks: int, holders: bool
) -> None:
    candidates = "holders" if holders else None
    plans = {
        policy: plan_owners(groups, num_ranks, cost_fn=area, policy=policy, candidates=candidates)  # type: ignore[arg-type]
        for policy in POLICIES
    }
    items = [shape for group in groups for shape in group]
    allowed = [
        [rank for rank in range(num_ranks) if not holders or holds(shape, rank, num_ranks)]
        for shape in items
    ]
    least = min(
        (
            max(
                sum(area(s) for s, owner in zip(items, owners, strict=True) if owner == rank)
                for rank in range(num_ranks)
            )
            for owners in product(*allowed)
        ),
        default=0,
    )
    assert plans["optimal"].makespan == least
    for plan in plans.values():
        assert least <= plan.makespan
        assert plan.lower_bound <= least
        flat = [owner for group in plan.owners for owner in group]
        assert all(owner in ranks for owner, ranks in zip(flat, allowed, strict=True))
    assert plans["joint"].makespan <= plans["greedy"].makespan


def holds(shape: tuple[int, int], rank: int, num_ranks: int) -> bool:
    chunk = -(-shape[0] // num_ranks)
    return rank * chunk < shape[0]
