"""Thrift: owners that move fewer elements, without a load above a given ceiling.

Items are moved to ranks that hold more of them, or swapped with items that are there, as long as
that saves something. Each step saves at least one element, so there is an end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_EFFORT = 5_000_000


def save_moves(
    owners: Sequence[int],
    *,
    costs: Sequence[float],
    held: Sequence[Mapping[int, int]],
    allowed: Sequence[frozenset[int] | None],
    loads: Sequence[float],
    ceiling: float,
) -> list[int]:
    """Return owners that move no more elements than `owners`, and as few as these steps reach.

    `held` is rank -> elements per item, `allowed` the ranks that may own it (None for any).
    """
    thrift = _Thrift(owners, costs, held, allowed, loads)
    thrift.run(ceiling)
    return thrift.owners


class _Thrift:
    def __init__(
        self,
        owners: Sequence[int],
        costs: Sequence[float],
        held: Sequence[Mapping[int, int]],
        allowed: Sequence[frozenset[int] | None],
        loads: Sequence[float],
    ) -> None:
        self.owners = list(owners)
        self._costs, self._held, self._allowed = costs, held, allowed
        self._loads = list(loads)
        self._on: list[dict[int, None]] = [{} for _ in loads]
        for item, owner in enumerate(owners):
            self._on[owner][item] = None
        self._effort = _EFFORT
        best: dict[tuple[int, int], int] = {}  # items that share both are looked at once
        for some, may in zip(held, allowed, strict=True):
            if (id(some), id(may)) not in best:
                best[id(some), id(may)] = max(
                    (numel for rank, numel in some.items() if may is None or rank in may), default=0
                )
        self._best = [best[id(some), id(may)] for some, may in zip(held, allowed, strict=True)]

    def run(self, ceiling: float) -> None:
        saved = True
        while saved and self._effort > 0:
            saved = False
            order = sorted(range(len(self.owners)), key=lambda item: -self._wish(item))
            for item in order:
                if self._wish(item) <= 0 or self._effort <= 0:
                    continue
                saved = self._bring_home(item, ceiling) or saved

    def _stay(self, item: int, rank: int) -> int:
        return self._held[item].get(rank, 0)

    def _may(self, item: int, rank: int) -> bool:
        allowed = self._allowed[item]
        return allowed is None or rank in allowed

    def _wish(self, item: int) -> int:
        """What the item would save on the best rank for it."""
        return self._best[item] - self._stay(item, self.owners[item])

    def _bring_home(self, item: int, ceiling: float) -> bool:
        """Move or swap the item to a rank that holds more of it."""
        here = self.owners[item]
        better = [
            (-numel, rank)
            for rank, numel in self._held[item].items()
            if numel > self._stay(item, here) and self._may(item, rank)
        ]
        for more, rank in sorted(better):
            gain = -more - self._stay(item, here)
            if self._loads[rank] + self._costs[item] <= ceiling:
                self._move(item, rank)
                return True
            back = self._find_back(item, rank, gain, ceiling)
            if back is not None:
                self._move(item, rank)
                self._move(back, here)
                return True
        return False

    def _find_back(self, item: int, rank: int, gain: int, ceiling: float) -> int | None:
        """The item on `rank` that costs least to take in exchange."""
        here, cost = self.owners[item], self._costs[item]
        self._effort -= len(self._on[rank])
        best, found = gain, None
        for other in self._on[rank]:
            loss = self._stay(other, rank) - self._stay(other, here)
            if loss >= best or not self._may(other, here):
                continue
            shift = cost - self._costs[other]
            if self._loads[rank] + shift <= ceiling and self._loads[here] - shift <= ceiling:
                best, found = loss, other
        return found

    def _move(self, item: int, rank: int) -> None:
        here = self.owners[item]
        del self._on[here][item]
        self._on[rank][item] = None
        self._loads[here] -= self._costs[item]
        self._loads[rank] += self._costs[item]
        self.owners[item] = rank
