"""What the acts of the demo show: the bytes that were moved, and what holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
import torch.distributed as dist
from rich.table import Table

Verdict = tuple[str, bool]


@dataclass(frozen=True, slots=True)
class Moved:
    """What one rank moved in a step, in bytes, and how long that took.

    `least` is what all ranks must receive from each other at least.
    """

    name: str
    read: int = 0
    written: int = 0
    received: int = 0
    least: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Act:
    """What an act did on this rank, and what must hold after it on all."""

    moved: list[Moved] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)

    def __iadd__(self, other: Act) -> Self:
        self.moved += other.moved
        self.verdicts += other.verdicts
        return self


def total(value: int) -> int:
    """The sum over all ranks. Collective."""
    found = torch.tensor(value)
    dist.all_reduce(found)
    return int(found)


def highest(value: float) -> float:
    """The maximum over all ranks. Collective."""
    found = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def summary(steps: Sequence[Moved]) -> Table:
    """One row per step, of the bytes of all ranks and the time of the slowest. Collective."""
    title = "Bytes that all ranks together moved, and had to receive at least"
    # Without lines, so that it fits into 80 characters.
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    table.add_column("")
    for name in ("read", "written", "received", "least", "seconds"):
        table.add_column(name, justify="right", style="dim" if name == "least" else "")
    for step in steps:
        figures = (step.read, step.written, step.received, step.least)
        row = [shown(total(figure)) for figure in figures]
        table.add_row(step.name, *row, f"{highest(step.seconds):.3f}")
    return table


def shown(nbytes: float) -> str:
    return f"{round(nbytes):,}"
