"""Buckets: which matrices move together.

A bucket that one rank owns most of keeps all others waiting, so buckets are formed over the
rounds of the owners: first the longest matrix of every rank, then the second of every rank, and
so on. How the model is cut into layers plays no part.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Load(Generic[Key]):
    """A matrix with its owner, its cost, and the bytes of memory that it takes on each rank."""

    key: Key
    owner: int
    cost: float
    nbytes: Mapping[int, int]


def owner_rounds(loads: Sequence[Load[Key]]) -> list[list[Load[Key]]]:
    """Round k holds the k-th longest matrix of every owner, owners ascending.

    >>> a, b, c = (Load(key, owner, 1.0, {}) for key, owner in (("a", 0), ("b", 1), ("c", 0)))
    >>> [[load.key for load in one] for one in owner_rounds([a, b, c])]
    [['a', 'b'], ['c']]
    """
    queues: dict[int, list[Load[Key]]] = {}
    for load in sorted(loads, key=lambda load: -load.cost):  # stable: ties keep their order
        queues.setdefault(load.owner, []).append(load)
    columns = zip_longest(*(queues[owner] for owner in sorted(queues)))
    return [[load for load in column if load is not None] for column in columns]


def form_buckets(loads: Sequence[Load[Key]], max_nbytes: int) -> tuple[tuple[Load[Key], ...], ...]:
    """Runs of the matrices in the order of the rounds, none of which takes too much on any rank.

    A round stays together where it fits a bucket. A matrix that is too large by itself has a
    bucket of its own.
    """
    buckets: list[list[Load[Key]]] = []
    room: dict[int, int] = {}
    for unit in chain.from_iterable(_units(one, max_nbytes) for one in owner_rounds(loads)):
        taken = _total(unit)
        if not buckets or any(nbytes > room.get(rank, 0) for rank, nbytes in taken.items()):
            buckets.append([])
            room = dict.fromkeys({rank for load in loads for rank in load.nbytes}, max_nbytes)
        buckets[-1] += unit
        for rank, nbytes in taken.items():
            room[rank] -= nbytes
    return tuple(map(tuple, buckets))


def _units(one: list[Load[Key]], max_nbytes: int) -> list[list[Load[Key]]]:
    """The round whole, or matrix by matrix where it is too large."""
    fits = max(_total(one).values(), default=0) <= max_nbytes
    return [one] if fits else [[load] for load in one]


def _total(loads: Sequence[Load[Key]]) -> dict[int, int]:
    total: dict[int, int] = {}
    for load in loads:
        for rank, nbytes in load.nbytes.items():
            total[rank] = total.get(rank, 0) + nbytes
    return total
