"""What a state dict asks for, and what cannot be filled."""

from __future__ import annotations

import pytest
import torch

from ckptx import CheckpointPlanError
from ckptx.destination import layouts_here, unfilled
from distcore.v1 import Layout, Piece, Region


class Wrapped(torch.Tensor):
    """A tensor whose values are somewhere else."""

    @classmethod
    def __torch_dispatch__(cls, *_: object) -> object:
        raise NotImplementedError


def test_all_that_cannot_be_filled_is_told_at_once() -> None:
    wrapped = torch.Tensor._make_wrapper_subclass(Wrapped, (2,))
    state = {
        "meta": torch.ones(1, device="meta"),
        "shared": torch.ones(1, 3).expand(2, 3),
        "sparse": torch.ones(2, 2).to_sparse(),
        "wrapped": wrapped,
        "one": torch.ones(1).expand(1),
    }
    assert [(p.where, p.kind) for p in unfilled(state)] == [
        ("meta", "memory"),
        ("shared", "memory"),
        ("sparse", "memory"),
        ("wrapped", "type"),
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
