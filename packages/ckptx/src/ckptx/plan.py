"""Plan: who reads which bytes of a checkpoint, and who gets what from whom.

Phases: (1) cut each tensor into cells, boxes that one set of ranks needs as a whole; (2) turn
cells into units that can be read; (3) lay the units of each set of ranks in file order and share
their bytes out with `balance`, so that each rank of the set reads one consecutive part; (4) let
the readers send to the others. Every byte is read by exactly one rank. Pure: the same arguments
give the same plan on every rank, and no rank need exist.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ckptx.cell import Cell, cells_of
from ckptx.errors import CheckpointPlanError
from ckptx.stored import Chunk, StoredTensor
from ckptx.unit import Unit, units_of
from distcore.v1 import Layout, Plan, Problem, Region, Transfer, balance, itemsize

MIN_SPLIT_NBYTES: Final = 1 << 20
"""No cut inside a tensor leaves less than this on a side."""

MIN_RUN_NBYTES: Final = 64 << 10
"""Shorter runs are not read one by one; the rows around them are read once and passed on."""

MAX_STAGED_NBYTES: Final = 32 << 20
"""The most that a rank reads into staging in one round."""

_TOKENS_PER_RANK: Final = 64
_NEAR: Final = 1.02


@dataclass(frozen=True, slots=True)
class Read:
    """One rank's order to read `region` of `key`, which lies in `chunk`.

    In a round, `key` is the name of a part (see `Round`).
    """

    key: str
    region: Region
    chunk: Chunk
    nbytes: int


@dataclass(frozen=True, slots=True)
class Round:
    """What goes through staging at one time.

    `reads` holds, by rank, what is read whole into staging; `exchange` then takes the parts to
    the places, the reader's own too. A tensor may be read in several boxes at once, so each box
    has a name of its own in both; `keys` gives the tensor's key for each name.
    """

    reads: Mapping[int, tuple[Read, ...]]
    exchange: Plan
    keys: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Who reads what, and who gets what from whom.

    `reads` are, by rank and in file order, read straight into the reader's place; `exchange`
    takes them to the others that need them. `rounds` hold what goes through staging. Bytes are
    by rank: `needed` by its layouts, `lower_bound_received` what of that it does not read itself.
    `lower_bound_read` is what all together must read, `lower_bound_slowest` what the rank that
    reads most must read at least, however the reads are shared out.
    """

    reads: Mapping[int, tuple[Read, ...]]
    exchange: Plan
    rounds: tuple[Round, ...]
    needed: Mapping[int, int]
    lower_bound_received: Mapping[int, int]
    lower_bound_read: int
    lower_bound_slowest: int

    def read_nbytes(self, rank: int) -> int:
        """The bytes that `rank` is to read."""
        parts = [self.reads.get(rank, ()), *(step.reads.get(rank, ()) for step in self.rounds)]
        return sum(read.nbytes for part in parts for read in part)


def plan_load(
    needs: Mapping[str, Layout],
    stored: Mapping[str, StoredTensor],
    ranks: Sequence[int],
    *,
    min_split: int = MIN_SPLIT_NBYTES,
    min_run: int = MIN_RUN_NBYTES,
    max_staged: int = MAX_STAGED_NBYTES,
) -> LoadPlan:
    """Plan the load of the tensors in `needs` by the ranks of a group, in group order.

    Sizes are in bytes. Ranks of a layout that are not in `ranks` are left out. Raises
    CheckpointPlanError with everything that does not fit: a key, a shape or a dtype that the
    checkpoint has not, and elements that a rank needs and that no chunk holds, or
    more than one.
    """
    keys = sorted(needs)
    problems = [p for key in keys for p in check(key, needs[key], stored.get(key))]
    units: list[Unit] = []
    needed = dict.fromkeys(ranks, 0)
    total = 0
    seen: dict[object, list[Cell]] = {}
    for key in [] if problems else keys:
        layout = needs[key]
        # A model has few shapes and placements, however many tensors.
        kind = (layout.shape, layout.form) if layout.form else key
        cells = seen.get(kind) or seen.setdefault(kind, cells_of(layout, ranks))
        found, astray = units_of(key, stored[key], cells, min_run)
        problems += [
            Problem(key, "coverage", f"{c.region}, which ranks {c.ranks} need, is not stored once")
            for c in astray
        ]
        units += found
        for cell in cells:
            nbytes = cell.region.numel * itemsize(layout.dtype)
            total += nbytes
            for rank in cell.ranks:
                needed[rank] += nbytes
    if problems:
        raise CheckpointPlanError(problems)
    assigned, slowest = _assign(units, ranks, min_split)
    return _built(assigned, needed, (total, slowest), max_staged)


