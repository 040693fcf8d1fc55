"""Instance: the arguments of `balance`, checked once and turned into flat lists.

Items become indices, and candidate sets become *kinds*: equal sets share one kind, so that what
follows works on as many sets as there are, not on as many as there are items.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from operator import index
from typing import Final, Generic, TypeVar

from distcore.v1.errors import PlanError, Problem

Item = TypeVar("Item", bound=Hashable)
Number = int | float

POLICIES: Final = ("greedy", "optimal")
FLOAT_BITS: Final = 62
"""Where costs are floats, their sum has this many bits in the unit of `Instance.weights`."""


@dataclass(frozen=True, slots=True)
class Instance(Generic[Item]):
    """What is to be balanced; the lists are aligned with `items` unless said otherwise.

    `costs` and `initial` (one per rank) are all ints if `whole`, else all floats. `weights` and
    `base` are the same numbers as ints: equal to them, or, for floats, multiples of `2**-shift`
    rounded down.
    `kinds[i]` is the place in `sets` of the candidates of item i, a sorted tuple of ranks.
    `divisible[i]` says that item i may be divided and that this can be of use: it has two
    candidates, and twice `min_split` (or consists of units of 1).
    """

    items: list[Item]
    costs: list[float]
    weights: list[int]
    kinds: list[int]
    sets: list[tuple[int, ...]]
    initial: list[float]
    base: list[int]
    whole: bool
    shift: int
    num_ranks: int
    divisible: list[bool]
    min_split: int

    def amount(self, weight: int) -> Number:
        """What `weight`, in the unit of `weights`, is in the unit of `costs`."""
        return weight if self.whole else math.ldexp(weight, -self.shift)


def read_instance(
    items: Iterable[Item],
    costs: Mapping[Item, Number] | Iterable[Number],
    candidates: Mapping[Item, Iterable[int]] | Iterable[Iterable[int]] | None,
    num_ranks: int,
    *,
    policy: str,
    initial: Iterable[Number] | None,
    splittable: Collection[Item] | bool | None,
    min_split: int,
) -> Instance[Item]:
    """Check the arguments of `balance` and return them as one Instance.

    Raises:
        PlanError: with one Problem for each thing that is wrong.
    """
    reader = _Reader(list(items))
    reader.check_policy(policy)
    reader.check_items()
    ranks = reader.count("num_ranks", num_ranks)
    unit = reader.count("min_split", min_split)
    loads = reader.read_initial(initial, ranks)
    numbers = reader.read_costs(costs)
    kinds, sets = reader.read_candidates(candidates, ranks)
    whole = all(type(number) is int for values in (numbers, loads) for number in values)
    flags = reader.read_splittable(splittable, whole)
    if not whole:
        numbers, loads = reader.as_floats("costs", numbers), reader.as_floats("initial", loads)
    if reader.problems:
        raise PlanError(reader.problems)
    weights, base, shift = _as_ints(numbers, loads, whole)
    return Instance(
        items=reader.items,
        costs=list(numbers),
        weights=weights,
        kinds=kinds,
        sets=sets,
        initial=list(loads),
        base=base,
        whole=whole,
        shift=shift,
        num_ranks=ranks,
        divisible=_find_divisible(flags, weights, kinds, sets, unit),
        min_split=unit,
    )


def _as_ints(
    costs: list[Number], loads: list[Number], whole: bool
) -> tuple[list[int], list[int], int]:
    """Both lists as ints of one unit, and the exponent of that unit, negated."""
    if whole:
        return [int(cost) for cost in costs], [int(load) for load in loads], 0
    total = sum(costs) + sum(loads)
    if total == math.inf:
        raise PlanError(Problem("costs", "overflow", "their sum is more than a float can hold"))
    shift = FLOAT_BITS - math.frexp(total)[1]
    return (
        [int(math.ldexp(cost, shift)) for cost in costs],
        [int(math.ldexp(load, shift)) for load in loads],
        shift,
    )


def _find_divisible(
    flags: list[bool],
    weights: list[int],
    kinds: list[int],
    sets: list[tuple[int, ...]],
    unit: int,
) -> list[bool]:
    least = 2 * unit if unit > 1 else 1  # a whole unit too can be poured exactly where it is 1
    return [
        flag and weight >= least and len(sets[kind]) > 1
        for flag, weight, kind in zip(flags, weights, kinds, strict=True)
    ]


@dataclass(slots=True)
class _Reader(Generic[Item]):
    """Reads one argument after the other and collects what is wrong."""

    items: list[Item]
    problems: list[Problem] = field(default_factory=list)

    def _add(self, where: str, kind: str, text: str) -> None:
        self.problems.append(Problem(where, kind, text))

    def check_policy(self, policy: object) -> None:
        """Find a policy that does not exist."""
        if policy not in POLICIES:
            self._add("policy", "unknown", f"{policy!r} is none of {', '.join(POLICIES)}")

    def check_items(self) -> None:
        """Find the items that are listed twice; nothing can be read where they are no keys."""
        try:
            if len(set(self.items)) == len(self.items):
                return
        except TypeError as error:
            raise PlanError(Problem("items", "type", f"an item is no key: {error}")) from None
        seen: set[Item] = set()
        for item in self.items:
            if item in seen:
                self._add(f"item {item!r}", "duplicate", "is listed more than once")
            seen.add(item)

    def count(self, name: str, value: object) -> int:
        """Return `value` as an int of at least 1."""
        if isinstance(value, bool) or not isinstance(value, Integral):
            self._add(name, "type", f"{value!r} is not an int")
            return 1
        if value < 1:
            self._add(name, "range", f"{value!r} is below 1")
            return 1
        return int(value)

    def read_initial(self, initial: Iterable[Number] | None, num_ranks: int) -> list[Number]:
        """Return the load that each rank has before the first item."""
        if initial is None:
            return [0] * num_ranks
        values = list(initial)
        if len(values) != num_ranks:
            self._add("initial", "length", f"{len(values)} loads for {num_ranks} ranks")
        return self._numbers(values, lambda rank: f"initial load of rank {rank}")

    def read_costs(self, costs: Mapping[Item, Number] | Iterable[Number]) -> list[Number]:
        """Return the cost of every item."""
        values = self._align("cost", costs, 0)
        return self._numbers(values, lambda place: f"cost of item {self.items[place]!r}")

    def read_candidates(
        self,
        candidates: Mapping[Item, Iterable[int]] | Iterable[Iterable[int]] | None,
        num_ranks: int,
    ) -> tuple[list[int], list[tuple[int, ...]]]:
        """Return the kind of every item and the sets of ranks that the kinds stand for."""
        if candidates is None:
            return [0] * len(self.items), [tuple(range(num_ranks))]
        sets = _Sets(num_ranks)
        values = self._align("candidates", candidates, range(1))
        kinds = [sets.find(ranks) for ranks in values]
        for item, kind in zip(self.items, kinds, strict=True):
            if kind in sets.faults:
                self._add(f"candidates of item {item!r}", *sets.faults[kind])
        return kinds, list(sets.found)

    def read_splittable(
        self, splittable: Collection[Item] | bool | None, whole: bool
    ) -> list[bool]:
        """Return for every item whether it may be divided."""
        if splittable is None or isinstance(splittable, bool):
            flags = [bool(splittable)] * len(self.items)
        else:
            wanted = set(splittable)
            flags = [item in wanted for item in self.items]
            if sum(flags) < len(wanted):
                for item in sorted(map(repr, wanted.difference(self.items))):
                    self._add(f"splittable item {item}", "unknown", "is not among the items")
        if any(flags) and not whole:
            text = "only ints can be divided, but a cost or an initial load is a float"
            self._add("splittable", "type", text)
        return flags

    def as_floats(self, name: str, values: list[Number]) -> list[Number]:
        """Return all values as floats."""
        try:
            return [float(value) for value in values]
        except OverflowError:
            self._add(name, "overflow", "an int is more than a float can hold, beside floats")
            return [0.0] * len(values)

    def _align(self, what: str, given: Mapping[Item, _V] | Iterable[_V], blank: _V) -> list[_V]:
        """The value of every item, `blank` where there is none."""
        if not isinstance(given, Mapping):
            values = list(given)
            lacking = len(self.items) - len(values)
            if lacking:
                self._add(what, "length", f"{len(values)} entries for {len(self.items)} items")
            return (values + [blank] * lacking)[: len(self.items)]
        try:
            return [given[item] for item in self.items]
        except KeyError:
            missing = {item for item in self.items if item not in given}
        for item in self.items:
            if item in missing:
                self._add(f"item {item!r}", "missing", f"has no {what}")
        return [blank if item in missing else given[item] for item in self.items]

    def _numbers(self, values: list[Number], name: Callable[[int], str]) -> list[Number]:
        """The values as plain ints and floats, none of them negative or without end."""
        if set(map(type, values)) <= {int, float} and all(0 <= v < math.inf for v in values):
            return values
        return [self._number(value, name(place)) for place, value in enumerate(values)]

    def _number(self, value: object, name: str) -> Number:
        if isinstance(value, bool) or not isinstance(value, Real):
            self._add(name, "type", f"{value!r} is a {type(value).__name__}, not an int or a float")
            return 0
        number = index(value) if isinstance(value, Integral) else float(value)
        if 0 <= number < math.inf:
            return number
        self._add(name, "range", f"{number} is not a finite number of at least 0")
        return 0


_V = TypeVar("_V")


class _Sets:
    """Gives equal sets of ranks one number; an object seen before is not looked at again."""

    def __init__(self, num_ranks: int) -> None:
        self.found: dict[tuple[int, ...], int] = {}
        self.faults: dict[int, tuple[str, str]] = {}
        self._num_ranks = num_ranks
        self._by_id: dict[int, int] = {}
        self._by_value: dict[object, int] = {}

    def find(self, ranks: Iterable[int]) -> int:
        """The number of the set; `ranks` must stay alive as long as this object is used."""
        kind = self._by_id.get(id(ranks))
        if kind is None:
            kind = self._by_id[id(ranks)] = self._find_value(ranks)
        return kind

    def _find_value(self, ranks: Iterable[int]) -> int:
        try:
            value = ranks if isinstance(ranks, frozenset | range) else tuple(ranks)
            kind = self._by_value.get(value)
            if kind is None:
                kind = self._by_value[value] = self._add(value)
        except TypeError:
            fault = ("type", f"{ranks!r} is not a collection of ranks")
            kind = -1 - len(self.faults)
            self.faults[kind] = fault
        return kind

    def _add(self, ranks: Iterable[int]) -> int:
        ordered = tuple(sorted(set(map(index, ranks))))
        kind = self.found.setdefault(ordered, len(self.found))
        if not ordered:
            self.faults[kind] = ("empty", "there is none")
        outside = [rank for rank in ordered if not 0 <= rank < self._num_ranks]
        if outside:
            text = f"ranks {outside} lie outside 0 to {self._num_ranks - 1}"
            self.faults[kind] = ("range", text)
        return kind
