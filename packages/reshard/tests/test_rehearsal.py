"""Rehearsal: what a plan does wrong is found."""

from __future__ import annotations

from dataclasses import replace

from distcore.v1 import Layout, Plan
from reshard import plan_reshard
from reshard.rehearsal import Rehearsal, rehearse

SRC = Layout.from_mesh(shape=(4, 2), dtype="bfloat16", mesh=[0, 1], placements=["S(0)"])
DST = Layout.from_mesh(shape=(4, 2), dtype="bfloat16", mesh=[1, 2], placements=["S(1)"])
PLAN = plan_reshard({"v": SRC, "w": SRC}, {"v": DST, "w": DST})


def test_a_right_plan_is_right() -> None:
    assert rehearse(PLAN, max_nbytes=1000) == Rehearsal(2, 2, 16, 0, ())


def test_what_a_plan_forgets_is_found() -> None:
    stage = Plan(t for t in PLAN.stages[0] if (t.key, t.src) != ("w", 1))
    broken = replace(PLAN, stages=(stage,))
    assert rehearse(broken, max_nbytes=1000).wrong == ("w",)


def test_what_is_too_large_is_left_out() -> None:
    assert rehearse(PLAN, max_nbytes=31) == Rehearsal(0, 0, 0, 2, ())