def check(key: str, layout: Layout, stored: StoredTensor | None) -> list[Problem]:
    """What keeps the stored tensor from being loaded into the layout."""
    if stored is None:
        return [Problem(key, "missing", "the checkpoint has no such tensor")]
    problems = []
    if layout.shape != stored.shape:
        text = f"the shape is {layout.shape} in the state dict and {stored.shape} in the checkpoint"
        problems.append(Problem(key, "shape", text))
    if layout.dtype != stored.dtype:
        text = f"the dtype is {layout.dtype} in the state dict and {stored.dtype} in the checkpoint"
        problems.append(Problem(key, "dtype", text))
    return problems


def _assign(
    units: Iterable[Unit], ranks: Sequence[int], min_split: int
) -> tuple[list[tuple[int, Unit]], int]:
    """Give each unit, or part of one, to a rank; and the least that the busiest rank must read."""
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


def _built(
    assigned: Sequence[tuple[int, Unit]],
    needed: Mapping[int, int],
    bounds: tuple[int, int],
    max_staged: int,
) -> LoadPlan:
    reads: dict[int, list[Read]] = {}
    transfers: list[Transfer] = []
    own = dict.fromkeys(needed, 0)
    for rank, unit in assigned:
        if unit.staged:
            for cell in unit.cells:
                own[rank] += cell.region.numel * unit.itemsize * (rank in cell.ranks)
            continue
        own[rank] += unit.nbytes
        reads.setdefault(rank, []).append(Read(unit.key, unit.region, unit.chunk, unit.nbytes))
        (cell,) = unit.cells
        transfers += [
            Transfer(unit.key, rank, other, cell.region) for other in cell.ranks if other != rank
        ]
    return LoadPlan(
        reads={rank: tuple(found) for rank, found in reads.items()},
        exchange=Plan(transfers),
        rounds=_rounds(assigned, max_staged),
        needed=needed,
        lower_bound_received={rank: needed[rank] - own[rank] for rank in needed},
        lower_bound_read=bounds[0],
        lower_bound_slowest=bounds[1],
    )


def _rounds(assigned: Iterable[tuple[int, Unit]], max_staged: int) -> tuple[Round, ...]:
    """Fill rounds with the staged units: each rank stages at most `max_staged` bytes in one."""
    rounds: list[list[tuple[int, Unit]]] = []
    filled: dict[int, tuple[int, int]] = {}
    for rank, unit in assigned:
        for part in _small_parts(unit, max_staged) if unit.staged else ():
            at, nbytes = filled.get(rank, (0, 0))
            if nbytes and nbytes + part.nbytes > max_staged:
                at, nbytes = at + 1, 0
            filled[rank] = (at, nbytes + part.nbytes)
            if at == len(rounds):
                rounds.append([])
            rounds[at].append((rank, part))
    return tuple(map(_round, rounds))


def _small_parts(unit: Unit, max_nbytes: int) -> Iterator[Unit]:
    queue = [unit]
    while queue:
        part = queue.pop()
        if part.nbytes <= max_nbytes or part.region.numel == 1:
            if part.cells:
                yield part
            continue
        half = max(part.itemsize, max_nbytes // 2)
        before, behind = part.cut(half, max(1, max_nbytes // 8))
        queue.extend(reversed(before + behind))


def _round(staged: Iterable[tuple[int, Unit]]) -> Round:
    reads: dict[int, list[Read]] = {}
    transfers: list[Transfer] = []
    keys: dict[str, str] = {}
    for number, (rank, unit) in enumerate(staged):
        name = f"{unit.key}#{number}"
        keys[name] = unit.key
        reads.setdefault(rank, []).append(Read(name, unit.region, unit.chunk, unit.nbytes))
        transfers += [
            Transfer(name, rank, other, cell.region) for cell in unit.cells for other in cell.ranks
        ]
    return Round({rank: tuple(found) for rank, found in reads.items()}, Plan(transfers), keys)


def _in_file_order(unit: Unit) -> tuple[str, int, str]:
    # By the file's name: each rank may have the files in another directory.
    return os.path.basename(unit.chunk.file), unit.offset, unit.key
