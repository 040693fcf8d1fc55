"""Owners of several groups at once, and of groups of one's own making."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch

from ownerplan.cost import ns_cost_fn
from ownerplan.layout import GlobalLayout
from ownerplan.owner_layout import GroupOwnerLayout
from ownerplan.report import Policy


def group_of(shapes: Sequence[tuple[int, ...]], ranks: Sequence[int]) -> SimpleNamespace:
    return SimpleNamespace(
        mesh=SimpleNamespace(mesh=list(ranks), get_rank=lambda: ranks[0]),
        main_weight=SimpleNamespace(layout=GlobalLayout.build(shapes, len(ranks))),
        fsdp_parameters=[SimpleNamespace(sharded=torch.empty(shape)) for shape in shapes],
    )


def loads_of(found: Sequence[GroupOwnerLayout]) -> dict[int, int]:
    loads: dict[int, int] = {}
    for one in found:
        for index, owner in one.tensor_to_owner.items():
            cost = ns_cost_fn(5)(one.layout.tensor_shapes[index])
            loads[owner] = loads.get(owner, 0) + cost
    return loads


def test_layers_even_out_only_together() -> None:
    """Each layer is one tensor that both ranks hold; a tie always goes to the first."""
    groups = [group_of([(4, 4)], [5, 2]) for _ in range(4)]
    alone = [GroupOwnerLayout.from_group(group) for group in groups]
    joint = GroupOwnerLayout.from_groups(groups)
    assert loads_of(alone) == {5: 4 * 336}
    assert loads_of(joint) == {5: 2 * 336, 2: 2 * 336}
    assert [one.layout for one in joint] == [group.main_weight.layout for group in groups]


def test_greedy_over_groups_is_each_for_itself() -> None:
    groups = [group_of([(8, 2), (8, 2), (8, 2)], [2, 0]), group_of([(6, 4), (4, 4)], [3, 1])]
    found = GroupOwnerLayout.from_groups(groups, policy="greedy")
    assert [one.tensor_to_owner for one in found] == [{0: 2, 1: 2, 2: 0}, {0: 3, 1: 1}]
    assert [one.ranks for one in found] == [(2, 0), (3, 1)]


def test_any_rank_of_the_mesh_may_own_what_it_does_not_hold() -> None:
    """(1, 4) is whole on the first rank."""
    groups = [group_of([(1, 4)], [0, 1]), group_of([(1, 4)], [0, 1]), group_of([(1, 4)], [2])]
    held = GroupOwnerLayout.from_groups(groups)
    anyone = GroupOwnerLayout.from_groups(groups, candidates="any")
    assert [one.tensor_to_owner[0] for one in held] == [0, 0, 2]
    assert sorted(one.tensor_to_owner[0] for one in anyone) == [0, 1, 2]
    assert anyone[2].tensor_to_owner == {0: 2}


@pytest.mark.parametrize("policy", ["joint", "greedy", "optimal"])
def test_what_is_eligible_and_what_it_costs_can_be_said(policy: Policy) -> None:
    seen = []

    def cost(shape: torch.Size) -> int:
        seen.append((type(shape), tuple(shape)))
        return 1

    groups = [group_of([(4,), (4, 2)], [0])]
    found = GroupOwnerLayout.from_groups(
        groups, cost_fn=cost, eligible_fn=lambda param: param.ndim == 1, policy=policy
    )
    assert found[0].tensor_to_owner == {0: 0}
    assert seen == [(torch.Size, (4,))]


def test_no_groups_have_no_layouts() -> None:
    assert GroupOwnerLayout.from_groups([]) == []


def test_a_group_of_another_number_of_parameters_is_refused() -> None:
    group = group_of([(4, 2)], [0])
    group.fsdp_parameters.append(SimpleNamespace(sharded=torch.empty(4, 2)))
    with pytest.raises(ValueError, match="2 parameters for 1 tensors"):
        GroupOwnerLayout.from_groups([group])
