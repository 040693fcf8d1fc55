"""What a state dict asks for, and what cannot be filled."""

from __future__ import annotations

import pytest
import torch

from ckptx import CheckpointPlanError
from ckptx.destination import layouts_here, tensors_of
from distcore.v1 import Layout, Piece, Region


def test_names_of_nested_dicts_are_joined() -> None:
    a, b = torch.ones(1), torch.nn.Parameter(torch.ones(2))
    found = tensors_of({"x": {"y": {"a": a}, "b": b}, "c": a})
    assert list(found) == ["x.y.a", "x.b", "c"]
    assert found["x.y.a"] is a
    assert found["x.b"] is b


class Wrapped(torch.Tensor):
    """A tensor whose values are somewhere else."""

    @classmethod
    def __torch_dispatch__(cls, *_: object) -> object:
        raise NotImplementedError


def test_all_that_cannot_be_filled_is_told_at_once() -> None:
    wrapped = torch.Tensor._make_wrapper_subclass(Wrapped, (2,))
    state: dict[str, object] = {
        "int": 3,
        "list": [torch.ones(1)],
        "meta": torch.ones(1, device="meta"),
        "shared": torch.ones(1, 3).expand(2, 3),
        "sparse": torch.ones(2, 2).to_sparse(),
        "wrapped": wrapped,
        "a.b": torch.ones(1),
        "a": {"b": torch.ones(1), 7: torch.ones(1)},
        "one": torch.ones(1).expand(1),
    }
    with pytest.raises(CheckpointPlanError) as caught:
        tensors_of(state)
    assert [(p.where, p.kind) for p in caught.value.problems] == [
        ("int", "leaf"),
        ("list", "leaf"),
        ("meta", "memory"),
        ("shared", "memory"),
        ("sparse", "memory"),
        ("wrapped", "type"),
        ("a.b", "duplicate"),
        ("a.7", "key"),
    ]


def test_a_plain_tensor_is_held_by_all_and_a_given_layout_counts() -> None:
    layout = Layout(shape=(4,), dtype="float32", pieces={2: (Piece(Region((1,), (3,)), (0,)),)})
    tensors = {"plain": torch.ones(3), "part": torch.ones(2)}
    found = layouts_here(tensors, {"part": layout}, 2, (0, 2))
    assert found["plain"] == Layout.replicated(shape=(3,), dtype="float32", ranks=(0, 2))
    assert found["part"] is layout


def test_a_given_layout_that_does_not_fit_is_told() -> None:
    layout = Layout(shape=(4,), dtype="float32", pieces={2: (Piece(Region((1,), (3,)), (0,)),)})
    tensors = {"long": torch.ones(3), "double": torch.ones(2).double(), "elsewhere": torch.ones(9)}
    given = {"long": layout, "double": layout, "none": layout}
    with pytest.raises(CheckpointPlanError) as caught:
        layouts_here(tensors, given, 2, (0, 2))
    assert [(p.where, p.kind) for p in caught.value.problems] == [
        ("none", "unknown"),
        ("long", "layout"),
        ("double", "layout"),
    ]
    assert layouts_here({"elsewhere": tensors["elsewhere"]}, {"elsewhere": layout}, 0, (0, 2))
