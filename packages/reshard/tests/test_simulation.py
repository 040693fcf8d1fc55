"""Simulate plays a plan as it stands, right or wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from distcore.v1 import Layout, Plan, PlanError
from reshard import Options, ReshardPlan, plan_reshard, simulate

FULL = {"w": torch.arange(8.0).reshape(4, 2), "s": torch.tensor(3)}
SRC = {
    "w": Layout.from_mesh(shape=(4, 2), dtype="float32", mesh=[0, 1], placements=["S(0)"]),
    "s": Layout.replicated(shape=(), dtype="int64", ranks=[0]),
}
DST = {
    "w": Layout.from_mesh(shape=(4, 2), dtype="float32", mesh=[3, 2], placements=["S(1)"]),
    "s": Layout.replicated(shape=(), dtype="int64", ranks=[2, 1, 0]),
}


@pytest.mark.parametrize("options", [Options(), Options(fan_out="stripe", stripe_nbytes=1)])
def test_every_rank_holds_its_part(options: Options) -> None:
    made = simulate(plan_reshard(SRC, DST, options=options), FULL)
    assert made[3]["w"].tolist() == [[0.0], [2.0], [4.0], [6.0]]
    assert made[2]["w"].tolist() == [[1.0], [3.0], [5.0], [7.0]]
    assert [made[rank]["s"].item() for rank in (0, 1, 2)] == [3, 3, 3]


def test_a_plan_read_back_plays_the_same() -> None:
    plan = plan_reshard(SRC, DST)
    again = simulate(ReshardPlan.from_json(plan.to_json()), FULL)
    for rank, tensors in simulate(plan, FULL).items():
        for key, tensor in tensors.items():
            assert torch.equal(again[rank][key], tensor)


def test_what_a_plan_forgets_stays_zero() -> None:
    plan = plan_reshard(SRC, DST)
    broken = replace(plan, stages=(Plan(t for t in plan.stages[0] if t.src != 1),))
    assert simulate(broken, FULL)[3]["w"].tolist() == [[0.0], [2.0], [0.0], [0.0]]


def test_an_alias_is_its_original() -> None:
    src, dst = ({"a": side["w"], "b": side["w"]} for side in (SRC, DST))
    plan = plan_reshard(src, dst, aliases={"b": "a"})
    made = simulate(plan, {"a": FULL["w"], "b": FULL["w"]})
    assert made[3]["a"] is made[3]["b"]


def test_tensors_that_do_not_fit_are_refused() -> None:
    plan = plan_reshard(SRC, DST)
    with pytest.raises(PlanError, match="w: no tensor of this name was given"):
        simulate(plan, {"s": FULL["s"]})
    with pytest.raises(PlanError, match=r"w: expected shape \(4, 2\), got \(2, 4\)"):
        simulate(plan, {**FULL, "w": FULL["w"].t()})
