"""Bounds: what no plan can go below."""

from __future__ import annotations

import pytest

from reshard.bounds import Demand


def test_what_is_missing_enters_each_rank_once() -> None:
    demand = Demand()
    demand.add((0, 1), (2, 3), 100)
    demand.add((0,), (3,), 50)
    demand.add((0,), (), 1000)
    bounds = demand.bounds()
    assert bounds.wire_bytes == 250
    assert bounds.max_ingress_bytes == 150
    # 200 bytes from 0 or 1, 50 from 0 alone: 125 each.
    assert bounds.max_egress_bytes == 125
    # Passed on by receivers, 100 and 50 leave the sources, and 4 ranks share 250 in all.
    assert bounds.relayed_egress_bytes == 75


def test_bounds_are_a_mapping() -> None:
    bounds = Demand().bounds()
    assert dict(bounds) == {
        "wire_bytes": 0,
        "max_ingress_bytes": 0,
        "max_egress_bytes": 0,
        "relayed_egress_bytes": 0,
    }
    with pytest.raises(KeyError):
        bounds["seconds"]
