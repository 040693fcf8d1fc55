"""Assignment: the owner of each participating tensor of one flat buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal

import torch

from distcore.v1 import PlanError, Problem, balance
from ownerplan.cost import ns_cost_fn
from ownerplan.layout import GlobalLayout, Holders
from ownerplan.placements import Ranks, buffer_order
from ownerplan.sweep import Stretch, fewest_moved, least_ceiling

DEFAULT_NS_STEPS = 5

# A cost function may ask its shape for `numel()`, so it gets a torch.Size; one that takes any
# sequence serves as well.
ShapeCost = Callable[[Any], float]


def select_ge_2d_params(param: torch.Tensor) -> bool:
    """Whether the tensor has two dims or more. Of a DTensor the global shape counts."""
    return param.ndim >= 2


@dataclass(frozen=True)
class _OwnerWork:
    """A tensor's cost, and the ranks that may own it, in buffer order."""

    tensor_index: int
    cost: float
    candidates: list[int]


def assign_owner_work(
    layout: GlobalLayout,
    mesh: Ranks,
    tensor_indices: Iterable[int],
    cost_fn: ShapeCost | None = None,
    *,
    policy: Literal["greedy", "optimal"] = "greedy",
    initial_load: Mapping[int, float] | None = None,
) -> dict[int, int]:
    """Give each tensor to a global rank that holds part of it: index -> rank, as assigned.

    - `greedy`: tensors with one holder first, then by falling cost, equal costs in the order of
      `tensor_indices`; each goes to its least loaded holder, the first in buffer order where
      there are several.
    - `optimal`: the least makespan that holders allow, and among such assignments one that moves
      the fewest elements.

    `cost_fn` takes a full shape; without it, the cost is that of five Newton-Schulz steps.
    `initial_load` is what ranks have to do already; those not named have nothing.

    Raises:
        RuntimeError: a tensor that no rank holds any of, as one without rows.
        PlanError: an index twice or not in the layout, a rank that is not in the mesh, a cost that
            is negative or not finite.
    """
    ranks = buffer_order(mesh)
    indices = _check_indices(layout, tensor_indices)
    works = _find_work(layout, mesh, indices, cost_fn or ns_cost_fn(DEFAULT_NS_STEPS))
    works.sort(key=lambda work: (len(work.candidates) > 1, -work.cost))
    loads = _initial_loads(ranks, initial_load or {})
    if policy == "optimal":
        owners = _assign_optimally(layout, mesh, works, loads)
        return {work.tensor_index: owners[work.tensor_index] for work in works}
    # Ties go to the lowest number, so ranks are numbered in buffer order for it.
    place = {rank: at for at, rank in enumerate(ranks)}
    found = balance(
        [work.tensor_index for work in works],
        [work.cost for work in works],
        [[place[rank] for rank in work.candidates] for work in works],
        len(ranks),
        policy=policy,
        initial=loads,
    )
    return {index: ranks[at] for index, at in found.owner.items()}


def _check_indices(layout: GlobalLayout, tensor_indices: Iterable[int]) -> list[int]:
    indices = list(tensor_indices)
    problems = []
    seen: set[int] = set()
    for index in indices:
        if not 0 <= index < len(layout.tensor_shapes):
            text = f"the layout has {len(layout.tensor_shapes)} tensors"
            problems.append(Problem(f"tensor {index}", "range", text))
        if index in seen:
            problems.append(Problem(f"tensor {index}", "duplicate", "is listed more than once"))
        seen.add(index)
    if problems:
        raise PlanError(problems)
    return indices


def _find_work(
    layout: GlobalLayout, mesh: Ranks, indices: Sequence[int], cost_fn: ShapeCost
) -> list[_OwnerWork]:
    holders = Holders(layout.get_rank_ranges(mesh))
    works = []
    for index in indices:
        shape = torch.Size(layout.tensor_shapes[index])
        candidates = [rank for rank, _ in holders.of(layout.get_tensor_range(index))]
        if not candidates:
            raise RuntimeError(
                f"tensor {index} of shape {tuple(shape)} has no owner: no rank holds any of it"
            )
        cost = cost_fn(shape)
        if not (isfinite(cost) and cost >= 0):
            text = f"the cost {cost} of shape {tuple(shape)} is not a finite number of at least 0"
            raise PlanError(Problem(f"tensor {index}", "cost", text))
        works.append(_OwnerWork(index, cost, candidates))
    return works


def _initial_loads(ranks: Sequence[int], given: Mapping[int, float]) -> list[float]:
    strange = sorted(set(given) - set(ranks))
    if strange:
        text = f"ranks {strange} are not in the mesh of the ranks {sorted(ranks)}"
        raise PlanError(Problem("initial_load", "rank", text))
    return [given.get(rank, 0) for rank in ranks]


def _assign_optimally(
    layout: GlobalLayout, mesh: Ranks, works: Sequence[_OwnerWork], loads: Sequence[float]
) -> dict[int, int]:
    ranges = layout.get_rank_ranges(mesh)
    ranks = list(ranges)
    place = {rank: at for at, rank in enumerate(ranks)}
    holders = Holders(ranges)
    works = sorted(works, key=lambda work: layout.tensor_to_offset[work.tensor_index])
    stretches = []
    for work in works:
        parts = holders.of(layout.get_tensor_range(work.tensor_index))
        at, held = zip(*((place[rank], part.numel) for rank, part in parts), strict=True)
        stretches.append(Stretch(work.cost, at, held))
    by_range = dict(zip(buffer_order(mesh), loads, strict=True))
    base = [by_range[rank] for rank in ranks]
    owners = fewest_moved(stretches, base, least_ceiling(stretches, base))
    return {work.tensor_index: ranks[at] for work, at in zip(works, owners, strict=True)}
