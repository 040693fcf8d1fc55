"""Nested dicts as one flat dict."""

from __future__ import annotations

import pytest

from distcore.v1 import PlanError
from reshard.tree import flatten


def test_paths_are_joined_with_dots_in_the_order_of_the_dicts() -> None:
    tree = {"model": {"b": 1, "a": {0: 2}}, "step": 3, "nothing": None, "empty": {}}
    assert flatten(tree, "source") == {"model.b": 1, "model.a.0": 2, "step": 3}
    assert list(flatten(tree, "source")) == ["model.b", "model.a.0", "step"]


def test_a_leaf_alone_has_a_key() -> None:
    assert flatten(5, "source") == {"tensor": 5}
    assert flatten(None, "source") == {}


def test_two_leaves_of_one_path_are_refused() -> None:
    with pytest.raises(PlanError, match=r"a\.b: source: stands in the tree twice"):
        flatten({"a": {"b": 1}, "a.b": 2}, "source")
    with pytest.raises(PlanError, match=r"source: \(1,\) is neither a text nor a number"):
        flatten({(1,): 1}, "source")
