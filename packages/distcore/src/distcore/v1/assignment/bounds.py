"""Bounds: what no assignment can stay below, and the level at which divided items would lie.

Three bounds, of which the highest holds:

- the level of `flow`: some set of ranks must take what nobody else can, and is no emptier than
  its average;
- the largest item that cannot be divided, on the emptiest of its candidates;
- the pigeonhole: of the k * n + 1 largest items that only n given ranks can take, k + 1 meet on
  one of them.

All loads are multiples of the greatest common divisor of all numbers, so the first is rounded up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, chain
from math import ceil, gcd
from typing import Final

from distcore.v1.assignment.flow import Effort, Flow
from distcore.v1.assignment.groups import Groups
from distcore.v1.assignment.instance import Instance, Item

_MANY_KINDS: Final = 300
_NEWTON_STEPS: Final = 64
_LEAST_PASSES: Final = 6
_SORTED_ITEMS: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Level:
    """The least level of divided items, or a lower bound of it where `flow` is None.

    `flow` reaches the level; its amounts are multiplied by the denominator of `value`. `tight`
    are the groups of the set of ranks that the level is the average of.
    """

    value: Fraction
    flow: Flow | None
    tight: frozenset[int]


@dataclass(frozen=True, slots=True)
class Demand:
    """What is poured: `amounts[k]` of kind k into `groups`, over `base` (a load per rank)."""

    amounts: list[int]
    groups: Groups
    base: Sequence[int]

    def average(self, groups: Iterable[int]) -> Fraction:
        """The load per rank if the ranks of `groups` take only what no other rank can."""
        inside = frozenset(groups)
        taken = sum(
            amount
            for amount, members in zip(self.amounts, self.groups.members, strict=True)
            if amount and inside.issuperset(members)
        )
        ranks = [rank for group in inside for rank in self.groups.ranks[group]]
        return Fraction(taken + sum(self.base[rank] for rank in ranks), len(ranks))

    def fullest_prefix(self, order: Sequence[int]) -> list[int]:
        """The first few groups of `order`, as many as give the highest average."""
        place = {group: number for number, group in enumerate(order)}
        taken = [0] * len(order)
        for amount, members in zip(self.amounts, self.groups.members, strict=True):
            if amount:
                taken[max(place[group] for group in members)] += amount
        best, best_load, best_width, load, width = 1, -1, 1, 0, 0
        for number, group in enumerate(order):
            ranks = self.groups.ranks[group]
            load += taken[number] + sum(self.base[rank] for rank in ranks)
            width += len(ranks)
            if load * best_width > best_load * width:
                best, best_load, best_width = number + 1, load, width
        return list(order[:best])

    def pour(self, level: Fraction, effort: Effort) -> Flow:
        """Everything that fits under `level`, which no rank lies above."""
        widths = list(map(len, self.groups.ranks))
        used = self.groups.sums(self.base)
        flow = Flow(
            members=self.groups.members,
            room=[
                level.numerator * width - level.denominator * load
                for width, load in zip(widths, used, strict=True)
            ],
            rest=[level.denominator * amount for amount in self.amounts],
        )
        flow.run(widths, effort)
        return flow


def least_level(demand: Demand, effort: Effort, loads: Sequence[int]) -> Level:
    """The least level for `demand`; `loads`, those of any assignment, tell where to begin."""
    groups = demand.groups
    value, tight = Fraction(max(demand.base)), frozenset[int]()
    for start in _starts(demand, loads):
        average = demand.average(start)
        if average > value:
            value, tight = average, frozenset(start)
    for _ in range(_NEWTON_STEPS if effort.left > _LEAST_PASSES * groups.arcs else 0):
        flow = demand.pour(value, effort)
        if not any(flow.rest):
            return Level(value, flow, tight)
        if flow.cut is None:
            break
        value, tight = demand.average(flow.cut), frozenset(flow.cut)
    return Level(value, None, tight)


def _starts(demand: Demand, loads: Sequence[int]) -> Iterator[Sequence[int]]:
    """Sets of groups that are likely to be the fullest."""
    groups = demand.groups
    if not groups.ranks:
        return
    fill = [
        total // len(ranks) for total, ranks in zip(groups.sums(loads), groups.ranks, strict=True)
    ]
    order = sorted(range(len(groups.ranks)), key=lambda group: -fill[group])
    yield order
    yield demand.fullest_prefix(order)
    if len(groups.members) <= _MANY_KINDS:
        yield from (members for members in groups.members if members)


def pigeonhole(by_kind: Sequence[list[int]], demand: Demand, tight: Iterable[int]) -> int:
    """The highest pigeonhole bound of some sets of groups; `by_kind` are undivided weights."""
    groups = demand.groups
    best, effort = 0, Effort(_SORTED_ITEMS)
    some = groups.members if len(groups.members) <= _MANY_KINDS else ()
    for room in dict.fromkeys(map(frozenset, (range(len(groups.ranks)), tight, *some))):
        ranks = [rank for group in room for rank in groups.ranks[group]]
        inside = [
            held
            for held, members in zip(by_kind, groups.members, strict=True)
            if held and room.issuperset(members)
        ]
        count = sum(map(len, inside))
        if count > len(ranks) > 0 and effort.spend(count):
            least = min(demand.base[rank] for rank in ranks)
            best = max(best, least + _meeting(list(chain.from_iterable(inside)), len(ranks)))
    return best


def _meeting(weights: list[int], holes: int) -> int:
    """What meets in one of `holes` at least."""
    sums = [0, *accumulate(sorted(weights, reverse=True))]
    return max(
        sums[first + 1] - sums[first - count]
        for count, first in enumerate(range(holes, len(weights), holes), start=1)
    )


def lower_bound(instance: Instance[Item], level: Level, demand: Demand) -> int:
    """The highest of the three bounds, in the unit of the instance's weights."""
    by_kind: list[list[int]] = [[] for _ in instance.sets]
    for weight, kind, divisible in zip(
        instance.weights, instance.kinds, instance.divisible, strict=True
    ):
        if not divisible:
            by_kind[kind].append(weight)
    largest = max(
        (
            max(weights) + min(instance.base[rank] for rank in ranks)
            for weights, ranks in zip(by_kind, instance.sets, strict=True)
            if weights
        ),
        default=0,
    )
    unit = 1 if any(instance.divisible) else gcd(*instance.weights, *instance.base)
    filled = unit * ceil(level.value / unit) if unit else 0
    return max(filled, largest, pigeonhole(by_kind, demand, level.tight))
