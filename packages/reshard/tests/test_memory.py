"""Which tensors share bytes."""

from __future__ import annotations

import torch

from reshard.memory import is_same, shared


def pairs(ones: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> list[tuple[str, str]]:
    return sorted(shared(ones, others))


def test_views_share_where_they_overlap() -> None:
    whole = torch.zeros(10)
    ones = {"low": whole[:5], "high": whole[5:], "other": torch.zeros(3)}
    assert pairs(ones, {"middle": whole[4:6]}) == [("high", "middle"), ("low", "middle")]
    assert pairs(ones, {"first": whole[:4]}) == [("low", "first")]


def test_columns_side_by_side_are_apart() -> None:
    whole = torch.zeros(4, 4)
    left, right, across = whole[:, :2], whole[:, 2:], whole[:, 1:3]
    assert pairs({"left": left}, {"right": right}) == []
    assert pairs({"left": left}, {"across": across}) == [("left", "across")]


def test_other_element_sizes_count_as_shared() -> None:
    whole = torch.zeros(8)
    halves = whole.view(torch.int16)[::2]
    assert pairs({"a": whole[::2]}, {"b": halves}) == [("a", "b")]


def test_what_has_no_memory_shares_nothing() -> None:
    meta, empty = torch.zeros(4, device="meta"), torch.zeros(0)
    assert pairs({"meta": meta, "empty": empty}, {"meta": meta, "empty": empty}) == []


def test_the_same_elements() -> None:
    whole = torch.zeros(4, 4)
    assert is_same(whole[1], whole[1])
    assert not is_same(whole[1], whole[2])
    assert not is_same(whole, whole.t())
