"""Shares: how items that may be divided are divided, in whole units.

An item of cost c has c // unit units; one of its shares takes what is left over too. So a share is
never below the unit, and all of an item's shares but one are multiples of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from heapq import heapify, heapreplace
from math import ceil
from typing import Final

from distcore.v1.assignment.bounds import Demand, least_level
from distcore.v1.assignment.flow import Effort, Flow
from distcore.v1.assignment.greedy import Emptiest
from distcore.v1.assignment.groups import Groups
from distcore.v1.assignment.instance import Instance, Item

Share = tuple[int, int]
"""A rank and the amount that it takes."""

_FLOW_EFFORT: Final = 4_000_000
_TRIES: Final = 8


def divide(
    ranks: Iterable[int], loads: Sequence[int], cost: int, unit: int, level: int
) -> list[Share]:
    """Divide one item between `ranks`, which have `loads` already; in rank order.

    The emptiest ranks are filled up to `level`, one after the other, so that there are few
    shares; where they cannot hold it all, the item is spread evenly over them instead.
    """
    units, extra = divmod(cost, unit)
    order = sorted(ranks, key=lambda rank: (loads[rank], rank))
    counts: dict[int, int] = {}
    left = units
    for rank in order:
        counts[rank] = min(left, max(0, (level - loads[rank]) // unit))
        left -= counts[rank]
        if not left:
            break
    if left:
        counts = _spread(order, loads, units, unit)
    taken = {rank: count * unit for rank, count in counts.items() if count}
    taken[min(taken, key=lambda rank: (loads[rank] + taken[rank], rank))] += extra
    return sorted(taken.items())


def _spread(order: list[int], loads: Sequence[int], units: int, unit: int) -> dict[int, int]:
    """Units per rank so that the highest load is least; `order` is by load."""
    width, total = 0, units * unit
    for rank in order:
        if width and total <= width * loads[rank]:
            break
        width, total = width + 1, total + loads[rank]
    level = total // width
    counts = {rank: max(0, (level - loads[rank]) // unit) for rank in order[:width]}
    heap = [(loads[rank] + count * unit, rank) for rank, count in counts.items()]
    heapify(heap)
    for _ in range(units - sum(counts.values())):
        load, rank = heap[0]
        heapreplace(heap, (load + unit, rank))
        counts[rank] += 1
    return counts


def divide_in_order(
    instance: Instance[Item], items: Sequence[int], loads: list[int], level: int
) -> dict[int, list[Share]]:
    """Divide `items` one after the other, but only those that would stand out as a whole.

    An item stays whole where its least-loaded candidate then does not lie above the highest rank,
    nor above `level`. `loads` holds the loads with all items afterwards.
    """
    costs = [instance.weights[item] for item in items]
    emptiest = Emptiest(instance.sets, loads, costs)
    shares: dict[int, list[Share]] = {}
    peak = max(*loads, level)
    for item, cost in zip(items, costs, strict=True):
        rank = emptiest.find(instance.kinds[item])
        found = [(rank, cost)]
        if loads[rank] + cost > peak:
            ranks = instance.sets[instance.kinds[item]]
            found = divide(ranks, loads, cost, instance.min_split, peak)
        for rank, amount in found:
            emptiest.put(rank, amount)
            peak = max(peak, loads[rank])
        shares[item] = found
    return shares


def divide_evenly(
    instance: Instance[Item], items: Sequence[int], loads: list[int], groups: Groups
) -> dict[int, list[Share]] | None:
    """Divide `items` so that the highest load is least, up to the rounding to whole units.

    `loads` holds the loads with all items afterwards. None, and `loads` as they were, where this
    would be too much work.
    """
    by_kind: list[list[int]] = [[] for _ in instance.sets]
    for item in items:
        by_kind[instance.kinds[item]].append(item)
    amounts = [sum(instance.weights[item] for item in held) for held in by_kind]
    demand, effort = Demand(amounts, groups, list(loads)), Effort(_FLOW_EFFORT)
    least = least_level(demand, effort, loads)
    level, flow = ceil(least.value), least.flow
    if flow is not None and least.value != level:
        flow = demand.pour(Fraction(level), effort)
    if flow is None or any(flow.rest):
        return None
    flow.thin(Effort(_FLOW_EFFORT))
    shares: dict[int, list[Share]] = {}
    for held, parts in zip(by_kind, _by_rank(flow, demand, level), strict=True):
        weights = [instance.weights[item] for item in held]
        shares.update(zip(held, _cut(weights, parts, instance.min_split), strict=True))
    for found in shares.values():
        for rank, amount in found:
            loads[rank] += amount
    _settle(instance, shares, loads)
    return shares


def _by_rank(flow: Flow, demand: Demand, level: int) -> list[list[Share]]:
    """The amounts of each kind per rank, in rank order."""
    parts: list[list[Share]] = [[] for _ in demand.amounts]
    for ranks, held in zip(demand.groups.ranks, flow.held, strict=True):
        rooms = [[rank, level - demand.base[rank]] for rank in ranks]
        for kind, amount in sorted(held.items()):
            while amount:
                rank, room = rooms[-1]
                taken = min(amount, room)
                if taken:
                    parts[kind].append((rank, taken))
                    amount -= taken
                    rooms[-1][1] -= taken
                if not rooms[-1][1]:
                    rooms.pop()
    return [sorted(found) for found in parts]


def _cut(weights: list[int], parts: list[Share], unit: int) -> list[list[Share]]:
    """Lay the items in a row and cut it where the ranks' parts end, or at the next legal place."""
    shares: list[list[Share]] = [[] for _ in weights]
    item, left, due = 0, weights[0] if weights else 0, 0
    for rank, amount in parts:
        due += amount
        while item < len(weights):
            last = rank == parts[-1][0]
            taken = left if last else _nearest(left, due, unit)
            if taken:
                shares[item].append((rank, taken))
            due -= taken
            left -= taken
            if left:
                break
            item += 1
            left = weights[item] if item < len(weights) else 0
    return shares


