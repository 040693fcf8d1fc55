"""Bounds: what every plan between two sets of layouts must send, and from whom."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from distcore.v1 import balance
from reshard.counts import Counts


@dataclass(frozen=True, slots=True)
class Bounds(Counts):
    """Lower bounds in bytes; also a mapping from name to int.

    `wire_bytes`: what must cross from rank to rank, as every missing byte enters its rank once.
    `max_ingress_bytes`: what the busiest receiver misses.
    `max_egress_bytes`: what the busiest sender sends at least, if every byte comes straight from
    a rank that holds it in the source layout.
    `relayed_egress_bytes`: the same if receivers may pass on what they have received.
    """

    wire_bytes: int
    max_ingress_bytes: int
    max_egress_bytes: int
    relayed_egress_bytes: int


class Demand:
    """Adds up, cell by cell, what is needed from which holders."""

    def __init__(self) -> None:
        self._needed: dict[tuple[int, ...], int] = {}
        self._wanted: dict[tuple[int, ...], int] = {}
        self._once: dict[tuple[int, ...], int] = {}

    def add(self, holders: tuple[int, ...], missing: tuple[int, ...], nbytes: int) -> None:
        """Count a cell of `nbytes` that `holders` hold and `missing`, none of them, need."""
        if not missing:
            return
        self._needed[missing] = self._needed.get(missing, 0) + nbytes
        self._wanted[holders] = self._wanted.get(holders, 0) + nbytes * len(missing)
        self._once[holders] = self._once.get(holders, 0) + nbytes

    def bounds(self) -> Bounds:
        """The bounds of all that was added."""
        received: dict[int, int] = {}
        for missing, nbytes in self._needed.items():
            for rank in missing:
                received[rank] = received.get(rank, 0) + nbytes
        wire = sum(received.values())
        senders = {rank for holders in self._wanted for rank in holders} | set(received)
        shared = -(-wire // len(senders)) if senders else 0
        return Bounds(
            wire_bytes=wire,
            max_ingress_bytes=max(received.values(), default=0),
            max_egress_bytes=_least_makespan(self._wanted),
            relayed_egress_bytes=max(_least_makespan(self._once), shared),
        )


def _least_makespan(amounts: Mapping[tuple[int, ...], int]) -> int:
    """The least load of the busiest rank, if every amount may be divided among its holders."""
    if not amounts:
        return 0
    ranks = sorted({rank for holders in amounts for rank in holders})
    place = {rank: at for at, rank in enumerate(ranks)}
    holders = list(amounts)
    assignment = balance(
        range(len(holders)),
        [amounts[found] for found in holders],
        [[place[rank] for rank in found] for found in holders],
        len(ranks),
        splittable=True,
    )
    return int(assignment.lower_bound)
