"""Stats: what a plan moves, counted."""

from __future__ import annotations

import pytest

from distcore.v1 import Plan, Region, Transfer
from reshard import Stats

PLAN = Plan(
    [
        Transfer("w", 0, 0, Region((0, 0), (2, 2))),
        Transfer("w", 0, 1, Region((0, 0), (2, 3))),
        Transfer("w", 0, 2, Region((0, 0), (1, 1))),
        Transfer("s", 2, 1, Region((), ())),
    ]
)


def test_bytes_messages_peers_and_rounds() -> None:
    stats = Stats.of([PLAN, Plan()], {"w": 2, "s": 8})
    assert dict(stats) == {
        "wire_bytes": 22,
        "local_bytes": 8,
        "max_egress_bytes": 14,
        "max_ingress_bytes": 20,
        "messages": 3,
        "max_messages": 2,
        "max_peers": 2,
        "rounds": 2,
        "stages": 2,
    }
    assert all(type(value) is int for value in stats.values())
    with pytest.raises(KeyError):
        stats["seconds"]
