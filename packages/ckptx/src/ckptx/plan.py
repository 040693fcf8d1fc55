"""Plan: who reads which bytes of a checkpoint, and who gets what from whom.

Phases: (1) cut each tensor into cells, boxes that one set of ranks needs as a whole; (2) turn
cells into units that can be read; (3) lay the units of each set of ranks in file order and share
their bytes out with `balance`, so that each rank of the set reads one consecutive part; (4) let
the readers send to the others. Every byte is read by exactly one rank. Pure: the same arguments
give the same plan on every rank, and no rank need exist.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ckptx.cell import Cell, cells_of
from ckptx.dealing import deal
from ckptx.errors import CheckpointPlanError
from ckptx.stored import Chunk, StoredTensor
from ckptx.unit import Unit, units_of
from distcore.v1 import Layout, Plan, Problem, Region, Transfer, itemsize

MIN_SPLIT_NBYTES: Final = 1 << 20
"""No cut inside a tensor leaves less than this on a side."""

MIN_RUN_NBYTES: Final = 64 << 10
"""Shorter runs are not read one by one; the rows around them are read once and passed on."""

MAX_STAGED_NBYTES: Final = 32 << 20
"""The most that a rank reads into staging in one round."""


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
    assigned, slowest = deal(units, ranks, min_split)
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
