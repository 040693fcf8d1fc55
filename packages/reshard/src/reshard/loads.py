"""Loads: how many bytes each rank sends so far, and which holder sends least."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heapify, heapreplace


class Loads:
    """Deals out sends: each goes to the holder with the least load so far.

    One on the receiver's own node comes first. `max_peers` keeps to ranks that exchange anyway,
    where there is a choice.
    """

    def __init__(self, nodes: Mapping[int, int], max_peers: int | None = None) -> None:
        self._sent: dict[int, int] = {}
        self._nodes = nodes
        self._max_peers = max_peers
        self._senders: dict[int, set[int]] = {}
        self._receivers: dict[int, set[int]] = {}

    def deal(
        self, holders: tuple[int, ...], receivers: Sequence[int], nbytes: int
    ) -> Sequence[int]:
        """For each of `receivers` the holder that sends it `nbytes`; counted to its load."""
        if len(holders) == 1 and self._max_peers is None:
            self._count(holders[0], nbytes * len(receivers))
            return holders * len(receivers)
        if self._nodes or self._max_peers is not None:
            return [self._take(holders, receiver, nbytes) for receiver in receivers]
        sent = self._sent
        if len(receivers) == 1:
            chosen = min(holders, key=lambda rank: sent.get(rank, 0))
            self._count(chosen, nbytes)
            return (chosen,)
        heap = [(sent.get(rank, 0), at, rank) for at, rank in enumerate(holders)]
        heapify(heap)
        found = []
        for _ in receivers:
            load, at, rank = heap[0]
            heapreplace(heap, (load + nbytes, at, rank))
            found.append(rank)
        for load, _, rank in heap:
            sent[rank] = load
        return found

    def _take(self, holders: tuple[int, ...], receiver: int, nbytes: int) -> int:
        near = self._near(holders, receiver)
        if self._max_peers is not None:
            near = self._known(near, receiver, self._max_peers)
        chosen = min(near, key=lambda rank: self._sent.get(rank, 0))
        self._count(chosen, nbytes)
        if self._max_peers is not None:
            self._senders.setdefault(receiver, set()).add(chosen)
            self._receivers.setdefault(chosen, set()).add(receiver)
        return chosen

    def _count(self, rank: int, nbytes: int) -> None:
        self._sent[rank] = self._sent.get(rank, 0) + nbytes

    def _known(self, holders: tuple[int, ...], receiver: int, max_peers: int) -> tuple[int, ...]:
        """The holders that make no rank's peers too many: old peers, else new ones, else all."""
        mine = self._senders.get(receiver, set())
        room = len(mine) < max_peers
        found = tuple(
            rank
            for rank in holders
            if rank in mine or (room and len(self._receivers.get(rank, ())) < max_peers)
        )
        return found or tuple(rank for rank in holders if rank in mine) or holders

    def _near(self, holders: tuple[int, ...], receiver: int) -> tuple[int, ...]:
        if not self._nodes or len(holders) == 1:
            return holders
        node = self._nodes.get(receiver)
        return tuple(rank for rank in holders if self._nodes.get(rank) == node) or holders
