"""Stats: what a plan moves, counted from its transfers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from distcore.v1 import Plan
from reshard.counts import Counts

Ints: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Stats(Counts):
    """Counts of a plan over all its stages; also a mapping from name to int.

    Bytes between different ranks, fan-out to replicas included; `local_bytes` stay on their rank.
    `messages` are the transfers that cross ranks, `max_peers` the most ranks that one rank sends
    to or receives from, `rounds` the steps in which no rank sends or receives twice.
    """

    wire_bytes: int
    local_bytes: int
    max_egress_bytes: int
    max_ingress_bytes: int
    messages: int
    max_messages: int
    max_peers: int
    rounds: int
    stages: int

    @classmethod
    def of(cls, stages: Sequence[Plan], itemsizes: Mapping[str, int]) -> Stats:
        """Count the transfers of `stages`."""
        size = 1 + max((rank for stage in stages for rank in stage.ranks[-1:]), default=0)
        sent, received, messages = (np.zeros(size, dtype=np.int64) for _ in range(3))
        local = rounds = peers = 0
        for stage in stages:
            src, dst, nbytes = sizes_of(stage, itemsizes)
            local += int(nbytes[src == dst].sum())
            crossing = src != dst
            src, dst, nbytes = src[crossing], dst[crossing], nbytes[crossing]
            for ends, total in ((src, sent), (dst, received)):
                np.add.at(total, ends, nbytes)
                messages += np.bincount(ends, minlength=size)
            pairs = np.unique(src * size + dst)
            degrees = [np.bincount(ends).max(initial=0) for ends in (pairs // size, pairs % size)]
            # As many rounds as the largest degree suffice: see distcore.v1.matching.
            rounds += int(max(degrees))
            peers = max(peers, int(max(degrees)))
        return cls(
            wire_bytes=int(sent.sum()),
            local_bytes=local,
            max_egress_bytes=int(sent.max()),
            max_ingress_bytes=int(received.max()),
            messages=int(messages.sum()) // 2,
            max_messages=int(messages.max()),
            max_peers=peers,
            rounds=rounds,
            stages=len(stages),
        )


def sizes_of(plan: Plan, itemsizes: Mapping[str, int]) -> tuple[Ints, Ints, Ints]:
    """Sender, receiver and bytes of every transfer, as columns."""
    columns = plan.columns
    key, src, dst, at, coords = (
        np.frombuffer(column, dtype=np.int64)
        for column in (columns.key, columns.src, columns.dst, columns.at, columns.coords)
    )
    nbytes = np.array([itemsizes[name] for name in columns.keys], dtype=np.int64)[key]
    ndims = np.diff(at) // 2
    for ndim in np.unique(ndims).tolist():
        rows = np.flatnonzero(ndims == ndim)
        for dim in range(ndim):
            places = at[rows] + dim
            nbytes[rows] *= coords[places + ndim] - coords[places]
    return src, dst, nbytes
