"""Steps: the order in which an exchange goes through its tensors."""

from __future__ import annotations

from ckptx.steps import Step, steps_by_round, steps_by_tensor
from distcore.v1 import Plan, Region, Transfer


def plan(*rows: tuple[str, int, int]) -> Plan:
    return Plan([Transfer(key, src, dst, Region((0,), (1,))) for key, src, dst in rows])


def told(steps: list[Step]) -> list[list[str]]:
    return [[f"{t.key}{t.src}{t.dst}" for t in step] for step in steps]


ROWS = plan(("a", 0, 1), ("a", 0, 2), ("b", 0, 1), ("c", 1, 0), ("d", 1, 0), ("e", 2, 0))


def test_tensor_by_tensor() -> None:
    assert told(steps_by_tensor(ROWS)) == [["a01", "a02"], ["b01"], ["c10"], ["d10"], ["e20"]]


def test_rounds_take_one_tensor_of_each_loader_dtype_by_dtype() -> None:
    dtypes = {"a": "float32", "b": "float32", "c": "bfloat16", "d": "float32", "e": "float32"}
    assert told(steps_by_round(ROWS, dtypes)) == [["c10"], ["a01", "a02", "d10", "e20"], ["b01"]]


def test_nothing_to_move_is_no_step() -> None:
    assert steps_by_tensor(Plan()) == []
    assert steps_by_round(Plan(), {}) == []
