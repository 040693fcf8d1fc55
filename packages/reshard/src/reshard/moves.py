"""Moves: who sends which Region to whom, many at a time, on the way to a Plan.

A plan may have ten million transfers, so they are kept as columns: per block a Region with the
senders and the receivers of its copies, and numpy puts them in order at the end.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from distcore.v1 import Columns, Plan, Region

Ints = NDArray[np.int64]


class Moves:
    """Blocks: Regions of tensors, each from several senders to as many receivers."""

    def __init__(self) -> None:
        self._key = array("q")
        self._nbytes = array("q")
        self._count = array("q")
        self._region = array("q")
        self._src = array("q")
        self._dst = array("q")
        self._regions: list[Region] = []
        self._numbers: dict[int, int] = {}

    @classmethod
    def joined(cls, one: Moves, other: Moves) -> Moves:
        """The moves of both."""
        made = cls()
        for part in (one, other):
            shift = len(made._regions)
            made._regions += part._regions
            made._region.extend(number + shift for number in part._region)
            for name in ("_key", "_nbytes", "_count", "_src", "_dst"):
                getattr(made, name).extend(getattr(part, name))
        return made

    def __len__(self) -> int:
        return len(self._src)

    def add(
        self, key: int, region: Region, nbytes: int, srcs: Sequence[int], dsts: Sequence[int]
    ) -> None:
        """Add `region` (of `nbytes`) of tensor number `key`, from `srcs[i]` to `dsts[i]`."""
        # One Region object stands for many equal cells, so objects are counted, not values; they
        # are kept in the list, so that no other object takes over an id.
        number = self._numbers.setdefault(id(region), len(self._regions))
        if number == len(self._regions):
            self._regions.append(region)
        self._key.append(key)
        self._nbytes.append(nbytes)
        self._count.append(len(dsts))
        self._region.append(number)
        self._src.extend(srcs)
        self._dst.extend(dsts)

    def busiest(self, nodes: Mapping[int, int], node_cost: float) -> tuple[float, float]:
        """The bytes of the rank that sends, and that receives, most.

        Bytes between nodes count `node_cost` times.
        """
        if not len(self):
            return 0, 0
        src, dst = _ints(self._src), _ints(self._dst)
        cost = np.repeat(_ints(self._nbytes), _ints(self._count)).astype(np.float64)
        if nodes:
            node = np.full(int(max(src.max(), dst.max())) + 1, -1, dtype=np.int64)
            for rank, place in nodes.items():
                if rank < len(node):
                    node[rank] = place
            cost[node[src] != node[dst]] *= node_cost
        return float(np.bincount(src, cost).max()), float(np.bincount(dst, cost).max())

    def plan(self, keys: Sequence[str]) -> Plan:
        """The moves as a plan: by key, then sender, receiver and the order of the blocks."""
        if not len(self):
            return Plan()
        counts = _ints(self._count)
        block = np.repeat(np.arange(len(counts)), counts)
        key, src, dst = _ints(self._key)[block], _ints(self._src), _ints(self._dst)
        order = _order(key, src, dst, block)
        used, key = np.unique(key[order], return_inverse=True)
        at, coords = self._coordinates(_ints(self._region)[block[order]])
        columns = Columns(
            tuple(keys[number] for number in used.tolist()),
            _column(key),
            _column(src[order]),
            _column(dst[order]),
            _column(at),
            _column(coords),
        )
        return Plan.from_columns(columns)

    def _coordinates(self, region: Ints) -> tuple[Ints, Ints]:
        """For the Regions with these numbers the columns `at` and `coords` of a plan."""
        flat: list[int] = []
        begins = [0]
        for one in self._regions:
            flat.extend(one.start)
            flat.extend(one.stop)
            begins.append(len(flat))
        table, begin = np.array(flat, dtype=np.int64), np.array(begins, dtype=np.int64)
        lengths = np.diff(begin)[region]
        at = np.zeros(len(region) + 1, dtype=np.int64)
        np.cumsum(lengths, out=at[1:])
        places = np.repeat(begin[region] - at[:-1], lengths)
        places += np.arange(at[-1])
        return at, table[places]


def _order(key: Ints, src: Ints, dst: Ints, block: Ints) -> Ints:
    """The order by these columns, the first one first."""
    bits = [int(column.max()).bit_length() for column in (key, src, dst, block)]
    if sum(bits) > 63:
        return np.lexsort((block, dst, src, key))
    joined = key
    for column, width in zip((src, dst, block), bits[1:], strict=True):
        joined = (joined << width) | column
    return np.argsort(joined, kind="stable")


def _ints(column: array[int]) -> Ints:
    return np.frombuffer(column, dtype=np.int64)


def _column(values: Ints) -> array[int]:
    made = array("q")
    made.frombytes(np.ascontiguousarray(values, dtype=np.int64).tobytes())
    return made
