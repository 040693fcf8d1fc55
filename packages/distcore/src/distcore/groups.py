"""Groups: process groups as a model holds them, also where it has none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar, cast

from distcore.collectives import all_reduce
from distcore.probes import NOT_A_MEMBER, is_initialized, rank, size
from distcore.v1.errors import PlanError, Problem
from distcore.world import is_group, is_in_world

if TYPE_CHECKING:
    from distcore.world import Group

V = TypeVar("V")


class DistributedProcessGroup:
    """A process group that may be absent.

    `group` is a process group, None for the default world, or -1 for a group that is not used.
    The marker that torch gives a rank outside a new group counts as not used. A group of torch's
    default world is initialized as long as that world is, any other group always.
    """

    def __init__(self, group: Group | int | None = None) -> None:
        if group is not None and not isinstance(group, int) and not is_group(group):
            text = f"expected a process group, None or -1, got {group!r}"
            raise PlanError(Problem("group", "type", text))
        self.group = group

    def __repr__(self) -> str:
        return (
            f"group: {self.group}, initialized: {self.is_initialized()}, "
            f"world size: {self.world_size()}"
        )

    def is_initialized(self) -> bool:
        """Whether the group exists and this rank is in it."""
        if self.group is None:
            return is_initialized()
        return is_group(self.group) and (is_initialized() or not is_in_world(self.group))

    def rank(self) -> int:
        """This rank's position in the group, -1 where it is not initialized."""
        return rank(self.group) if self.is_initialized() else NOT_A_MEMBER

    def world_size(self) -> int:
        """The number of ranks in the group, -1 where it is not initialized."""
        return size(self.group) if self.is_initialized() else NOT_A_MEMBER

    @staticmethod
    def get_dist_syncd_obj(
        obj: V,
        groups: DistributedProcessGroup | Sequence[DistributedProcessGroup],
        op: Callable[[list[V]], V],
        *,
        codec: str = "safe",
    ) -> V:
        """Fold `obj` over the groups, from left to right: each result goes into the next group.

        Collective in each group that is initialized; the others are skipped, so a rank outside a
        group keeps its object. `op` gets the objects of the group in the order of its ranks and
        runs on every rank: `sum` over [tensor, data] is the total over their grid. Objects travel
        and errors are raised as in `all_reduce`.
        """
        for group in [groups] if isinstance(groups, DistributedProcessGroup) else groups:
            if group.is_initialized():
                # The world by itself: without a group a call in a world of one would not be one.
                member = cast("Group | None", group.group)
                held = obj
                obj = all_reduce("get_dist_syncd_obj", lambda: held, op, group=member, codec=codec)  # noqa: B023 - called at once
        return obj


class ParallelState:
    """The groups over which a module is parallel: by data, by tensor, by expert.

    Each is a process group, None for the whole default world, or -1 where it is not used.
    """

    def __init__(
        self,
        data_parallel_group: Group | int | None = None,
        tensor_parallel_group: Group | int | None = -1,
        expert_model_parallel_group: Group | int | None = -1,
    ) -> None:
        self.data_parallel_group = DistributedProcessGroup(data_parallel_group)
        self.tensor_parallel_group = DistributedProcessGroup(tensor_parallel_group)
        self.expert_model_parallel_group = DistributedProcessGroup(expert_model_parallel_group)

    def __repr__(self) -> str:
        return (
            f"data_parallel_group: {self.data_parallel_group}, "
            f"tensor_parallel_group: {self.tensor_parallel_group}, "
            f"expert_model_parallel_group: {self.expert_model_parallel_group}"
        )
