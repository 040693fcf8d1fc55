"""distributed_forward_loop: the whole model on every batch, caching off, nothing left behind."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from distcore.forward_loop import caching_disabled, distributed_forward_loop, moved
from distcore.model import DistributionPlan, set_distribution_plan
from distcore.v1.errors import PlanError

Seen = tuple[tuple[Any, ...], dict[str, Any]]


class Model(nn.Module):
    """Records what it is called with, and the state of things while it runs."""

    def __init__(self, config: object = None) -> None:
        super().__init__()
        self.expert = nn.Linear(2, 2)
        self.config = config
        self.seen: list[Seen] = []
        self.caching: list[object] = []
        self.grads: list[bool] = []

    def forward(self, *args: Any, **kwargs: Any) -> None:
        self.seen.append((args, kwargs))
        self.caching.append(getattr(self.config, "use_cache", None))
        self.grads.append(torch.is_grad_enabled())


class Mesh:
    """As much of a device mesh as is asked for."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def size(self) -> int:
        return self.ranks


def expert_parallel() -> Model:
    model = Model()
    set_distribution_plan(model, DistributionPlan(8, 4))
    return model


def test_each_kind_of_batch_is_handed_over_as_it_is_meant() -> None:
    x, y = torch.zeros(1), torch.ones(1)
    model = Model()
    loop = distributed_forward_loop(model, [{"x": x}, UserDict(x=x), (x, y), [y], x, "text"])
    loop(nn.Linear(1, 1))
    assert model.seen == [
        ((), {"x": x}),
        ((), {"x": x}),
        ((x, y), {}),
        ((y,), {}),
        ((x,), {}),
        (("text",), {}),
    ]


def test_the_argument_is_ignored_and_the_captured_model_runs() -> None:
    model, inner = Model(), Model()
    loop = distributed_forward_loop(model, [torch.zeros(1)])
    loop(inner)
    loop(None)
    assert (len(model.seen), len(inner.seen)) == (2, 0)


def test_the_module_is_called_with_its_hooks_and_without_gradients() -> None:
    model = Model()
    hooked: list[nn.Module] = []
    model.register_forward_pre_hook(lambda module, args: hooked.append(module))
    distributed_forward_loop(model, [torch.zeros(1)])(None)
    assert hooked == [model]
    assert model.grads == [False]
    assert torch.is_grad_enabled()


class Pair(NamedTuple):
    left: torch.Tensor
    right: int


def test_everything_in_a_batch_moves() -> None:
    x = torch.zeros(1)
    batch = {"x": x, "deep": [(x, 1), Pair(x, 2)], "text": "a", "none": None}
    there = moved(batch, "meta")
    assert there["x"].is_meta
    (first, one), pair = there["deep"]
    assert first.is_meta
    assert one == 1
    assert isinstance(pair, Pair)
    assert pair.left.is_meta
    assert pair.right == 2
    assert (there["text"], there["none"]) == ("a", None)
    assert batch["x"] is x
    assert not x.is_meta


def test_what_knows_how_to_move_moves_itself() -> None:
    packed = nn.utils.rnn.pack_sequence([torch.zeros(2)])
    model = Model()
    distributed_forward_loop(model, [packed], device="cpu")(None)
    ((arg,), _) = model.seen[0]
    assert isinstance(arg, nn.utils.rnn.PackedSequence)


def test_a_batch_is_moved_to_the_device_that_is_given() -> None:
    model = Model()
    loop = distributed_forward_loop(model, [{"x": torch.zeros(1)}, (torch.zeros(1),)], "meta")
    loop(None)
    assert model.seen[0][1]["x"].is_meta
    assert model.seen[1][0][0].is_meta


# --- Caching -------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [True, False, None])
def test_caching_is_off_while_the_loop_runs(before: bool | None) -> None:
    model = Model(SimpleNamespace(use_cache=before))
    distributed_forward_loop(model, [torch.zeros(1)])(None)
    assert model.caching == [False]
    assert model.config.use_cache is before  # type: ignore[attr-defined]


def test_a_configuration_without_the_setting_has_none_afterwards() -> None:
    model = Model(SimpleNamespace())
    distributed_forward_loop(model, [torch.zeros(1)])(None)
    assert model.caching == [False]
    assert vars(model.config) == {}


def test_the_configuration_of_the_text_model_is_set_too() -> None:
    config = SimpleNamespace(use_cache=True, text_config=SimpleNamespace(use_cache="dynamic"))
    with caching_disabled(Model(config)):
        assert (config.use_cache, config.text_config.use_cache) == (False, False)
    assert (config.use_cache, config.text_config.use_cache) == (True, "dynamic")


def test_a_configuration_that_is_its_own_text_configuration_is_restored() -> None:
    config = SimpleNamespace()
    config.text_config = config
    with caching_disabled(Model(config)):
        assert config.use_cache is False
    assert not hasattr(config, "use_cache")


def test_caching_is_restored_after_an_exception_and_when_nested() -> None:
    config = SimpleNamespace(use_cache=True)
    model = Model(config)
    with pytest.raises(OSError, match="disk"), caching_disabled(model), caching_disabled(model):
        raise OSError("disk")
    assert config.use_cache is True


def test_a_setting_that_the_model_removed_stays_removed() -> None:
    config = SimpleNamespace()
    with caching_disabled(Model(config)):
        del config.use_cache
    assert vars(config) == {}


def test_a_loader_that_fails_leaves_the_model_as_it_was() -> None:
    def failing() -> Any:
        yield torch.zeros(1)
        raise OSError("disk")

    model = Model(SimpleNamespace(use_cache=True))
    with pytest.raises(OSError, match="disk"):
        distributed_forward_loop(model, failing())(None)
    assert model.config.use_cache is True  # type: ignore[attr-defined]
    assert torch.is_grad_enabled()


# --- Experts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "mesh", "said"),
    [
        (expert_parallel, None, "sharded over 4 ranks: give the mesh"),
        (expert_parallel, Mesh(8), "the mesh has 8 ranks, but the experts are sharded over 4"),
        (Model, Mesh(4), "a mesh was given, but .* shards no experts"),
    ],
)
def test_the_mesh_of_the_experts_is_given_exactly_where_there_is_one(
    make: Callable[[], Model], mesh: Any, said: str
) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        distributed_forward_loop(make(), [], ep_mesh=mesh)
    assert isinstance(caught.value, PlanError)


def test_forwards_that_a_rebuild_dropped_are_put_back() -> None:
    model = expert_parallel()
    model.expert.forward = lambda x: x  # type: ignore[assignment]
    dropped = vars(model.expert)["forward"]
    loop = distributed_forward_loop(model, [torch.zeros(1)], ep_mesh=Mesh(4))
    del model.expert.forward
    loop(None)
    assert vars(model.expert)["forward"] is dropped
    assert len(model.seen) == 1


def test_a_forward_that_was_replaced_is_left_alone() -> None:
    model = expert_parallel()
    model.expert.forward = lambda x: x  # type: ignore[assignment]
    loop = distributed_forward_loop(model, [], ep_mesh=Mesh(4))
    replaced = model.expert.forward = lambda x: x  # type: ignore[assignment]
    loop(None)
    assert vars(model.expert)["forward"] is replaced


def test_without_experts_no_forward_is_put_back() -> None:
    model = Model()
    model.expert.forward = lambda x: x  # type: ignore[assignment]
    loop = distributed_forward_loop(model, [])
    del model.expert.forward
    loop(None)
    assert "forward" not in vars(model.expert)
