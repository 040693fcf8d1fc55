"""Balance: which rank takes which item, so that the highest load is low.

The rule is greedy: each item, in the order given, goes to the candidate with the least load so
far. What the order means is the caller's business: readers of a checkpoint and owners of
optimizer work use the same loop. With `policy="optimal"` the highest load is the least that can
be found. Either way the result has a lower bound that holds for every assignment.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Literal

from distcore.v1.assignment.draft import Draft
from distcore.v1.assignment.instance import Instance, Item, Number, read_instance
from distcore.v1.assignment.shares import Share


@dataclass(frozen=True, slots=True)
class Assignment(Generic[Item]):
    """Which rank takes which item, what load that makes, and how low it could be at best.

    - `owner`: item -> rank, in the order in which items were assigned. Of a divided item it is
      the rank with the largest share, the lowest of them where there are several.
    - `shares`: item -> `(rank, amount)` for every rank that takes some of it, in rank order; the
      amounts add up to the cost. An item that was not divided has one share.
    - `loads`: per rank, what it takes and the initial load.
    - `lower_bound`: no assignment of these items has a lower makespan (for floats, up to their
      rounding). Where it equals `makespan`, that is proven to be the least.
    """

    owner: dict[Item, int]
    shares: dict[Item, tuple[tuple[int, Number], ...]]
    loads: tuple[Number, ...]
    lower_bound: Number

    @property
    def makespan(self) -> Number:
        """The highest load."""
        return max(self.loads)

    @property
    def ratio(self) -> float:
        """How many times the lower bound the makespan is; 1.0 where both are 0."""
        return self.makespan / self.lower_bound if self.lower_bound else 1.0


def balance(
    items: Iterable[Item],
    costs: Mapping[Item, Number] | Iterable[Number],
    candidates: Mapping[Item, Iterable[int]] | Iterable[Iterable[int]] | None,
    num_ranks: int,
    *,
    policy: Literal["greedy", "optimal"] = "greedy",
    initial: Iterable[Number] | None = None,
    splittable: Collection[Item] | bool | None = None,
    min_split: int = 1,
) -> Assignment[Item]:
    """Assign every item to one of its candidates, the ranks 0 to `num_ranks` - 1.

    `costs` and `candidates` are mappings, or aligned with `items`; without candidates, any rank
    may take any item. Ints are added up exactly; if any cost or initial load is a float, all are
    taken as floats. The same input gives the same result everywhere.

    - `greedy`: each item in turn goes to its candidate with the least load so far, `initial`
      included, the lowest of them where there are several.
    - `optimal`: the least makespan, proven so where that can be done with a bounded number of
      steps, else the best of greedy, longest first, multifit, and steps down from these. It is
      never above greedy, and greedy's own assignment where nothing better is found.

    `splittable` names the items (True: all) whose cost, an int, may be divided between ranks in
    whole units of `min_split`; one share takes the remainder too. `greedy` assigns the other
    items first; then each of these, in turn, stays whole if it lies below the lower bound or the
    makespan so far, and else is divided between its emptiest candidates. `optimal` reaches the
    least makespan up to the rounding to units if all items are splittable, and looks for the
    best place of the others if not. (The flow that shows it is given up where it takes too many
    steps, as with very many different sets of candidates; `ratio` tells what was reached.)

    Raises:
        PlanError: an item is listed twice, or lacks a cost or a candidate; a cost is negative or
            not finite; a rank does not exist; the lengths do not match. It lists all of these.

    >>> found = balance("abc", [5, 3, 3], {"a": [0, 1], "b": [0, 1], "c": [1]}, 2)
    >>> found.owner, found.loads, found.lower_bound
    ({'a': 0, 'b': 1, 'c': 1}, (5, 6), 6)
    >>> balance("abc", [5, 3, 3], None, 2, splittable="a", policy="optimal").shares["a"]
    ((0, 3), (1, 2))
    """
    instance = read_instance(
        items,
        costs,
        candidates,
        num_ranks,
        policy=policy,
        initial=initial,
        splittable=splittable,
        min_split=min_split,
    )
    draft = Draft(instance)
    greedy = _assignment(instance, draft, [*draft.whole, *draft.shares])
    if policy == "greedy":
        return greedy
    draft.improve()
    best = _assignment(instance, draft, range(len(instance.items)))
    if best.makespan < greedy.makespan:
        return best
    return replace(greedy, lower_bound=min(best.lower_bound, greedy.makespan))


def _assignment(
    instance: Instance[Item], draft: Draft[Item], order: Sequence[int]
) -> Assignment[Item]:
    """What the draft holds, for the user: costs as they were given, added up in `order`."""
    items, costs = instance.items, instance.costs
    loads: list[Number] = list(instance.initial)
    rank_of = dict(zip(draft.whole, draft.owners, strict=True))
    rank_of.update((place, _largest(found)) for place, found in draft.shares.items())
    shares: dict[Item, tuple[tuple[int, Number], ...]] = {
        items[place]: ((rank_of[place], costs[place]),) for place in order
    }
    shares.update((items[place], tuple(found)) for place, found in draft.shares.items())
    for found in shares.values():
        for rank, amount in found:
            loads[rank] += amount
    owner = {items[place]: rank_of[place] for place in order}
    bound = instance.amount(draft.bound)
    proven = draft.bound == draft.makespan
    return Assignment(owner, shares, tuple(loads), max(loads) if proven else min(bound, max(loads)))


def _largest(shares: Iterable[Share]) -> int:
    """The rank with the largest share, the lowest of them where there are several."""
    return max(shares, key=lambda share: (share[1], -share[0]))[0]
