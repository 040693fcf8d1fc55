"""What the acts of the demo show: the bytes that were moved, and what holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Self

import torch
import torch.distributed as dist

Verdict = tuple[str, bool]


@dataclass(frozen=True, slots=True)
class Moved:
    """What one rank moved in one step of the story, in bytes, and how long that took.

    `least` is what all ranks must read, write and receive together at least.
    What recurs, as the steps of an optimizer do, has one name and a `turn`.
    """

    name: str
    read: int = 0
    written: int = 0
    received: int = 0
    least: int = 0
    seconds: float = 0.0
    turn: int = 0


@dataclass(slots=True)
class Act:
    """What a part of the story did on this rank, and what must hold after it on all."""

    name: str
    moved: list[Moved] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)

    def __iadd__(self, other: Act) -> Self:
        self.moved += other.moved
        self.verdicts += other.verdicts
        return self


@dataclass(frozen=True, slots=True)
class Row:
    """One step of the story on all ranks: bytes of all together, seconds of the slowest.

    `least` bounds the bytes from below. `floor` is what so many bytes take as one plain copy (or,
    for an optimizer, what one process computes, shared by the cores); None where it is not known.
    """

    act: str
    name: str
    read: int
    written: int
    received: int
    least: int
    seconds: float
    floor: float | None
    exact: bool

    @property
    def nbytes(self) -> int:
        return self.read + self.written + self.received


class Ledger:
    """What all ranks have told so far."""

    def __init__(self) -> None:
        self._moved: dict[tuple[str, str], dict[int, dict[int, Moved]]] = {}
        self._verdicts: dict[str, dict[str, bool]] = {}
        self._rates: dict[str, dict[int, tuple[float, float]]] = {}
        self.floors: dict[str, float] = {}

    def add(self, rank: int, act: Act) -> None:
        """Take in what a rank tells; a text that one rank denies does not hold."""
        for moved in act.moved:
            self._moved.setdefault((act.name, moved.name), {}).setdefault(moved.turn, {})[rank] = (
                moved
            )
        known = self._verdicts.setdefault(act.name, {})
        for text, holds in act.verdicts:
            known[text] = known.get(text, True) and holds

    def gauge(self, rank: int, way: str, nbytes: float, seconds: float) -> None:
        """Note how fast a rank read, wrote or copied, as all did so at once."""
        self._rates.setdefault(way, {})[rank] = (nbytes, seconds)

    def rate(self, way: str) -> float | None:
        """The bytes per second of the whole machine; None where it was not measured."""
        found = self._rates.get(way, {}).values()
        slowest = max((seconds for _, seconds in found), default=0.0)
        return sum(nbytes for nbytes, _ in found) / slowest if slowest else None

    def exact(self, act: str) -> bool:
        """Whether all that was claimed of an act holds, and something was."""
        claims = self._verdicts.get(act, {})
        return bool(claims) and all(claims.values())

    def verdicts(self) -> Iterable[tuple[str, str, bool]]:
        """Act, claim, and whether it holds on every rank that told."""
        for act, claims in self._verdicts.items():
            for text, holds in claims.items():
                yield act, text, holds

    @property
    def nbytes(self) -> int:
        """All that was moved so far."""
        return sum(
            moved.read + moved.written + moved.received
            for turns in self._moved.values()
            for ranks in turns.values()
            for moved in ranks.values()
        )

    def received(self, rank: int) -> int:
        """What one rank has received so far."""
        turns = (found for turns in self._moved.values() for found in turns.values())
        return sum(ranks[rank].received for ranks in turns if rank in ranks)

    def rows(self) -> list[Row]:
        return [self._row(act, name, turns) for (act, name), turns in self._moved.items()]

    def _row(self, act: str, name: str, turns: Mapping[int, Mapping[int, Moved]]) -> Row:
        every = [moved for ranks in turns.values() for moved in ranks.values()]
        read, written, received = (
            sum(getattr(moved, key) for moved in every) for key in ("read", "written", "received")
        )
        return Row(
            act,
            f"{name}, {len(turns)} steps" if len(turns) > 1 else name,
            read,
            written,
            received,
            sum(moved.least for moved in every),
            sum(max(moved.seconds for moved in ranks.values()) for ranks in turns.values()),
            self.floors.get(name) or self._floor(read=read, write=written, copy=received),
            self.exact(act),
        )

    def _floor(self, **nbytes: int) -> float | None:
        seconds = 0.0
        for way, count in nbytes.items():
            rate = self.rate(way)
            if count and rate is None:
                return None
            seconds += count / rate if rate else 0.0
        return seconds


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


def shown(nbytes: float) -> str:
    return f"{round(nbytes):,}"
