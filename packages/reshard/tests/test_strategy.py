"""Strategies: texts that say how a model lies on ranks."""

from __future__ import annotations

import pytest

from distcore.v1 import PlanError
from reshard.models import Model, Weight
from reshard.strategy import Strategy

MODEL = Model(
    {
        "embed": Weight((16, 4), 0),
        "layers.0.up": Weight((8, 4), 0, layer=0),
        "layers.1.down": Weight((4, 8), 1, layer=1),
        "layers.1.experts.3.up": Weight((8, 4), 0, layer=1, expert=3),
        "norm.weight": Weight((4,)),
    },
    num_layers=2,
    num_experts=4,
)


def held(text: str) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """The ranks of each tensor, and the local shape of the last."""
    layouts = Strategy.parse(text).layouts(MODEL)
    return {key: (one.ranks, one.local_shape(one.ranks[-1])) for key, one in layouts.items()}


def test_tensor_parallelism_cuts_the_dim_of_the_weight() -> None:
    found = held("dp=2,tp=2@4")
    assert found["embed"] == ((4, 5, 6, 7), (8, 4))
    assert found["layers.1.down"] == ((4, 5, 6, 7), (4, 4))
    assert found["norm.weight"] == ((4, 5, 6, 7), (4,))


def test_fsdp_cuts_after_tensor_parallelism() -> None:
    layout = Strategy.parse("fsdp=2,tp=2").layouts(MODEL)["embed"]
    assert [layout.pieces(rank)[0].region.start[0] for rank in range(4)] == [0, 8, 4, 12]


def test_layers_and_experts_have_owners() -> None:
    found = held("pp=2,ep=2,fsdp=2")
    assert found["embed"] == ((0, 1, 2, 3), (8, 4))
    assert found["layers.0.up"] == ((0, 1, 2, 3), (4, 4))
    assert found["layers.1.experts.3.up"] == ((6, 7), (4, 4))
    assert found["norm.weight"] == ((4, 5, 6, 7), (2,))


def test_an_owner_alone_is_a_mesh_of_one() -> None:
    assert held("ep=4")["layers.1.experts.3.up"] == ((3,), (8, 4))


@pytest.mark.parametrize("text", ["", "tp", "tp=0", "tp=2,tp=2", "cp=2", "tp=2@x", "tp=2 "])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(PlanError):
        Strategy.parse(text)
