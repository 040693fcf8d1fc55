"""Dealing: units of files shared out between the ranks that have a part in them, evenly by bytes.

The units of each set of ranks form a stream in file order; each rank of the set takes one
consecutive part of it, so that its ranges of the files follow each other.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from ckptx.unit import Unit
from distcore.v1 import balance

_TOKENS_PER_RANK: Final = 64
_NEAR: Final = 1.02


def deal(
    units: Iterable[Unit], ranks: Sequence[int], min_split: int
) -> tuple[list[tuple[int, Unit]], int]:
    """Give each unit, or part of one, to a rank that has a part in it.

    Returns (rank, unit) in file order, and the least that the busiest rank must take. No cut leaves
    less than `min_split` bytes on a side.
    """
    streams: dict[tuple[int, ...], list[Unit]] = {}
    order = {rank: i for i, rank in enumerate(ranks)}
    for unit in units:
        needers = tuple(sorted(unit.ranks, key=order.__getitem__))
        streams.setdefault(needers, []).append(unit)
    sizes = {needers: sum(unit.nbytes for unit in stream) for needers, stream in streams.items()}
    shares, slowest = _shares(sizes, order)
    assigned: list[tuple[int, Unit]] = []
    for needers, stream in streams.items():
        stream.sort(key=_in_file_order)
        assigned += _carved(stream, list(shares[needers].items()), min_split)
    return sorted(assigned, key=lambda pair: _in_file_order(pair[1])), slowest


def _shares(
    sizes: Mapping[tuple[int, ...], int], order: Mapping[int, int]
) -> tuple[dict[tuple[int, ...], dict[int, int]], int]:
    """How many bytes of each set's stream each of its ranks reads.

    Dealing out small tokens, sets with the fewest ranks first, spreads the bytes over all ranks of
    a set. Where the busiest rank then reads more than it must, the least that is possible counts.
    """
    sets = sorted(sizes, key=lambda needers: (len(needers), needers))
    by_index = list(order)
    candidates = [[order[rank] for rank in needers] for needers in sets]
    best = balance(
        sets,
        [sizes[needers] for needers in sets],
        candidates,
        len(order),
        policy="optimal",
        splittable=True,
    )
    items, costs = _tokens(sizes, sets, len(order))
    ranks_of = dict(zip(sets, candidates, strict=True))
    dealt = balance(items, costs, [ranks_of[needers] for needers, _ in items], len(order))
    shares = {needers: dict.fromkeys(needers, 0) for needers in sizes}
    if dealt.makespan <= _NEAR * best.makespan:
        for item, cost in zip(items, costs, strict=True):
            shares[item[0]][by_index[dealt.owner[item]]] += cost
    else:
        for needers in sets:
            for index, amount in best.shares[needers]:
                shares[needers][by_index[index]] += int(amount)
    return shares, int(best.lower_bound)


def _tokens(
    sizes: Mapping[tuple[int, ...], int], sets: Iterable[tuple[int, ...]], num_ranks: int
) -> tuple[list[tuple[tuple[int, ...], int]], list[int]]:
    """Each set's bytes in nearly equal parts, so many that one more or less does not count."""
    grain = max(1, sum(sizes.values()) // (_TOKENS_PER_RANK * num_ranks))
    items, costs = [], []
    for needers in sets:
        size, width = sizes[needers], len(needers)
        # A multiple of the number of ranks, so that they may share evenly.
        count = 1 if width == 1 else width * -(-size // (grain * width))
        for token in range(count):
            items.append((needers, token))
            costs.append(size * (token + 1) // count - size * token // count)
    return items, costs


def _carved(
    stream: list[Unit], shares: list[tuple[int, int]], min_split: int
) -> Iterator[tuple[int, Unit]]:
    """Deal a stream out in order: each rank gets the next part, of about its share."""
    queue = stream[::-1]
    wanted = dealt = 0
    for rank, share in shares:
        wanted += share
        while queue:
            unit = queue.pop()
            is_last = rank == shares[-1][0]
            before, behind = unit.cut(unit.nbytes if is_last else wanted - dealt, min_split)
            for part in before:
                dealt += part.nbytes
                if part.cells:
                    yield rank, part
            queue.extend(reversed(behind))
            if behind:
                break


def _in_file_order(unit: Unit) -> tuple[str, int, str]:
    # By the file's name: each rank may have the files in another directory.
    return os.path.basename(unit.chunk.file), unit.offset, unit.key
