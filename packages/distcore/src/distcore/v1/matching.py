"""Matchings: pairs of ranks dealt out to steps in which no rank sends twice or receives twice.

Ranks as senders on one side, ranks as receivers on the other, and an edge for every pair that
exchanges: a matching is a set of edges without a common end, and to deal them all out to matchings
is to colour the edges. A bipartite graph can do with as many colours as its largest degree (Koenig,
1916), and no fewer will do. The colouring is found edge by edge: an edge takes the first colour
that is free at both of its ends; where there is none, one is made free by swapping two colours
along a path. Edges come by the distance from sender to receiver, each distance being a matching: so
dense traffic needs no swaps at all, and sparse traffic few.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from distcore.v1.plan import Plan

Pair: TypeAlias = tuple[int, int]
"""A sender and a receiver, as global ranks."""


def pairs_of(plan: Plan) -> tuple[Pair, ...]:
    """The pairs of different ranks between which something goes, ascending."""
    found = set(zip(plan.columns.src, plan.columns.dst, strict=True))
    return tuple(sorted(pair for pair in found if pair[0] != pair[1]))


def matchings(pairs: Iterable[Pair]) -> tuple[tuple[Pair, ...], ...]:
    """Deal `pairs` out to as few matchings as can be: the most sends, or receives, of one rank.

    A pair that comes several times is in a matching for each time. Deterministic, whatever the
    order of the pairs; within a matching they are ascending.

    >>> matchings([(0, 1), (0, 2), (1, 2)])
    (((0, 1), (1, 2)), ((0, 2),))
    """
    colouring = _Colouring()
    for sender, receiver in _by_distance(list(pairs)):
        colouring.add(sender, receiver)
    found: list[list[Pair]] = [[] for _ in range(colouring.num_colours)]
    for sender, by_colour in colouring.receiver_of.items():
        for colour, receiver in by_colour.items():
            found[colour].append((sender, receiver))
    return tuple(tuple(sorted(one)) for one in found)


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
