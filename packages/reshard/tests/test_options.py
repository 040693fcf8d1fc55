"""Options refuse what makes no plan."""

from __future__ import annotations

from typing import Any

import pytest

from distcore.v1 import PlanError
from reshard import Options


@pytest.mark.parametrize(
    "wrong",
    [
        {"quantum_nbytes": 0},
        {"stripe_nbytes": 0},
        {"fan_out": "broadcast"},
        {"node_cost": 0.5},
        {"max_peers": 0},
    ],
)
def test_what_makes_no_plan_is_refused(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(PlanError) as caught:
        Options(**wrong)
    assert [problem.where for problem in caught.value.problems] == [name]
