"""Simulation: one process plays all ranks of a plan. The oracle for tests, and for the curious."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from distcore.v1 import Layout, Piece, PlanError, Problem, Region

if TYPE_CHECKING:
    import torch

    from reshard.plan import ReshardPlan


def simulate(
    plan: ReshardPlan, tensors: Mapping[str, torch.Tensor]
) -> dict[int, dict[str, torch.Tensor]]:
    """Play `plan` on full tensors and return the local tensor of every destination rank.

    `tensors` maps every key to the full tensor. Only what the plan transfers is written, element
    by element where it says, into local tensors that begin as zeros: what the plan forgets stays
    zero. Slow and obvious.
    """
    for key in plan.keys:
        if key not in tensors:
            raise PlanError(Problem(key, "missing", "no tensor of this name was given"))
        if tuple(tensors[key].shape) != plan.src[key].shape:
            text = f"expected shape {plan.src[key].shape}, got {tuple(tensors[key].shape)}"
            raise PlanError(Problem(key, "shape", text))
    sources = _locals(plan.src, tensors, filled=True)
    destinations = _locals(plan.dst, tensors, filled=False)
    layouts = plan.src
    for stage in plan.stages:
        for transfer in stage:
            value = _read(sources, layouts, transfer.key, transfer.src, transfer.region)
            local = destinations[transfer.dst][transfer.key]
            for piece, common in _parts(plan.dst[transfer.key], transfer.dst, transfer.region):
                target = local[_place(piece, common).slices()]
                target.copy_(value[common.relative_to(transfer.region).slices()])
        sources, layouts = destinations, plan.dst
    for key, other in plan.aliases.items():
        for rank in plan.dst[key].ranks:
            destinations[rank][key] = destinations[rank][other]
    return destinations


def _locals(
    layouts: Mapping[str, Layout], tensors: Mapping[str, torch.Tensor], *, filled: bool
) -> dict[int, dict[str, torch.Tensor]]:
    found: dict[int, dict[str, torch.Tensor]] = {}
    for key, layout in layouts.items():
        for rank in layout.ranks:
            local = tensors[key].new_zeros(layout.local_shape(rank))
            if filled:
                for piece in layout.pieces(rank):
                    local[piece.local.slices()] = tensors[key][piece.region.slices()]
            found.setdefault(rank, {})[key] = local
    return found


def _read(
    locals_: Mapping[int, Mapping[str, torch.Tensor]],
    layouts: Mapping[str, Layout],
    key: str,
    rank: int,
    region: Region,
) -> torch.Tensor:
    local = locals_[rank][key]
    value = local.new_zeros(region.shape)
    for piece, common in _parts(layouts[key], rank, region):
        value[common.relative_to(region).slices()] = local[_place(piece, common).slices()]
    return value


def _parts(layout: Layout, rank: int, region: Region) -> list[tuple[Piece, Region]]:
    found = [(piece, piece.region.intersect(region)) for piece in layout.pieces(rank)]
    return [(piece, common) for piece, common in found if common is not None]


def _place(piece: Piece, region: Region) -> Region:
    return region.translate(
        tuple(place - low for place, low in zip(piece.place, piece.region.start, strict=True))
    )
