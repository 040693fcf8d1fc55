"""Search: the least makespan of items that stay whole, or the best that can be had in time.

First a few assignments from scratch; the best of them goes down step by step; then, if there are
few items, everything that could still be better is tried. Every step is counted and none is
random, so the same input gives the same result on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from typing import Final

from distcore.v1.assignment.bounds import Demand, Level, least_level
from distcore.v1.assignment.descent import Descent
from distcore.v1.assignment.flow import Effort
from distcore.v1.assignment.greedy import assign_in_order
from distcore.v1.assignment.groups import Groups
from distcore.v1.assignment.tree import Tree
from distcore.v1.assignment.workload import Workload

_LEVEL_EFFORT: Final = 3_000_000
_FIT_EFFORT: Final = 1_000_000
_TREE_EFFORT: Final = 600_000
FEW_ITEMS: Final = 2000
_TREE_ITEMS: Final = 64


@dataclass(frozen=True, slots=True)
class Found:
    """One rank per item, the makespan, and whether nothing lower exists."""

    owners: list[int]
    makespan: int
    proven: bool


def find_least(
    work: Workload,
    first: Sequence[int],
    least: int,
    groups: Groups,
    *,
    effort: Effort,
    level: Level | None = None,
) -> Found:
    """The best assignment found; `first` itself where nothing is better.

    The search ends at `least`, a lower bound of what matters to the caller. `effort` is for the
    way down and the last trials. `level`, that of the divided items in `groups`, shows where to
    start; without it, it is computed.
    """
    best, peak = list(first), max(work.loads(first))
    if peak <= least:
        return Found(best, peak, True)
    if level is None:
        demand = Demand(work.amounts, groups, work.base)
        level = least_level(demand, Effort(_LEVEL_EFFORT), work.loads(first))
    starts = [best, *_starts(work, groups, level)]
    fitted = _multifit(work, least, peak, Effort(_FIT_EFFORT))
    if fitted is not None:
        starts.append(fitted)
    starts.sort(key=lambda owners: max(work.loads(owners)))
    for owners in starts if len(best) <= FEW_ITEMS else starts[:1]:
        descent = Descent(work, owners)
        descent.run(least, effort)
        if max(descent.loads) < peak:
            best, peak = descent.owners, max(descent.loads)
    proven = peak <= least
    if not proven and len(best) <= _TREE_ITEMS:
        tree = Tree(work, peak, least)
        proven = tree.run(effort.part(_TREE_EFFORT))
        best, peak = tree.owners or best, tree.makespan
    return Found(best, peak, proven)


def _starts(work: Workload, groups: Groups, level: Level) -> Iterator[list[int]]:
    """Whole assignments, each made in one go."""
    for order in (work.longest_first, work.tightest_first):
        weights = [work.weights[item] for item in order]
        kinds = [work.kinds[item] for item in order]
        ranks = assign_in_order(weights, kinds, work.sets, list(work.base))
        yield [rank for _, rank in sorted(zip(order, ranks, strict=True))]
    if level.flow is not None:
        yield _follow(work, groups, level)


def _follow(work: Workload, groups: Groups, level: Level) -> list[int]:
    """Where the divided items would lie: each item goes where most of its kind is still due."""
    scale = level.value.denominator
    due: list[list[tuple[int, int]]] = [[] for _ in work.sets]
    for group, held in enumerate(level.flow.held if level.flow else ()):
        for kind, amount in held.items():
            due[kind].append((-amount, group))
    heaps = [[(work.base[rank], rank) for rank in ranks] for ranks in groups.ranks]
    for heap in (*due, *heaps):
        heapify(heap)
    owners = [0] * len(work.weights)
    for item in work.longest_first:
        kind, weight = work.kinds[item], work.weights[item]
        if not due[kind]:  # nothing of this kind weighs anything
            owners[item] = work.sets[kind][0]
            continue
        left, group = due[kind][0]
        heapreplace(due[kind], (left + weight * scale, group))
        load, owners[item] = heaps[group][0]
        heapreplace(heaps[group], (load + weight, owners[item]))
    return owners


def _multifit(work: Workload, least: int, peak: int, effort: Effort) -> list[int] | None:
    """The lowest ceiling below `peak` under which first fit finds room for all, by bisection."""
    order, best = work.tightest_first, None
    while least < peak:
        ceiling = (least + peak) // 2
        fitted = _first_fit(work, order, ceiling, effort)
        if effort.left < 0:
            return best
        if fitted is None:
            least = ceiling + 1
        else:
            best, peak = fitted, ceiling
    return best


def _first_fit(
    work: Workload, order: Sequence[int], ceiling: int, effort: Effort
) -> list[int] | None:
    loads = list(work.base)
    owners = [0] * len(order)
    for item in order:
        weight, ranks = work.weights[item], work.sets[work.kinds[item]]
        highest = ceiling - weight
        for tried, rank in enumerate(ranks, start=1):
            if loads[rank] <= highest:
                effort.spend(tried)
                loads[rank] += weight
                owners[item] = rank
                break
        else:
            return None
        if effort.left < 0:
            return None
    return owners
