"""Flow: the least level to which costs fill the ranks when they can be divided at will.

Kinds of items pour into the ranks of their candidate sets. The least possible level is

    max over sets A of ranks of (what only A can take + what is in A already) / |A|

which is a maximum-flow problem per level tried: if not everything fits under a level, the cut
names a set A that is too full, and its value is the next level to try (the discrete Newton
method; each step is a true lower bound, so it may be stopped anywhere). Levels are fractions, and
amounts are multiplied by the denominator, so that all of it is exact in ints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations


@dataclass(slots=True)
class Effort:
    """How much work may still be done, in arcs looked at; counted, so that it repeats."""

    left: int

    def spend(self, work: int) -> bool:
        """Take `work` off; whether there was as much."""
        self.left -= work
        return self.left >= 0

    def part(self, most: int) -> Effort:
        """Take off at most `most` and return it."""
        taken = max(0, min(most, self.left))
        self.left -= taken
        return Effort(taken)


@dataclass(slots=True)
class Flow:
    """Amounts of kinds in groups, none above the room that a group has.

    `held[g]` maps a kind to its amount in group g, `room[g]` is what still fits there and
    `rest[k]` what is left of kind k. After `run`, `cut` holds the groups of an overfull set if
    not everything fits (None if it was not found out).
    """

    members: list[list[int]]
    room: list[int]
    rest: list[int]
    held: list[dict[int, int]] = field(default_factory=list)
    cut: set[int] | None = None
    _kind_level: list[int] = field(default_factory=list)
    _group_level: list[int] = field(default_factory=list)
    _next: list[int] = field(default_factory=list)

    def run(self, widths: Sequence[int], effort: Effort) -> bool:
        """Pour all that fits; whether nothing is left."""
        effort.spend(2 * sum(map(len, self.members)))
        starts = [Flow(self.members, list(self.room), list(self.rest)) for _ in range(2)]
        starts[0]._pour_in_turn()
        if any(starts[0].rest):
            starts[1]._pour_evenly(widths)
        best = min(starts, key=lambda flow: sum(flow.rest))
        self.room, self.rest, self.held = best.room, best.rest, best.held
        while any(self.rest):
            depth = self._find_levels(effort)
            if depth is None:
                return False
            self._next = [0] * len(self.rest)
            for kind, left in enumerate(self.rest):
                while left and effort.left >= 0 and self._push_from(kind, depth, effort):
                    left = self.rest[kind]
        return True

    def _pour_in_turn(self) -> None:
        """Fill group after group, each with those kinds first whose last group comes soonest.

        Nothing more would fit where the groups of every kind are consecutive (Glover, Maximum
        matching in a convex bipartite graph, 1967), as those of a flat buffer's tensors are.
        """
        self.held = [{} for _ in self.room]
        wanted: list[list[int]] = [[] for _ in self.room]
        for kind in sorted(range(len(self.rest)), key=lambda kind: self.members[kind][-1:]):
            for group in self.members[kind]:
                wanted[group].append(kind)
        for group, kinds in enumerate(wanted):
            for kind in kinds:
                self._fill(kind, group, self.room[group])
                if not self.room[group]:
                    break

    def _pour_evenly(self, widths: Sequence[int]) -> None:
        """Spread each kind over its groups, the emptiest first, to one level."""
        self.held = [{} for _ in self.room]
        for kind in sorted(range(len(self.rest)), key=lambda kind: len(self.members[kind])):
            groups = sorted(self.members[kind], key=lambda g: (-(self.room[g] // widths[g]), g))
            level, width, room = 0, 0, 0
            for group in groups:
                if width and self.room[group] // widths[group] < level:
                    break
                width += widths[group]
                room += self.room[group]
                level = (room - self.rest[kind]) // width
            for group in groups:
                self._fill(kind, group, self.room[group] - max(0, level + 1) * widths[group])
            for group in groups:  # what rounding left over goes wherever it fits
                self._fill(kind, group, self.room[group])

    def _fill(self, kind: int, group: int, most: int) -> None:
        amount = min(self.rest[kind], most)
        if amount > 0:
            self._put(kind, group, amount)
            self.room[group] -= amount
            self.rest[kind] -= amount

    def _put(self, kind: int, group: int, amount: int) -> None:
        self.held[group][kind] = self.held[group].get(kind, 0) + amount

    def _find_levels(self, effort: Effort) -> int | None:
        """Distances from the kinds with a rest; the least one at which a group has room."""
        self._kind_level = [0 if left else -1 for left in self.rest]
        self._group_level = [-1] * len(self.room)
        layer = [kind for kind, left in enumerate(self.rest) if left]
        depth = 0
        while layer:
            if not effort.spend(sum(len(self.members[kind]) for kind in layer)):
                return None
            reached = []
            for kind in layer:
                for group in self.members[kind]:
                    if self._group_level[group] < 0:
                        self._group_level[group] = depth
                        reached.append(group)
            if any(self.room[group] for group in reached):
                return depth
            depth += 1
            layer = []
            for group in reached:
                for kind, amount in self.held[group].items():
                    if amount and self._kind_level[kind] < 0:
                        self._kind_level[kind] = depth
                        layer.append(kind)
        self.cut = {group for group, level in enumerate(self._group_level) if level >= 0}
        return None

    def _push_from(self, source: int, depth: int, effort: Effort) -> bool:
        """Push along one shortest path from `source` to a group with room, if there is one."""
        kinds, groups = [source], list[int]()
        while kinds:
            kind = kinds[-1]
            group = self._next_group(kind, effort)
            if group is None:
                self._kind_level[kinds.pop()] = -1
                if groups:
                    groups.pop()
            elif self._group_level[group] == depth:
                if self.room[group]:
                    self._push(kinds, [*groups, group])
                    return True
                self._next[kind] += 1
            else:
                onward = self._next_kind(group)
                if onward is None:
                    self._next[kind] += 1
                else:
                    kinds.append(onward)
                    groups.append(group)
        return False

    def _next_group(self, kind: int, effort: Effort) -> int | None:
        members, level = self.members[kind], self._kind_level[kind]
        start = self._next[kind]
        for place in range(start, len(members)):
            if self._group_level[members[place]] == level:
                effort.spend(place - start + 1)
                self._next[kind] = place
                return members[place]
        effort.spend(len(members) - start)
        self._next[kind] = len(members)
        return None

    def _next_kind(self, group: int) -> int | None:
        wanted = self._group_level[group] + 1
        for kind, amount in self.held[group].items():
            if amount and self._kind_level[kind] == wanted:
                return kind
        return None

    def _push(self, kinds: list[int], groups: list[int]) -> None:
        """Move as much as fits along the path: each kind makes room for the one before it."""
        makes_room = list(zip(groups, kinds[1:], strict=False))
        amount = min(
            self.rest[kinds[0]],
            self.room[groups[-1]],
            *(self.held[group][kind] for group, kind in makes_room),
        )
        for kind, group in zip(kinds, groups, strict=True):
            self._put(kind, group, amount)
        for group, kind in makes_room:
            self.held[group][kind] -= amount
        self.rest[kinds[0]] -= amount
        self.room[groups[-1]] -= amount

    def thin(self, effort: Effort) -> None:
        """Pour the same amounts with less to and fro: two kinds share one group at most.

        Where two kinds are in two groups together, each can go further into one of them, until
        one of the four amounts is gone. No other amount appears, so what is thin stays thin.
        Stops early where the effort is spent.
        """
        spread = [0] * len(self.rest)
        for held in self.held:
            for kind, amount in held.items():
                spread[kind] += amount > 0
        together: dict[tuple[int, int], int] = {}
        for group, held in enumerate(self.held):
            kinds = sorted(kind for kind in held if held[kind] and spread[kind] > 1)
            if not effort.spend(len(kinds) ** 2 // 2):
                return
            for pair in combinations(kinds, 2):
                if not self._holds(group, pair):
                    continue
                other = together.setdefault(pair, group)
                if other == group or not self._holds(other, pair):
                    together[pair] = group
                else:
                    self._part(*pair, self.held[other], held)
                    together[pair] = other if self._holds(other, pair) else group

    def _holds(self, group: int, kinds: tuple[int, int]) -> bool:
        held = self.held[group]
        return bool(held.get(kinds[0]) and held.get(kinds[1]))

    def _part(self, one: int, two: int, here: dict[int, int], there: dict[int, int]) -> None:
        """Exchange what can be exchanged of kind `one` from here and kind `two` from there."""
        amount = min(here[one], there[two])
        for held, change in ((here, amount), (there, -amount)):
            held[one] -= change
            held[two] += change
