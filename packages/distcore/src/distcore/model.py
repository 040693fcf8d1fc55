"""How a model is distributed over the ranks of a run, recorded on the model itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, get_args

from distcore.fsdp import is_fsdp2_model
from distcore.probes import is_distributed_run
from distcore.v1.errors import PlanError, Problem

if TYPE_CHECKING:
    from torch import nn

Dense = Literal["replicate", "fsdp"]
"""How the part of a model that is not sharded by experts is placed."""

# Kept in the module's own __dict__: it outlives fully_shard, which swaps the class, and a deep
# copy; it is no parameter and no buffer, so no state_dict holds it.
ATTRIBUTE: Final = "_distribution_plan"
SHOWN_MODULES: Final = 3


@dataclass(frozen=True, slots=True)
class DistributionPlan:
    """How a model is distributed over the ranks of a run; a value, checked when it is made.

    `world_size` ranks hold the model; 1 is a single process. The routed experts are sharded over
    groups of `ep_size` ranks; 1 shards none. `dense` places everything else: `"replicate"` gives
    each rank a whole copy, `"fsdp"` shards it with FSDP2.
    Raises PlanError (a ValueError) if a size is not an int from 1 on, if `ep_size` does not divide
    `world_size`, or if `dense` is neither of the two.

    >>> DistributionPlan(world_size=8, ep_size=4).edp
    2
    """

    world_size: int = 1
    ep_size: int = 1
    dense: Dense = "replicate"

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise PlanError(problems)

    def _problems(self) -> Iterator[Problem]:
        sizes = {"world_size": self.world_size, "ep_size": self.ep_size}
        wrong = {name: size for name, size in sizes.items() if type(size) is not int or size < 1}
        for name, size in wrong.items():
            yield Problem(name, "range", f"{size!r} is not an int from 1 on")
        if not wrong and self.world_size % self.ep_size:
            text = f"{self.ep_size} does not divide the world size {self.world_size}"
            yield Problem("ep_size", "divisor", text)
        if self.dense not in get_args(Dense):
            yield Problem("dense", "choice", f"{self.dense!r} is not 'replicate' or 'fsdp'")

    @property
    def edp(self) -> int:
        """How many ranks hold a replica of each expert shard: `world_size / ep_size`."""
        return self.world_size // self.ep_size

    @property
    def is_expert_parallel(self) -> bool:
        """Whether the routed experts are sharded over ranks."""
        return self.ep_size > 1

    @property
    def is_fsdp_dense(self) -> bool:
        """Whether what is not a routed expert is sharded with FSDP2 rather than replicated."""
        return self.dense == "fsdp"


def set_distribution_plan(model: nn.Module, plan: DistributionPlan) -> None:
    """Record on `model` and on all its submodules that it is distributed as `plan`.

    Code that is handed a submodule then reads the same plan, the same object. A model is
    distributed once: RuntimeError, with nothing changed, if `model` or one of its submodules
    records a plan already, be it an equal one. TypeError if `plan` is no DistributionPlan.
    Modules that are added later record nothing.
    """
    if not isinstance(plan, DistributionPlan):
        raise TypeError(f"{plan!r} is a {type(plan).__name__}, not a DistributionPlan")
    modules = list(model.named_modules())
    taken = [(name, recorded(module)) for name, module in modules if recorded(module) is not None]
    if taken:
        shown = "; ".join(
            f"{name or 'the model itself'} by {old}" for name, old in taken[:SHOWN_MODULES]
        )
        more = f"; and {len(taken) - SHOWN_MODULES} more" if len(taken) > SHOWN_MODULES else ""
        raise RuntimeError(
            f"{type(model).__name__} records a plan already, and a model is distributed once: "
            f"{shown}{more}; nothing was changed"
        )
    for _, module in modules:
        vars(module)[ATTRIBUTE] = plan


def distribution_plan(model: nn.Module) -> DistributionPlan:
    """Return the plan recorded on `model`, or that of a single process if it can only be that.

    A recorded plan is returned whatever the run looks like. Without one, a model that is sharded
    with FSDP2, or that is held in a run of several ranks, raises RuntimeError rather than be taken
    for a whole copy in a single process; every other model is `DistributionPlan()`.
    A wrapper made after the plan was recorded (DistributedDataParallel) records none: ask for the
    plan of its `.module`.
    """
    plan = recorded(model)
    if plan is not None:
        return plan
    name = type(model).__name__
    advice = "record how with set_distribution_plan, or ask the module that records it"
    if is_fsdp2_model(model):
        raise RuntimeError(f"{name} is sharded with FSDP2 and records no plan; {advice}")
    if is_distributed_run():
        raise RuntimeError(f"{name} records no plan in a run of several ranks; {advice}")
    return DistributionPlan()


def recorded(module: nn.Module) -> DistributionPlan | None:
    """Return the plan that is recorded on `module`, None if there is none."""
    # Through getattr: a compiled module passes the question on to the module inside.
    plan = getattr(module, ATTRIBUTE, None)
    return plan if isinstance(plan, DistributionPlan) else None
