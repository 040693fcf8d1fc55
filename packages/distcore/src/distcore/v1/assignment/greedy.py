"""Greedy: each item in turn goes to the candidate with the least load so far.

Three ways to find that candidate give one result. Where no rank is in two sets, a heap per set
holds all that is to be known. Where sets overlap, a load that grows would have to be found in
many heaps; there, looking at all candidates is cheaper, in numpy where a set is large.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace
from typing import TYPE_CHECKING, Final, Generic, TypeVar

if TYPE_CHECKING:
    from numpy import float64, int64
    from numpy.typing import NDArray

    Vector = NDArray[int64] | NDArray[float64]

N = TypeVar("N", int, float)

_LARGE_SET: Final = 20
_INT64_MAX: Final = 2**63 - 1


class Emptiest(Generic[N]):
    """Finds the least-loaded rank of a set, the lowest where there are several.

    `loads` (one per rank) are the caller's; after construction they change through `put` alone.
    """

    def __init__(self, sets: Sequence[tuple[int, ...]], loads: list[N], costs: Sequence[N]) -> None:
        """`costs` are all that may be put."""
        self._sets = sets
        self._loads: list[N] = loads
        self._vector: Vector | None = None
        if max(map(len, sets), default=0) >= _LARGE_SET:
            self._vector = _vector(loads, sum(loads) + sum(costs))
        self._rows: list[NDArray[int64] | None] = [None] * len(sets)
        if self._vector is not None:
            import numpy as np

            self._rows = [np.array(s) if len(s) >= _LARGE_SET else None for s in sets]

    def find(self, kind: int) -> int:
        """The least-loaded rank of `sets[kind]`."""
        row = self._rows[kind]
        if row is None or self._vector is None:
            return min(self._sets[kind], key=self._loads.__getitem__)
        return self._sets[kind][self._vector[row].argmin()]

    def put(self, rank: int, cost: N) -> None:
        """Add to the load of a rank."""
        load = self._loads[rank] + cost
        self._loads[rank] = load
        if self._vector is not None:
            self._vector[rank] = load


def _vector(loads: list[N], total: N) -> Vector | None:
    """The loads in numpy; None where it could not hold what becomes of them."""
    import numpy as np

    if isinstance(total, float):
        return np.array(loads, dtype=np.float64)
    return np.array(loads, dtype=np.int64) if total <= _INT64_MAX else None


def assign_in_order(
    costs: Sequence[N],
    kinds: Sequence[int],
    sets: Sequence[tuple[int, ...]],
    loads: list[N],
) -> list[int]:
    """Give item after item to the least-loaded rank of `sets[kind]`, ties to the lowest rank.

    Returns a rank per item, what the plain loop would return; afterwards `loads` (one per rank)
    holds the loads with all items.
    """
    used = set(kinds)
    if sum(len(sets[kind]) for kind in used) == len({r for kind in used for r in sets[kind]}):
        return _assign_with_heaps(costs, kinds, sets, loads)
    emptiest = Emptiest(sets, loads, costs)
    owners = []
    for cost, kind in zip(costs, kinds, strict=True):
        rank = emptiest.find(kind)
        emptiest.put(rank, cost)
        owners.append(rank)
    return owners


def _assign_with_heaps(
    costs: Sequence[N],
    kinds: Sequence[int],
    sets: Sequence[tuple[int, ...]],
    loads: list[N],
) -> list[int]:
    heaps = {kind: [(loads[rank], rank) for rank in sets[kind]] for kind in set(kinds)}
    for heap in heaps.values():
        heapify(heap)
    owners = []
    for cost, kind in zip(costs, kinds, strict=True):
        heap = heaps[kind]
        load, rank = heap[0]
        heapreplace(heap, (load + cost, rank))
        owners.append(rank)
    for heap in heaps.values():
        for load, rank in heap:
            loads[rank] = load
    return owners
