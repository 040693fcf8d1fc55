"""Groups: ranks that are in the same candidate sets, since nothing can tell them apart.

Groups are numbered along a line on which each set is a run, or as close to one as is easily
found: where the sets are runs, what fits can be told in one pass (see `flow`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Final

_MOST_ARCS: Final = 200_000
"""Above this, no flow is looked for that would gain by the line."""


@dataclass(frozen=True, slots=True)
class Groups:
    """Ranks by the kinds that they can take.

    `ranks[g]` are the ranks of group g, `members[k]` the groups of kind k, ascending, and
    `group_of[rank]` is None for a rank that is in no set.
    """

    ranks: list[list[int]]
    members: list[list[int]]
    group_of: list[int | None]

    @classmethod
    def of(cls, sets: Sequence[Iterable[int]], num_ranks: int) -> Groups:
        """Group the ranks 0 to num_ranks - 1."""
        kinds_of: list[list[int]] = [[] for _ in range(num_ranks)]
        for kind, found in enumerate(sets):
            for rank in found:
                kinds_of[rank].append(kind)
        alike: dict[tuple[int, ...], list[int]] = {}
        for rank, kinds in enumerate(kinds_of):
            if kinds:
                alike.setdefault(tuple(kinds), []).append(rank)
        ranks, kinds_at = list(alike.values()), list(alike)
        line = _line_up(kinds_at, len(sets))
        ranks, kinds_at = [ranks[group] for group in line], [kinds_at[group] for group in line]
        group_of: list[int | None] = [None] * num_ranks
        for group, found in enumerate(ranks):
            for rank in found:
                group_of[rank] = group
        return cls(ranks, _members(kinds_at, len(sets)), group_of)

    @property
    def arcs(self) -> int:
        """The number of pairs of a kind and a group that can take it."""
        return sum(map(len, self.members))

    def sums(self, values: Sequence[int]) -> list[int]:
        """The sum per group of a value per rank."""
        return [sum(values[rank] for rank in ranks) for ranks in self.ranks]


def _members(kinds_at: Iterable[Iterable[int]], num_kinds: int) -> list[list[int]]:
    members: list[list[int]] = [[] for _ in range(num_kinds)]
    for group, kinds in enumerate(kinds_at):
        for kind in kinds:
            members[kind].append(group)
    return members


def _line_up(kinds_at: Sequence[Sequence[int]], num_kinds: int) -> Sequence[int]:
    """The groups in an order that leaves few gaps in the kinds: as they are, if there is none."""
    given = range(len(kinds_at))
    if sum(map(len, kinds_at)) > _MOST_ARCS:
        return given
    members = _members(kinds_at, num_kinds)
    if not _gaps(given, members):
        return given
    far = _walk(kinds_at, members, given)
    found = _walk(kinds_at, members, far[::-1])
    return found if _gaps(found, members) < _gaps(given, members) else given


def _gaps(line: Sequence[int], members: Iterable[Sequence[int]]) -> int:
    """How many groups lie between the groups of a kind without being its own, in total."""
    place = {group: number for number, group in enumerate(line)}
    total = 0
    for groups in members:
        if groups:
            places = [place[group] for group in groups]
            total += max(places) - min(places) + 1 - len(places)
    return total


def _walk(
    kinds_at: Sequence[Sequence[int]], members: Sequence[Sequence[int]], seeds: Iterable[int]
) -> list[int]:
    """Take the groups kind by kind, next the kind of which fewest groups are still missing."""
    missing = list(map(len, members))
    heap: list[tuple[int, int]] = []
    line: dict[int, None] = {}

    def take(group: int) -> None:
        if group not in line:
            line[group] = None
            for kind in kinds_at[group]:
                missing[kind] -= 1
                heappush(heap, (missing[kind], kind))

    for seed in seeds:
        take(seed)
        while heap:
            count, kind = heappop(heap)
            if count == missing[kind]:
                for group in members[kind]:
                    take(group)
    return list(line)
