"""workload: orders, amounts and loads."""

from __future__ import annotations

from distcore.v1.assignment.workload import Workload


def test_orders_amounts_and_loads() -> None:
    work = Workload([1, 5, 5, 9], [1, 0, 1, 0], [(0, 1, 2), (2,)], [0, 0, 4])
    assert work.longest_first == [3, 1, 2, 0]
    assert work.tightest_first == [2, 0, 3, 1]
    assert work.amounts == [14, 6]
    assert work.loads([2, 1, 2, 0]) == [9, 5, 10]
