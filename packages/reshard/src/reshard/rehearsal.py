"""Rehearsal: a plan played in one process, each element checked on each rank."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import torch

from distcore.v1 import Layout, Plan, Transfer, itemsize
from distcore.v1.runtime import torch_dtype
from reshard.plan import ReshardPlan
from reshard.simulation import simulate


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What was played: tensors, ranks that received something, elements checked.

    `wrong` are the keys of which some rank held something else at the end than its layout says.
    """

    tensors: int
    ranks: int
    elements: int
    skipped: int
    wrong: tuple[str, ...]


def rehearse(plan: ReshardPlan, *, max_nbytes: int) -> Rehearsal:
    """Play the plan tensor by tensor, and hold every rank against its layout.

    A tensor that would take more than `max_nbytes` over all ranks is left out.
    """
    moved = [key for key in plan.keys if key not in plan.aliases]
    fitting = [key for key in moved if _total_nbytes(plan, key) <= max_nbytes]
    by_key: list[dict[str, list[Transfer]]] = []
    for stage in plan.stages:
        chosen: dict[str, list[Transfer]] = {key: [] for key in fitting}
        for transfer in stage:
            if transfer.key in chosen:
                chosen[transfer.key].append(transfer)
        by_key.append(chosen)
    wrong, ranks, elements = [], set(), 0
    for key in fitting:
        stages = tuple(Plan(chosen[key]) for chosen in by_key)
        part = replace(
            plan, src={key: plan.src[key]}, dst={key: plan.dst[key]}, stages=stages, aliases={}
        )
        full = _numbered(plan.dst[key])
        for rank, tensors in simulate(part, {key: full}).items():
            ranks.add(rank)
            elements += tensors[key].numel()
            if not _is_right(tensors[key], full, plan.dst[key], rank):
                wrong.append(key)
                break
    return Rehearsal(len(fitting), len(ranks), elements, len(moved) - len(fitting), tuple(wrong))


def _total_nbytes(plan: ReshardPlan, key: str) -> int:
    sides = plan.src[key], plan.dst[key]
    size = itemsize(plan.src[key].dtype)
    return size * sum(prod(side.local_shape(rank)) for side in sides for rank in side.ranks)


def _numbered(layout: Layout) -> torch.Tensor:
    """A tensor of the layout's size of element in which neighbours differ, and none is zero."""
    carrier = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(
        torch_dtype(layout.dtype).itemsize, torch.int64
    )
    numbers = torch.arange(prod(layout.shape)).remainder(251).add(1)
    return numbers.to(carrier).reshape(layout.shape)


def _is_right(local: torch.Tensor, full: torch.Tensor, layout: Layout, rank: int) -> bool:
    return all(
        torch.equal(local[piece.local.slices()], full[piece.region.slices()])
        for piece in layout.pieces(rank)
    )
