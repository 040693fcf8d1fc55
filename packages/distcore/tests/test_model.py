"""DistributionPlan: checked when made, recorded once on every submodule, never guessed."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from distcore.model import DistributionPlan, distribution_plan, set_distribution_plan
from distcore.v1.errors import PlanError


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.head = nn.Linear(2, 2)


PLAN = DistributionPlan(world_size=8, ep_size=4)


def test_the_default_is_a_single_process() -> None:
    plan = DistributionPlan()
    assert (plan.world_size, plan.ep_size, plan.dense) == (1, 1, "replicate")
    assert (plan.edp, plan.is_expert_parallel, plan.is_fsdp_dense) == (1, False, False)


def test_eight_ranks_in_groups_of_four() -> None:
    plan = DistributionPlan(8, 4)
    assert plan.edp == 2
    assert type(plan.edp) is int
    assert plan.is_expert_parallel
    assert not plan.is_fsdp_dense
    assert DistributionPlan(8, dense="fsdp").is_fsdp_dense


def test_a_plan_is_a_value() -> None:
    assert {PLAN, DistributionPlan(8, 4)} == {PLAN}
    assert copy.deepcopy(PLAN) == PLAN
    with pytest.raises(dataclasses.FrozenInstanceError):
        PLAN.ep_size = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"world_size": 8, "ep_size": 3}, "ep_size: 3 does not divide the world size 8"),
        ({"world_size": 2, "ep_size": 4}, "ep_size: 4 does not divide the world size 2"),
        ({"world_size": 0}, "world_size: 0 is not an int from 1 on"),
        ({"ep_size": -1}, "ep_size: -1 is not an int from 1 on"),
        ({"world_size": 2.0}, "world_size: 2.0 is not an int"),
        ({"world_size": True}, "world_size: True is not an int"),
        ({"dense": "zero3"}, "dense: 'zero3' is not 'replicate' or 'fsdp'"),
    ],
)
def test_a_plan_that_cannot_be_is_an_error(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        DistributionPlan(**fields)


def test_all_that_is_wrong_with_a_plan_is_said_at_once() -> None:
    with pytest.raises(PlanError) as caught:
        DistributionPlan(0, 0, "all")  # type: ignore[arg-type]
    assert [problem.where for problem in caught.value.problems] == [
        "world_size",
        "ep_size",
        "dense",
    ]


def test_a_plan_is_recorded_on_every_submodule() -> None:
    model = Toy()
    set_distribution_plan(model, PLAN)
    assert all(distribution_plan(module) is PLAN for module in model.modules())
    assert distribution_plan(model.layers[0]) is PLAN


@pytest.mark.parametrize("again", [PLAN, DistributionPlan(8, 4), DistributionPlan(2)])
def test_a_plan_is_recorded_once(again: DistributionPlan) -> None:
    model = Toy()
    set_distribution_plan(model, PLAN)
    with pytest.raises(RuntimeError, match=r"records a plan already.* and 2 more; nothing was"):
        set_distribution_plan(model, again)
    assert distribution_plan(model) is PLAN


def test_a_recorded_child_leaves_its_parent_as_it_was() -> None:
    model = Toy()
    set_distribution_plan(model.layers[1], PLAN)
    with pytest.raises(RuntimeError, match=r"layers\.1 by DistributionPlan\(world_size=8"):
        set_distribution_plan(model, DistributionPlan(2))
    plain = [model, model.layers, model.layers[0], model.head]
    assert [distribution_plan(module) for module in plain] == [DistributionPlan()] * 4
    assert distribution_plan(model.layers[1]) is PLAN


def test_only_a_plan_can_be_recorded() -> None:
    with pytest.raises(TypeError, match="not a DistributionPlan"):
        set_distribution_plan(Toy(), {"world_size": 8})  # type: ignore[arg-type]


def test_a_module_that_is_shared_is_recorded_once() -> None:
    shared = nn.Linear(2, 2)
    model = nn.Sequential(shared, shared)
    set_distribution_plan(model, PLAN)
    assert distribution_plan(shared) is PLAN


def test_a_model_without_a_record_is_that_of_a_single_process() -> None:
    assert distribution_plan(Toy()) == DistributionPlan()


def test_a_deep_copy_keeps_the_plan_and_no_state_dict_holds_it() -> None:
    model = Toy()
    names = list(model.state_dict())
    set_distribution_plan(model, PLAN)
    assert list(model.state_dict()) == names
    assert distribution_plan(copy.deepcopy(model).layers[1]) == PLAN


def test_a_module_that_is_added_later_records_nothing() -> None:
    model = Toy()
    set_distribution_plan(model, PLAN)
    model.adapter = nn.Linear(2, 2)
    assert distribution_plan(model.adapter) == DistributionPlan()


def test_a_compiled_module_has_the_plan_of_the_module_inside() -> None:
    model = Toy()
    set_distribution_plan(model, PLAN)
    compiled = torch.compile(model, backend="eager")
    assert isinstance(compiled, nn.Module)
    assert distribution_plan(compiled) is PLAN
