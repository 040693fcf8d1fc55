"""Sources: which holder of a cell sends it to whom, so that no rank sends more than its share.

Every byte enters each receiver once, whatever is chosen, so what can be balanced is who sends.
Cells are taken from the largest to the smallest over the whole state dict, large ones split over
their holders, and each goes to the holder that has sent least so far, one on the receiver's own
node first. Where a cell has more receivers than holders, it may go out in stripes, one to each
receiver, which the receivers then pass on to each other in a second stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import Final, Literal

from distcore.v1 import Region
from reshard.options import Options

MAX_TEAM: Final = 16
FanOut = Literal["direct", "stripe", "node"]


@dataclass(frozen=True, slots=True)
class Job:
    """A cell of one tensor with the receivers that do not hold it yet. `key` is an index."""

    key: int
    region: Region
    nbytes: int
    holders: tuple[int, ...]
    receivers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Move:
    """A Region of tensor number `key` from rank to rank; `nbytes` of it."""

    key: int
    region: Region
    src: int
    dst: int
    nbytes: int


class Loads:
    """How many bytes each rank sends; finds the holder that sends least."""

    def __init__(self, nodes: Mapping[int, int], max_peers: int | None = None) -> None:
        self.sent: dict[int, int] = {}
        self._nodes = nodes
        self._max_peers = max_peers
        self._senders: dict[int, set[int]] = {}
        self._receivers: dict[int, set[int]] = {}
        self._heaps: dict[tuple[int, ...], list[tuple[int, int, int]]] = {}

    def take(self, holders: tuple[int, ...], receiver: int, nbytes: int) -> int:
        """The holder to send `nbytes` to `receiver`; counted to its load."""
        near = self._near(holders, receiver)
        if self._max_peers is not None:
            near = self._known(near, receiver, self._max_peers)
        chosen = near[0] if len(near) == 1 else self._least(near)
        self.sent[chosen] = self.sent.get(chosen, 0) + nbytes
        if self._max_peers is not None:
            self._senders.setdefault(receiver, set()).add(chosen)
            self._receivers.setdefault(chosen, set()).add(receiver)
        return chosen

    def _known(self, holders: tuple[int, ...], receiver: int, max_peers: int) -> tuple[int, ...]:
        """The holders that make no rank's peers too many: old peers, else new ones, else all."""
        mine = self._senders.get(receiver, set())
        room = len(mine) < max_peers
        found = tuple(
            rank
            for rank in holders
            if rank in mine or (room and len(self._receivers.get(rank, ())) < max_peers)
        )
        return found or holders

    def _near(self, holders: tuple[int, ...], receiver: int) -> tuple[int, ...]:
        if not self._nodes or len(holders) == 1:
            return holders
        node = self._nodes.get(receiver)
        return tuple(rank for rank in holders if self._nodes.get(rank) == node) or holders

    def _least(self, holders: tuple[int, ...]) -> int:
        heap = self._heaps.get(holders)
        if heap is None:
            heap = [(self.sent.get(rank, 0), at, rank) for at, rank in enumerate(holders)]
            heapify(heap)
            self._heaps[holders] = heap
        while True:
            load, at, rank = heappop(heap)
            now = self.sent.get(rank, 0)
            heappush(heap, (now, at, rank))
            if now == load:
                return rank


def choose_sources(
    jobs: Sequence[Job], options: Options, *, nodes: Mapping[int, int], fan_out: FanOut
) -> tuple[list[Move], list[Move]]:
    """The moves of both stages: from holders to receivers, then between receivers."""
    loads = Loads(nodes, options.max_peers)
    first: list[Move] = []
    second: list[Move] = []
    pieces = [piece for job in jobs for piece in _split(job, options)]
    pieces.sort(key=lambda job: -job.nbytes)
    for job in pieces:
        for team in _teams(job, nodes, fan_out):
            if len(team) == 1:
                first.append(_move(loads, job, job.region, job.nbytes, team[0]))
                continue
            for receiver, stripe in zip(team, _cut(job.region, len(team)), strict=False):
                nbytes = job.nbytes // job.region.numel * stripe.numel
                first.append(_move(loads, job, stripe, nbytes, receiver))
                second += [
                    Move(job.key, stripe, receiver, peer, nbytes)
                    for peer in team
                    if peer != receiver
                ]
    return first, second


def _move(loads: Loads, job: Job, region: Region, nbytes: int, receiver: int) -> Move:
    return Move(job.key, region, loads.take(job.holders, receiver, nbytes), receiver, nbytes)


def _teams(job: Job, nodes: Mapping[int, int], fan_out: FanOut) -> Iterator[tuple[int, ...]]:
    """The receivers that take a cell in stripes and pass them on: alone, per node, or all."""
    if fan_out == "direct" or len(job.receivers) <= len(job.holders):
        yield from ((receiver,) for receiver in job.receivers)
    elif fan_out == "stripe":
        yield from _bounded(job.receivers)
    else:
        teams: dict[int | None, list[int]] = {}
        for receiver in job.receivers:
            teams.setdefault(nodes.get(receiver), []).append(receiver)
        for team in teams.values():
            yield from _bounded(team)


def _bounded(team: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Teams of near-equal size: in a large one, the messages would grow with its square."""
    count = -(-len(team) // MAX_TEAM)
    ends = [len(team) * part // count for part in range(count + 1)]
    yield from (tuple(team[low:high]) for low, high in pairwise(ends))


def _split(job: Job, options: Options) -> Iterator[Job]:
    """Cut a large cell into as many parts as it has holders, so that they can share it."""
    parts = min(len(job.holders), -(-job.nbytes // options.quantum_nbytes))
    if options.max_peers is not None:
        parts = min(parts, options.max_peers)
    if parts <= 1:
        yield job
        return
    itemsize = job.nbytes // job.region.numel
    for region in _cut(job.region, parts):
        yield Job(job.key, region, region.numel * itemsize, job.holders, job.receivers)


def _cut(region: Region, parts: int) -> list[Region]:
    """Cut along the outermost dim that is long enough, else the longest, into near-equal boxes."""
    shape = region.shape
    if not shape:
        return [region]
    dim = next((d for d, n in enumerate(shape) if n >= parts), shape.index(max(shape)))
    length, low = shape[dim], region.start[dim]
    ends = [low + length * part // parts for part in range(parts + 1)]
    return [
        Region(
            (*region.start[:dim], begin, *region.start[dim + 1 :]),
            (*region.stop[:dim], end, *region.stop[dim + 1 :]),
        )
        for begin, end in pairwise(ends)
        if begin < end
    ]
