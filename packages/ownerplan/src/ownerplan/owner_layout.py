"""Owner layout: the flat buffer of a group and the owners of its participating tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, Self

import torch

from distcore.v1 import PlanError, Problem
from ownerplan.assignment import (
    DEFAULT_NS_STEPS,
    ShapeCost,
    assign_owner_work,
    select_ge_2d_params,
)
from ownerplan.cost import ns_cost_fn
from ownerplan.layout import GlobalLayout
from ownerplan.placements import LocalRanks, buffer_order
from ownerplan.plan import plan_owners
from ownerplan.report import Policy
from ownerplan.work import Work, works_in_buffer


class MainWeight(Protocol):
    """The flat buffer of a group."""

    @property
    def layout(self) -> GlobalLayout:
        """Where the tensors lie."""
        ...


class Sharded(Protocol):
    """A parameter of a group."""

    @property
    def sharded(self) -> torch.Tensor:
        """The parameter; a tensor with the global shape."""
        ...


class ParameterGroup(Protocol):
    """What is used of a group of parameters; the i-th one is tensor i of the layout."""

    @property
    def mesh(self) -> LocalRanks:
        """The ranks that the buffer is cut over."""
        ...

    @property
    def main_weight(self) -> MainWeight:
        """The flat buffer."""
        ...

    @property
    def fsdp_parameters(self) -> Sequence[Sharded]:
        """The parameters, in index order."""
        ...


@dataclass(frozen=True)
class GroupOwnerLayout:
    """A group's flat buffer, cut over all axes of `mesh`, and who owns which tensor.

    `tensor_to_owner` is tensor index -> global rank; its keys are the participating tensors. An
    owner need not hold a part of its tensor.

    Raises:
        PlanError: an index that is not in the layout, an owner that is not in the mesh, or a
            layout whose segments cannot be dealt to the mesh.
    """

    mesh: LocalRanks
    layout: GlobalLayout
    tensor_to_owner: dict[int, int]

    def __post_init__(self) -> None:
        ranks = set(self.layout.get_rank_ranges(self.mesh))
        problems = []
        for index, owner in self.tensor_to_owner.items():
            if not 0 <= index < len(self.layout.tensor_shapes):
                text = f"the layout has {len(self.layout.tensor_shapes)} tensors"
                problems.append(Problem(f"tensor {index}", "range", text))
            if owner not in ranks:
                text = f"its owner {owner} is not in the mesh of the ranks {sorted(ranks)}"
                problems.append(Problem(f"tensor {index}", "rank", text))
        if problems:
            raise PlanError(problems)

    @classmethod
    def from_group(
        cls,
        group: ParameterGroup,
        *,
        cost_fn: ShapeCost | None = None,
        eligible_fn: Callable[[torch.Tensor], bool] | None = None,
        policy: Literal["greedy", "optimal"] = "greedy",
        initial_load: Mapping[int, float] | None = None,
    ) -> Self:
        """Choose the participating parameters of a group and balance their owners.

        Without `eligible_fn`, parameters of two dims and more take part. The other arguments and
        the errors are those of `assign_owner_work`.
        """
        layout = group.main_weight.layout
        indices = _eligible_indices(group, eligible_fn or select_ge_2d_params)
        owners = assign_owner_work(
            layout, group.mesh, indices, cost_fn, policy=policy, initial_load=initial_load
        )
        return cls(mesh=group.mesh, layout=layout, tensor_to_owner=owners)

    @classmethod
    def from_groups(
        cls,
        groups: Sequence[ParameterGroup],
        *,
        cost_fn: ShapeCost | None = None,
        eligible_fn: Callable[[torch.Tensor], bool] | None = None,
        policy: Policy = "joint",
        candidates: Literal["holders", "any"] = "holders",
    ) -> list[Self]:
        """Balance the owners of several groups together: one layout per group, in order.

        With one group per layer, balancing each for itself lets the same ranks work in every layer,
        so that nothing evens out. Candidates are the ranks that hold a part, or `any` rank of
        the group's mesh. `policy` is that of `ownerplan.plan_owners`, whose errors it raises.
        """
        eligible = eligible_fn or select_ge_2d_params
        chosen = [_eligible_indices(group, eligible) for group in groups]
        ranks = list(dict.fromkeys(rank for group in groups for rank in buffer_order(group.mesh)))
        # Planning numbers ranks from 0, and gives ties to the lowest: the first in buffer order.
        place = {rank: at for at, rank in enumerate(ranks)}
        works = [
            _works(group, indices, cost_fn or ns_cost_fn(DEFAULT_NS_STEPS), place, candidates)
            for group, indices in zip(groups, chosen, strict=True)
        ]
        owners = plan_owners(works, max(1, len(ranks)), policy=policy).owners
        return [
            cls(
                mesh=group.mesh,
                layout=group.main_weight.layout,
                tensor_to_owner={i: ranks[at] for i, at in zip(indices, found, strict=True)},
            )
            for group, indices, found in zip(groups, chosen, owners, strict=True)
        ]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks of the mesh, in buffer order."""
        return buffer_order(self.mesh)


def _eligible_indices(group: ParameterGroup, eligible: Callable[[torch.Tensor], bool]) -> list[int]:
    parameters, shapes = group.fsdp_parameters, group.main_weight.layout.tensor_shapes
    if len(parameters) != len(shapes):
        text = f"{len(parameters)} parameters for {len(shapes)} tensors"
        raise PlanError(Problem("fsdp_parameters", "length", text))
    return [at for at, param in enumerate(parameters) if eligible(param.sharded)]


def _works(
    group: ParameterGroup,
    indices: Sequence[int],
    cost_fn: ShapeCost,
    place: Mapping[int, int],
    candidates: Literal["holders", "any"],
) -> list[Work]:
    """The participating tensors of a group, with ranks by their place."""
    members = [place[rank] for rank in buffer_order(group.mesh)]
    return [
        Work(
            work.shape,
            held := tuple((place[rank], numel) for rank, numel in work.held),
            tuple(members if candidates == "any" else (rank for rank, _ in held)),
            cost_fn(torch.Size(work.shape)),
        )
        for work in works_in_buffer(group.main_weight.layout, group.mesh, indices)
    ]
