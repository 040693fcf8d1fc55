"""What other packages find under the role of a resharder."""

from __future__ import annotations

import pytest

from distcore.testing import check_resharder
from distcore.v1 import Layout, PlanError, Resharder, Transfer, providers


def test_the_provider_plans_in_one_stage() -> None:
    resharder: Resharder = providers("resharder")["reshard"].load()()
    src = Layout.from_mesh(shape=(4,), dtype="int8", mesh=[0, 1], placements=["S(0)"])
    dst = Layout.replicated(shape=(4,), dtype="int8", ranks=[2])
    plan = resharder.plan({"w": src}, {"w": dst})
    assert [(t.src, t.dst, t.region.start) for t in plan] == [(0, 2, (0,)), (1, 2, (2,))]
    assert isinstance(plan[0], Transfer)
    with pytest.raises(PlanError, match="v: has no destination"):
        resharder.plan({"v": src}, {})


def test_the_provider_keeps_the_contract() -> None:
    check_resharder(providers("resharder")["reshard"].load()())
