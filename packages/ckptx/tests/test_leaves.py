"""leaves: keys as torch's distributed checkpoint names them, and values that can be replaced."""

from __future__ import annotations

from types import MappingProxyType

import pytest
import torch

from ckptx import CheckpointPlanError
from ckptx.leaves import leaves_of


def test_names_of_nested_dicts_are_joined() -> None:
    a, b = torch.ones(1), torch.nn.Parameter(torch.ones(2))
    found = leaves_of({"x": {"y": {"a": a}, "b": b}, "c": a})
    assert list(found.tensors) == ["x.y.a", "x.b", "c"]
    assert found.tensors["x.y.a"] is a
    assert found.tensors["x.b"] is b
    assert found.paths["x.y.a"] == ("x", "y", "a")


def test_an_optimizers_state() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight], lr=0.5)
    weight.grad = torch.ones(2)
    optimizer.step()
    state = optimizer.state_dict()
    found = leaves_of({"optimizer": state})
    assert set(found.tensors) == {
        f"optimizer.state.0.{n}" for n in ("step", "exp_avg", "exp_avg_sq")
    }
    assert found.values["optimizer.param_groups.0.lr"] == 0.5
    assert found.values["optimizer.param_groups.0.betas"] == (0.9, 0.999)
    assert found.values["optimizer.param_groups.0.params"] == [0]
    assert found.paths["optimizer.param_groups.0.lr"] == ("optimizer", "param_groups", 0, "lr")
    found.slots["optimizer.param_groups.0.lr"].put(0.25)
    assert state["param_groups"][0]["lr"] == 0.25


def test_lists_are_entered_where_they_have_tensors() -> None:
    found = leaves_of({"a": [1, 2], "b": [torch.ones(1), 3], "c": [[{"x": 1}]], "d": {}, "e": []})
    assert list(found.tensors) == ["b.0"]
    assert found.values == {"a": [1, 2], "b.1": 3, "c.0.0.x": 1, "e": []}


def test_two_entries_of_one_name() -> None:
    state = {"a.b": torch.ones(1), "a": {"b": 1}, "c": {1: 2, "1": 3}}
    with pytest.raises(CheckpointPlanError) as caught:
        leaves_of(state)
    assert [(p.where, p.kind) for p in caught.value.problems] == [
        ("a.b", "duplicate"),
        ("c.1", "duplicate"),
    ]


def test_what_cannot_be_changed_says_so() -> None:
    found = leaves_of({"a": MappingProxyType({"b": 1})})
    with pytest.raises(TypeError, match="a mappingproxy cannot be changed"):
        found.slots["a.b"].put(2)
