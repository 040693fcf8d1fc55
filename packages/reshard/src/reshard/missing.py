"""Missing: what of its destinations a rank does not hold in its sources."""

from __future__ import annotations

from distcore.v1 import itemsize
from reshard.plan import ReshardPlan


def missing_nbytes(plan: ReshardPlan, rank: int) -> int:
    """The bytes that `rank` needs and does not hold: no plan lets it receive less."""
    total = 0
    for key, dst in plan.dst.items():
        if key in plan.aliases:
            continue
        held = plan.src[key].pieces(rank)
        size = itemsize(dst.dtype)
        for piece in dst.pieces(rank):
            overlaps = (piece.region.intersect(own.region) for own in held)
            total += size * piece.region.numel
            total -= size * sum(common.numel for common in overlaps if common is not None)
    return total
