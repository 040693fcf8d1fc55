"""Placing: who writes which box of which tensor, so that each element is written once.

Pure: the same layouts give the same plan on every rank, and no rank need exist.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ckptx.cell import Cell, cells_of
from ckptx.dealing import deal
from ckptx.errors import CheckpointPlanError
from ckptx.stored import Chunk
from ckptx.unit import Unit
from distcore.v1 import Layout, Problem, Region, balance, itemsize

MIN_SPLIT_NBYTES: Final = 1 << 20
"""No cut inside a tensor leaves less than this on a side."""


@dataclass(frozen=True, slots=True)
class Write:
    """One rank's order to write `region` of `key`."""

    key: str
    region: Region
    nbytes: int


@dataclass(frozen=True, slots=True)
class SavePlan:
    """Who writes what.

    `writes` are, by rank, in the order of keys and places. `copies` are the boxes that more than
    one rank holds, of which one rank's copy is written. `nbytes` are written by all together, and
    the rank that writes most writes at least `lower_bound_slowest`, however they are shared out.
    """

    writes: Mapping[int, tuple[Write, ...]]
    copies: tuple[tuple[str, Cell], ...]
    nbytes: int
    lower_bound_slowest: int

    def written_nbytes(self, rank: int) -> int:
        """The bytes that `rank` is to write."""
        return sum(write.nbytes for write in self.writes.get(rank, ()))


def plan_save(
    layouts: Mapping[str, Layout],
    ranks: Sequence[int],
    *,
    split: bool = True,
    min_split: int = MIN_SPLIT_NBYTES,
) -> SavePlan:
    """Plan the save of tensors by the ranks of a group, in group order.

    What several ranks hold is shared out between them by bytes: `split` in parts of at least
    `min_split` bytes, else whole. CheckpointPlanError names every tensor of which the ranks
    together do not hold all.

    >>> whole = Layout.replicated(shape=(4, 2), dtype="float32", ranks=(0, 1))
    >>> plan = plan_save({"w": whole}, (0, 1), min_split=1)
    >>> [[str(write.region) for write in plan.writes[rank]] for rank in (0, 1)]
    [['Region(start=(0, 0), stop=(2, 2))'], ['Region(start=(2, 0), stop=(4, 2))']]
    """
    units: list[Unit] = []
    empty: list[Write] = []
    problems: list[Problem] = []
    for key in sorted(layouts):
        layout = layouts[key]
        whole = Region.of_shape(layout.shape)
        cells = cells_of(layout, ranks)
        held = sum(cell.region.numel for cell in cells)
        if held != whole.numel:
            text = f"the ranks of the group hold {held} of {whole.numel} elements"
            problems.append(Problem(key, "coverage", text))
        if whole.is_empty:
            empty.append(Write(key, whole, 0))
        size = itemsize(layout.dtype)
        chunk = Chunk(whole, key.replace("/", "."), 0)
        units += [Unit(key, chunk, cell.region, (cell,), size, staged=False) for cell in cells]
    if problems:
        raise CheckpointPlanError(problems)
    dealt, slowest = deal(units, ranks, min_split) if split else _whole(units, ranks)
    found: dict[int, list[Write]] = {ranks[0]: empty}
    for rank, unit in dealt:
        found.setdefault(rank, []).append(Write(unit.key, unit.region, unit.nbytes))
    return SavePlan(
        writes={rank: tuple(sorted(writes, key=_order)) for rank, writes in found.items()},
        copies=tuple((u.key, u.cells[0]) for u in units if len(u.cells[0].ranks) > 1),
        nbytes=sum(unit.nbytes for unit in units),
        lower_bound_slowest=slowest,
    )


def _whole(units: Iterable[Unit], ranks: Sequence[int]) -> tuple[list[tuple[int, Unit]], int]:
    """Give each unit to one rank that holds it: those that few ranks hold first, then by size."""
    index = {rank: i for i, rank in enumerate(ranks)}
    ordered = sorted(units, key=lambda unit: (len(unit.ranks), -unit.nbytes, unit.key, unit.region))
    found = balance(
        range(len(ordered)),
        [unit.nbytes for unit in ordered],
        [[index[rank] for rank in unit.ranks] for unit in ordered],
        len(ranks),
        policy="optimal",
    )
    dealt = [(ranks[found.owner[i]], unit) for i, unit in enumerate(ordered)]
    return dealt, int(found.lower_bound)


def _order(write: Write) -> tuple[str, Region]:
    return write.key, write.region
