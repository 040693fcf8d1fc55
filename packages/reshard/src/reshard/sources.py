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
from itertools import pairwise
from typing import Final, Literal

from distcore.v1 import Region
from reshard.loads import Loads
from reshard.moves import Moves
from reshard.options import Options

# In a larger team the messages would grow with its square, for little gain.
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


def choose_sources(
    jobs: Sequence[Job], options: Options, *, nodes: Mapping[int, int], fan_out: FanOut
) -> tuple[Moves, Moves]:
    """The moves of both stages: from holders to receivers, then between receivers."""
    loads = Loads(nodes, options.max_peers)
    first, second = Moves(), Moves()
    pieces = [piece for job in jobs for piece in _split(job, options)]
    pieces.sort(key=lambda job: -job.nbytes)
    for job in pieces:
        alone, teams = _teams(job, nodes, fan_out, options.stripe_nbytes)
        if alone:
            srcs = loads.deal(job.holders, alone, job.nbytes)
            first.add(job.key, job.region, job.nbytes, srcs, alone)
        for team in teams:
            for receiver, stripe in zip(team, _cut(job.region, len(team)), strict=False):
                nbytes = job.nbytes // job.region.numel * stripe.numel
                srcs = loads.deal(job.holders, (receiver,), nbytes)
                first.add(job.key, stripe, nbytes, srcs, (receiver,))
                peers = [peer for peer in team if peer != receiver]
                second.add(job.key, stripe, nbytes, [receiver] * len(peers), peers)
    return first, second


def _teams(
    job: Job, nodes: Mapping[int, int], fan_out: FanOut, stripe_nbytes: int
) -> tuple[Sequence[int], list[tuple[int, ...]]]:
    """The receivers that take a cell whole, and the teams that take it in stripes."""
    size = min(MAX_TEAM, job.nbytes // stripe_nbytes)
    if fan_out == "direct" or size < 2 or len(job.receivers) <= len(job.holders):
        return job.receivers, []
    groups: dict[int | None, list[int]] = {}
    for receiver in job.receivers:
        groups.setdefault(nodes.get(receiver) if fan_out == "node" else None, []).append(receiver)
    teams = [team for group in groups.values() for team in _bounded(group, size)]
    alone = [team[0] for team in teams if len(team) == 1]
    return alone, [team for team in teams if len(team) > 1]


def _bounded(group: Sequence[int], size: int) -> Iterator[tuple[int, ...]]:
    """Teams of at most `size` ranks, near-equal."""
    count = -(-len(group) // size)
    ends = [len(group) * part // count for part in range(count + 1)]
    yield from (tuple(group[low:high]) for low, high in pairwise(ends))


def _split(job: Job, options: Options) -> Iterator[Job]:
    """Cut a large cell into as many parts as it has holders, so that they can share it."""
    if job.nbytes <= options.quantum_nbytes or len(job.holders) == 1:
        yield job
        return
    parts = min(len(job.holders), -(-job.nbytes // options.quantum_nbytes))
    if options.max_peers is not None:
        parts = min(parts, options.max_peers)
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
