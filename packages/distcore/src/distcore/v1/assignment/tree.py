"""Tree: tries every assignment that could still be better, until none is left.

Depth first, an item per depth, the heaviest first. A branch is left where the item does not fit
below the best makespan known, where what is to come does not fit below it in total, or where the
same loads were reached before: ranks that can take the same items may be exchanged.
"""

from __future__ import annotations

from typing import Final

from distcore.v1.assignment.flow import Effort
from distcore.v1.assignment.groups import Groups
from distcore.v1.assignment.workload import Workload

_SLOT_WORK: Final = 4


class Tree:
    """A search for an assignment below `makespan`, which no rank has reached without it.

    `owners` is the best that it found, `makespan` then that of it; None if there was none.
    """

    def __init__(self, work: Workload, makespan: int, least: int) -> None:
        self.owners: list[int] | None = None
        self.makespan = makespan
        self._least = least
        self._work = work
        self._order = sorted(
            range(len(work.weights)),
            key=lambda item: (-work.weights[item], len(work.sets[work.kinds[item]])),
        )
        used = sorted({rank for kind in work.kinds for rank in work.sets[kind]})
        groups = Groups.of(work.sets, len(work.base)).group_of
        self._slots = [(groups[rank] or 0, rank) for rank in used]
        self._loads = list(work.base)
        self._path: list[int] = []
        self._rest = sum(work.weights)
        self._seen: set[tuple[int, tuple[tuple[int, int], ...]]] = set()

    def run(self, effort: Effort) -> bool:
        """Search; whether nothing better than `makespan` was left untried."""
        return self._visit(effort)

    def _visit(self, effort: Effort) -> bool:
        depth = len(self._path)
        if depth == len(self._order):
            self.makespan = max(self._loads)
            self.owners = [rank for _, rank in sorted(zip(self._order, self._path, strict=True))]
            return True
        if not effort.spend(_SLOT_WORK * len(self._slots)):
            return False
        if self._is_hopeless(depth):
            return True
        item = self._order[depth]
        weight = self._work.weights[item]
        ranks = self._work.sets[self._work.kinds[item]]
        for rank in sorted(ranks, key=self._loads.__getitem__):
            if self.makespan <= self._least or self._loads[rank] + weight >= self.makespan:
                break
            self._place(rank, weight)
            finished = self._visit(effort)
            self._take_back(rank, weight)
            if not finished:
                return False
        return True

    def _place(self, rank: int, weight: int) -> None:
        self._loads[rank] += weight
        self._rest -= weight
        self._path.append(rank)

    def _take_back(self, rank: int, weight: int) -> None:
        self._loads[rank] -= weight
        self._rest += weight
        self._path.pop()

    def _is_hopeless(self, depth: int) -> bool:
        highest = self.makespan - 1
        room = sum(highest - self._loads[rank] for _, rank in self._slots)
        if room < self._rest:
            return True
        state = (depth, tuple(sorted((group, self._loads[rank]) for group, rank in self._slots)))
        if state in self._seen:
            return True
        self._seen.add(state)
        return False
