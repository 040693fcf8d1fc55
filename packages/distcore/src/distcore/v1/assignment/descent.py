"""Descent: improves an assignment step by step, each step lowering a rank that is the highest.

Three kinds of step, tried in this order: move an item to another rank, swap two items, or push a
chain, in which each rank takes an item of the one before and makes room by giving one to the
next. A step never lifts a rank to the height that it works on, so there is an end.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator, Sequence
from heapq import nsmallest
from typing import Final

from distcore.v1.assignment.flow import Effort
from distcore.v1.assignment.workload import Workload

_TARGETS: Final = 8
_NEIGHBOURS: Final = 2

Shift = tuple[int, int]
"""An item and the rank that it goes to."""

Origins = dict[int, tuple[int, int] | None]
"""For each rank that a chain may pass, the rank and the item that it comes from."""


class Descent:
    """An assignment on its way down; `owners` is its present state."""

    def __init__(self, work: Workload, owners: Sequence[int]) -> None:
        self.owners = list(owners)
        self.loads = work.loads(owners)
        self._work = work
        self._inside = [frozenset(ranks) for ranks in work.sets]
        self._on: list[list[tuple[int, int]]] = [[] for _ in self.loads]
        for item, owner in enumerate(owners):
            self._on[owner].append((work.weights[item], item))
        for held in self._on:
            held.sort()

    def run(self, least: int, effort: Effort) -> None:
        """Go down until `least` is reached, no step is left or the effort is spent."""
        while effort.left > 0:
            peak = max(self.loads)
            if peak <= least:
                return
            rank = self.loads.index(peak)
            step = self._find_pair(rank, effort)
            if step is None:
                step = self._find_chain(rank, (least + peak) // 2, effort)
            if step is None:
                step = self._find_chain(rank, peak - 1, effort)
            if step is None:
                return
            for item, target in step:
                self._shift(item, target)

    def _shift(self, item: int, target: int) -> None:
        weight, owner = self._work.weights[item], self.owners[item]
        self._on[owner].remove((weight, item))
        insort(self._on[target], (weight, item))
        self.loads[owner] -= weight
        self.loads[target] += weight
        self.owners[item] = target

    def _find_pair(self, rank: int, effort: Effort) -> list[Shift] | None:
        """The move or swap after which the higher of its two ranks is lowest."""
        peak = self.loads[rank]
        targets: dict[int, list[int]] = {}
        seen = set()
        best, step = peak, None
        for weight, item in reversed(self._on[rank]):
            kind = self._work.kinds[item]
            if (weight, kind) in seen:
                continue
            seen.add((weight, kind))
            if kind not in targets:
                targets[kind] = self._emptiest(kind, rank, effort)
            for other in targets[kind]:
                load = self.loads[other]
                for difference, back in self._exchanges(rank, other, weight, effort):
                    highest = max(peak - difference, load + difference)
                    if highest < best:
                        best, step = highest, [(item, other)]
                        if back is not None:
                            step.append((back, rank))
                if 8 * (peak - best) > 3 * (peak - load):  # close enough to half of the difference
                    return step
        return step

    def _emptiest(self, kind: int, rank: int, effort: Effort) -> list[int]:
        """The least-loaded candidates of a kind that lie below `rank`."""
        ranks = self._work.sets[kind]
        effort.spend(len(ranks))
        found = nsmallest(_TARGETS, ranks, key=self.loads.__getitem__)
        return [other for other in found if self.loads[other] < self.loads[rank]]

    def _exchanges(
        self, rank: int, other: int, weight: int, effort: Effort
    ) -> Iterator[tuple[int, int | None]]:
        """What `rank` gets rid of if `weight` goes to `other` and nothing or an item comes back."""
        effort.spend(2 * _NEIGHBOURS + 1)
        yield weight, None
        held = self._on[other]
        half = (self.loads[rank] - self.loads[other]) // 2
        place = bisect_left(held, (weight - half, -1))
        for back, item in held[max(0, place - _NEIGHBOURS) : place + _NEIGHBOURS]:
            if back < weight and rank in self._inside[self._work.kinds[item]]:
                yield weight - back, item

    def _find_chain(self, start: int, ceiling: int, effort: Effort) -> list[Shift] | None:
        """Shifts that bring `start` down to `ceiling` and lift no other rank above it."""
        came: Origins = {start: None}
        taken = {start: 0}
        lightest: dict[int, int] = {}
        queue = deque([start])
        while queue and effort.left > 0:
            rank = queue.popleft()
            excess = self.loads[rank] + taken[rank] - ceiling
            held = self._on[rank]
            for weight, item in held[bisect_left(held, (excess, -1)) :]:
                kind = self._work.kinds[item]
                if lightest.get(kind, weight + 1) <= weight:
                    continue
                lightest[kind] = weight
                effort.spend(len(self._work.sets[kind]))
                for other in self._work.sets[kind]:
                    fits = self.loads[other] + weight <= ceiling
                    if fits and other not in self._path(came, rank):
                        return self._unwind(came, rank, (item, other))
                    if other not in came:
                        came[other] = (rank, item)
                        taken[other] = weight
                        queue.append(other)
        return None

    def _unwind(self, came: Origins, rank: int, last: Shift) -> list[Shift]:
        """The shifts of a chain that ends with `last`, out of `rank`."""
        shifts = [last]
        for target in self._path(came, rank):
            origin = came[target]
            if origin is not None:
                shifts.append((origin[1], target))
        return shifts

    def _path(self, came: Origins, rank: int) -> Iterator[int]:
        """The ranks of a chain, from `rank` back to its start."""
        yield rank
        while (origin := came[rank]) is not None:
            rank = origin[0]
            yield rank
