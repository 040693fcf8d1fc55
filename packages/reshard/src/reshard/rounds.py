"""Rounds: the exchanges of a plan in steps in which no rank sends twice or receives twice.

Ranks as senders on one side, ranks as receivers on the other, and an edge for every pair that
exchanges: a round is a set of edges without a common end, so rounds are the colours of an edge
colouring. A bipartite graph has one with as many colours as its largest degree (Koenig, 1916), and
no fewer can do. It is found edge by edge: an edge takes the first colour that is free at both of
its ends; where there is none, one is made free by swapping two colours along a path. Edges come
by the distance from sender to receiver, each distance being a set without a common end: so dense
traffic needs no swaps at all, and sparse traffic few.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np

from distcore.v1 import Plan

Pair: TypeAlias = tuple[int, int]
"""A sender and a receiver, as global ranks."""


def pairs_of(plan: Plan) -> list[Pair]:
    """The pairs of different ranks between which something goes, ascending."""
    if not len(plan):
        return []
    src, dst = (
        np.frombuffer(column, dtype=np.int64) for column in (plan.columns.src, plan.columns.dst)
    )
    crossing = src != dst
    size = int(dst.max()) + 1
    found = np.unique(src[crossing] * size + dst[crossing])
    return list(zip((found // size).tolist(), (found % size).tolist(), strict=True))


def rounds_of(pairs: Iterable[Pair]) -> tuple[tuple[Pair, ...], ...]:
    """Deal `pairs` out to as few rounds as can be: as many as one rank has sends, or receives.

    A pair that comes several times has a round for each time. Deterministic; within a round the
    pairs are ascending.

    >>> rounds_of([(0, 1), (0, 2), (1, 2)])
    (((0, 1), (1, 2)), ((0, 2),))
    """
    colouring = _Colouring()
    for sender, receiver in _by_distance(list(pairs)):
        colouring.add(sender, receiver)
    rounds: list[list[Pair]] = [[] for _ in range(colouring.num_colours)]
    for sender, by_colour in sorted(colouring.receiver_of.items()):
        for colour, receiver in by_colour.items():
            rounds[colour].append((sender, receiver))
    return tuple(tuple(sorted(one)) for one in rounds)


def _by_distance(pairs: Sequence[Pair]) -> list[Pair]:
    """By the distance between the places of the two ends on either side, as on one ring."""
    senders, receivers = (
        {rank: at for at, rank in enumerate(sorted({pair[end] for pair in pairs}))}
        for end in (0, 1)
    )
    size = max(len(senders), len(receivers))

    def distance(pair: Pair) -> tuple[int, int]:
        place = senders[pair[0]]
        return (receivers[pair[1]] - place) % size, place

    return sorted(pairs, key=distance)


class _Colouring:
    """A colouring that grows edge by edge.

    For every rank its partner by colour, on either side, and the set of its colours as the bits
    of an int.
    """

    def __init__(self) -> None:
        self.receiver_of: dict[int, dict[int, int]] = {}
        self.num_colours = 0
        self._sender_of: dict[int, dict[int, int]] = {}
        self._taken_by_sender: dict[int, int] = {}
        self._taken_by_receiver: dict[int, int] = {}

    def add(self, sender: int, receiver: int) -> None:
        """Colour one more edge."""
        receivers = self.receiver_of.setdefault(sender, {})
        senders = self._sender_of.setdefault(receiver, {})
        self.num_colours = max(self.num_colours, len(receivers) + 1, len(senders) + 1)
        taken = self._taken_by_sender.get(sender, 0)
        both = taken | self._taken_by_receiver.get(receiver, 0)
        colour = _first_free(both)
        if colour >= self.num_colours:
            colour = _first_free(taken)
            self._free(receiver, colour, _first_free(self._taken_by_receiver[receiver]))
        self._paint(sender, receiver, colour)

    def _free(self, receiver: int, colour: int, other: int) -> None:
        """Swap the two colours along the path that leaves `receiver` by `colour`.

        The path goes to senders by `colour` and to receivers by `other`, so it cannot end at the
        sender of the new edge, which has no edge of `colour`.
        """
        path: list[Pair] = []
        sender: int | None = self._sender_of[receiver].get(colour)
        at: int | None = receiver
        while at is not None and (sender := self._sender_of[at].get(colour)) is not None:
            path.append((sender, at))
            at = self.receiver_of[sender].get(other)
            if at is not None:
                path.append((sender, at))
        colours = colour, other
        for number, edge in enumerate(path):
            self._wipe(*edge, colours[number % 2])
        for number, edge in enumerate(path):
            self._paint(*edge, colours[1 - number % 2])

    def _paint(self, sender: int, receiver: int, colour: int) -> None:
        bit = 1 << colour
        self.receiver_of[sender][colour] = receiver
        self._sender_of[receiver][colour] = sender
        self._taken_by_sender[sender] = self._taken_by_sender.get(sender, 0) | bit
        self._taken_by_receiver[receiver] = self._taken_by_receiver.get(receiver, 0) | bit

    def _wipe(self, sender: int, receiver: int, colour: int) -> None:
        bit = 1 << colour
        del self.receiver_of[sender][colour]
        del self._sender_of[receiver][colour]
        self._taken_by_sender[sender] ^= bit
        self._taken_by_receiver[receiver] ^= bit


def _first_free(taken: int) -> int:
    """The lowest bit that is not set."""
    return (~taken & (taken + 1)).bit_length() - 1
