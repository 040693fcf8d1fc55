"""Routes: which Transfers bring a matrix to its owner, and its result back to all who hold it.

Pure, and the same on every rank. Where several ranks hold the same elements, one of them sends
them (the owner itself, if it can) and all of them are sent the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from distcore.v1 import Layout, Piece, Plan, PlanError, Problem, Region, Transfer

Holders: TypeAlias = Mapping[Region, tuple[int, ...]]
"""What is held of a matrix, Region by Region, and by which ranks (ascending)."""


@dataclass(frozen=True, slots=True)
class Route:
    """One matrix: the Region that it is in its tensor, who holds what of it, and who owns it."""

    key: str
    region: Region
    holders: Holders
    owner: int

    def held_by(self, rank: int) -> int:
        """How many elements of the matrix `rank` holds."""
        return sum(region.numel for region, ranks in self.holders.items() if rank in ranks)


def holders_of(key: str, layout: Layout, region: Region) -> dict[Region, tuple[int, ...]]:
    """Who holds what of `region`; PlanError, which names `key`, where some is held by nobody."""
    found: dict[Region, list[int]] = {}
    for rank in sorted(layout.ranks):
        for piece in layout.pieces(rank):
            part = piece.region.intersect(region)
            if part is not None:
                found.setdefault(part, []).append(rank)
    held = sum(part.numel for part in found)
    if held != region.numel:
        text = f"the ranks hold {held} different elements of {region}, which has {region.numel}"
        raise PlanError(Problem(key, "layout", text))
    return {part: tuple(ranks) for part, ranks in sorted(found.items())}


def plan_gather(routes: Iterable[Route]) -> Plan:
    """Bring every matrix to its owner: each element once, from a rank that has sent little yet."""
    sent: dict[int, int] = {}
    transfers = []
    for route in routes:
        for region, ranks in route.holders.items():
            src = min(ranks, key=lambda rank: (rank != route.owner, sent.get(rank, 0), rank))
            if src != route.owner:
                sent[src] = sent.get(src, 0) + region.numel
            transfers.append(Transfer(route.key, src, route.owner, region))
    return Plan(transfers)


def plan_scatter(routes: Iterable[Route]) -> Plan:
    """Bring every result back: each element to every rank that holds it."""
    return Plan(
        Transfer(route.key, route.owner, rank, region)
        for route in routes
        for region, ranks in route.holders.items()
        for rank in ranks
    )


@dataclass(frozen=True, slots=True)
class LocalBox:
    """What a rank holds of a matrix: a box of its local tensor, and which Regions lie in it.

    The pieces' places count from the start of the box.
    """

    box: Region
    pieces: tuple[Piece, ...]


def local_box(layout: Layout, region: Region, rank: int) -> LocalBox | None:
    """What `rank` holds of `region`, or None where that is nothing.

    PlanError where the elements do not fill a box of the local tensor.
    """
    found = []
    for piece in layout.pieces(rank):
        part = piece.region.intersect(region)
        if part is not None:
            shift = zip(piece.place, part.start, piece.region.start, strict=True)
            found.append(Piece(part, tuple(place + low - first for place, low, first in shift)))
    if not found:
        return None
    start = tuple(map(min, zip(*(piece.place for piece in found), strict=True)))
    stop = tuple(map(max, zip(*(piece.local.stop for piece in found), strict=True)))
    box = Region(start, stop)
    if sum(piece.region.numel for piece in found) != box.numel:
        text = f"what rank {rank} holds of {region} is no box of its local tensor"
        raise PlanError(Problem(f"rank {rank}", "layout", text))
    pieces = (Piece(piece.region, piece.local.relative_to(box).start) for piece in found)
    return LocalBox(box, tuple(pieces))
