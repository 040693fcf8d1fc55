"""The exact plan: one rank of every replica group receives what the group needs, once."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence

from reshard.face.duck_types import Group, Mesh, Region, Regions, Transfer
from reshard.face.meshes import mesh_coordinates, shard_dim
from reshard.face.regions import intersect

Holders = list[tuple[Region, tuple[int, ...]]]
"""Different Regions with the ranks that hold each, in order of first appearance."""


def destination_groups(
    dst_mesh: Mesh, dst_placements: Sequence[object], dst_regions: Regions
) -> tuple[Group, ...]:
    """The ranks of every different destination Region, in mesh order, and who receives for them.

    That is the first rank at coordinate 0 of every axis that repeats the tensor, or the first
    rank where there is none.
    """
    repeats = [axis for axis, one in enumerate(dst_placements) if shard_dim(one) is None]
    coordinates = mesh_coordinates(dst_mesh)
    found = []
    for region, members in holders_of(dst_regions, coordinates):
        leaders = [rank for rank in members if not any(coordinates[rank][axis] for axis in repeats)]
        found.append((region, members, (leaders or members)[0]))
    return tuple(found)


def build_exact_plan(
    src_regions: Regions, src_ranks: Sequence[int], destination_groups: Iterable[Group]
) -> tuple[Transfer, ...]:
    """The transfers into the representative of every group, ascending.

    What the representative holds itself it copies; all else comes from the first holder in the
    order of `src_ranks`.
    """
    sources = Overlaps(holders_of(src_regions, src_ranks))
    found = []
    for region, _, representative in destination_groups:
        for _, ranks, common in sources.of(region):
            source = representative if representative in ranks else ranks[0]
            found.append((source, representative, common))
    return tuple(sorted(found))


def holders_of(regions: Regions, ranks: Iterable[int]) -> Holders:
    """The different Regions of `ranks` in order of first appearance, each with its ranks."""
    found: dict[Region, list[int]] = {}
    for rank in ranks:
        found.setdefault(regions[rank], []).append(rank)
    return [(region, tuple(held)) for region, held in found.items()]


class Overlaps:
    """Finds the Regions that have something in common with another, without trying them all.

    They are sorted along the dim in which they begin at most places.
    """

    def __init__(self, holders: Holders) -> None:
        ndim = len(holders[0][0]) if holders else 0
        begins = [len({region[dim][0] for region, _ in holders}) for dim in range(ndim)]
        self._dim = begins.index(max(begins)) if begins else None
        self._order = list(range(len(holders)))
        self._starts: list[int] = []
        self._longest = 0
        self._holders = holders
        if self._dim is not None:
            dim = self._dim
            self._order.sort(key=lambda at: holders[at][0][dim][0])
            self._starts = [holders[at][0][dim][0] for at in self._order]
            self._longest = max(region[dim][1] - region[dim][0] for region, _ in holders)

    def of(self, region: Region) -> Iterator[tuple[Region, tuple[int, ...], Region]]:
        """Every Region that overlaps, its ranks, and the overlap; in order of first appearance."""
        near = self._order
        if self._dim is not None:
            start, stop = region[self._dim]
            low = bisect_right(self._starts, start - self._longest)
            near = sorted(near[low : bisect_left(self._starts, stop)])
        for at in near:
            found, ranks = self._holders[at]
            common = intersect(found, region)
            if common is not None:
                yield found, ranks, common
