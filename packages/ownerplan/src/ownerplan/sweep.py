"""Sweep: the best owners for the tensors of one flat buffer, exactly.

Two ranks hold parts of at most one tensor in common, so the tensors that are cut form a path: each
shares its first rank with the one before at most, and its last with the one behind. Whether all
fit under a ceiling is then found from left to right, each tensor going to the first of its ranks
that has room: the later ones lose nothing by it. The least ceiling is one of at most four sums
per rank, and found by bisection. A second sweep finds the owners that move fewest elements
under a given ceiling.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stretch:
    """A tensor of the buffer: its cost, and the ranks that hold it with how much each holds.

    `ranks` are positions in buffer order. Stretches are listed in buffer order too.
    """

    cost: float
    ranks: tuple[int, ...]
    held: tuple[int, ...]


def least_ceiling(stretches: Sequence[Stretch], initial: Sequence[float]) -> float:
    """The least makespan, where each stretch goes to one of its ranks; loads start at `initial`."""
    path = _Path(stretches, initial)
    ceilings = path.possible_ceilings()
    return ceilings[bisect_left(ceilings, True, key=path.fits)] if ceilings else 0


def fewest_moved(
    stretches: Sequence[Stretch], initial: Sequence[float], ceiling: float
) -> list[int]:
    """The owner of each stretch, so that no load is above `ceiling` and fewest elements move.

    Where several assignments move as few, each stretch in turn takes the first rank it can. There
    must be an assignment under the ceiling.
    """
    chosen = iter(_Path(stretches, initial).choose(ceiling))
    return [
        stretch.ranks[0] if len(stretch.ranks) == 1 else stretch.ranks[next(chosen)]
        for stretch in stretches
    ]


class _Path:
    """The stretches that have a choice, and the loads of all that have none."""

    def __init__(self, stretches: Sequence[Stretch], initial: Sequence[float]) -> None:
        self._base = list(initial)
        for stretch in stretches:
            if len(stretch.ranks) == 1:
                self._base[stretch.ranks[0]] += stretch.cost
        self._cut = [stretch for stretch in stretches if len(stretch.ranks) > 1]

    def possible_ceilings(self) -> list[float]:
        """Every makespan that an assignment can have, in order; the last one surely fits all."""
        sums = set(self._base)
        for at, stretch in enumerate(self._cut):
            sums.update(self._base[rank] + stretch.cost for rank in stretch.ranks)
            first = stretch.ranks[0]
            if at and self._cut[at - 1].ranks[-1] == first:
                sums.add(self._base[first] + self._cut[at - 1].cost + stretch.cost)
        return sorted(value for value in sums if value >= max(self._base))

    def fits(self, ceiling: float) -> bool:
        """Whether every stretch finds room under the ceiling."""
        loads = list(self._base)
        for stretch in self._cut:
            for rank in stretch.ranks:
                if loads[rank] + stretch.cost <= ceiling:
                    loads[rank] += stretch.cost
                    break
            else:
                return False
        return True

    def choose(self, ceiling: float) -> list[int]:
        """Which of its ranks each stretch goes to, so that the most elements stay."""
        stays, choices = [(0.0, 0.0)], []
        for at in reversed(range(len(self._cut))):
            options = [self._best(at, pushed, ceiling, stays[-1]) for pushed in (False, True)]
            stays.append((options[0][0], options[1][0]))
            choices.append((options[0][1], options[1][1]))
        found: list[int] = []
        for at, choice in enumerate(reversed(choices)):
            found.append(choice[self._is_pushed(at, found[-1] if found else 0)])
        return found

    def _is_pushed(self, at: int, choice: int) -> bool:
        """Whether the stretch before `at`, on its choice, weighs on the first rank of `at`."""
        if not 0 < at < len(self._cut):
            return False
        return self._cut[at - 1].ranks[choice] == self._cut[at].ranks[0]

    def _best(
        self, at: int, pushed: bool, ceiling: float, behind: tuple[float, float]
    ) -> tuple[float, int]:
        """The most elements that can stay from `at` on, and the choice for it; -1 for none."""
        stretch, best, found = self._cut[at], -1.0, 0
        for choice, rank in enumerate(stretch.ranks):
            load = self._base[rank]
            if pushed and choice == 0:
                load += self._cut[at - 1].cost
            rest = behind[self._is_pushed(at + 1, choice)]
            if load + stretch.cost <= ceiling and rest >= 0 and stretch.held[choice] + rest > best:
                best, found = stretch.held[choice] + rest, choice
        return best, found
