"""Owner layout: the flat buffer of a group and the owners of its participating tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, Self

import torch

from distcore.v1 import PlanError, Problem
from ownerplan.assignment import ShapeCost, assign_owner_work, select_ge_2d_params
from ownerplan.layout import GlobalLayout
from ownerplan.placements import LocalRanks, buffer_order


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
        eligible = eligible_fn or select_ge_2d_params
        layout = group.main_weight.layout
        parameters = group.fsdp_parameters
        if len(parameters) != len(layout.tensor_shapes):
            text = f"{len(parameters)} parameters for {len(layout.tensor_shapes)} tensors"
            raise PlanError(Problem("fsdp_parameters", "length", text))
        indices = [at for at, param in enumerate(parameters) if eligible(param.sharded)]
        owners = assign_owner_work(
            layout, group.mesh, indices, cost_fn, policy=policy, initial_load=initial_load
        )
        return cls(mesh=group.mesh, layout=layout, tensor_to_owner=owners)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks of the mesh, in buffer order."""
        return buffer_order(self.mesh)