def _nearest(left: int, due: int, unit: int) -> int:
    """How much of `left` to take so that it is next to `due`, and both parts are whole units."""
    if due <= 0:
        return 0
    if due >= left:
        return left
    units = min((2 * due + unit) // (2 * unit), left // unit)
    below = min(units, left // unit - 1) * unit
    return left if left - due < due - below else below


def _settle(instance: Instance[Item], shares: dict[int, list[Share]], loads: list[int]) -> None:
    """Take back what rounding did: divide items on the highest rank anew while that lowers it."""
    on: dict[int, set[int]] = {}
    for item, found in shares.items():
        for rank, _ in found:
            on.setdefault(rank, set()).add(item)
    for _ in range(2 * len(loads) if instance.min_split > 1 else 0):
        held = sorted(on.get(loads.index(max(loads)), ()))
        largest = sorted(held, key=lambda item: -instance.weights[item])[:_TRIES]
        if not any(_divide_anew(instance, shares, loads, item, on) for item in largest):
            return


def _divide_anew(
    instance: Instance[Item],
    shares: dict[int, list[Share]],
    loads: list[int],
    item: int,
    on: dict[int, set[int]],
) -> bool:
    """Divide one item again; whether its ranks all lie below the highest load then."""
    peak, old = max(loads), shares[item]
    for rank, amount in old:
        loads[rank] -= amount
    ranks = instance.sets[instance.kinds[item]]
    new = divide(ranks, loads, instance.weights[item], instance.min_split, peak - 1)
    lowered = all(loads[rank] + amount < peak for rank, amount in new)
    for rank, amount in new if lowered else old:
        loads[rank] += amount
    if lowered:
        shares[item] = new
        for rank, _ in old:
            on[rank].discard(item)
        for rank, _ in new:
            on.setdefault(rank, set()).add(item)
    return lowered
