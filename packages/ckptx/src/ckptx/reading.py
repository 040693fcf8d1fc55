"""Reading: a load plan carried out, by the ranks of a group together or by each for itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ckptx.files import FileReader
from ckptx.integrity import Inspector
from ckptx.plan import LoadPlan, Round
from ckptx.reader import read_into_places, read_into_staging, staging_nbytes
from ckptx.settling import settle
from ckptx.ways import Ways
from distcore.v1.runtime import ExecuteReport, Shard, scratch


@dataclass(slots=True)
class Moved:
    """Bytes that one rank has moved so far."""

    read: int = 0
    sent: int = 0
    received: int = 0

    def add(self, report: ExecuteReport) -> None:
        """Count an exchange in."""
        self.sent += report.nbytes_sent
        self.received += report.nbytes_received


@dataclass(frozen=True, slots=True)
class Step:
    """What it takes to carry out a plan."""

    ways: Ways
    files: FileReader
    inspector: Inspector | None
    moved: Moved

    def together(self, plan: LoadPlan, places: Mapping[str, Shard]) -> None:
        """Read the own part, and exchange."""
        ways = self.ways
        staging = ways.max_staging_bytes
        self._read(plan, places)
        self._settle()
        report = ways.execute(
            plan.exchange, places, places, staging_nbytes=staging, prove=self._is_proven
        )
        self.moved.add(report)
        mine = [step.reads.get(ways.channel.rank, ()) for step in plan.rounds]
        # One piece of memory for all rounds: an allocator would keep several of them.
        memory = scratch(max(map(staging_nbytes, mine), default=0))
        for step in plan.rounds:
            self.moved.add(self._play(step, places, memory))
        if plan.rounds:
            self._settle()

    def alone(self, plan: LoadPlan, places: Mapping[str, Shard]) -> None:
        """Read all that this rank needs."""
        self._read(plan, places)

        def staged() -> None:
            for step in plan.rounds:
                named = {name: places[key] for name, key in step.keys.items()}
                dtypes = {name: place.data.dtype for name, place in named.items()}
                for reads in step.reads.values():
                    found = read_into_staging(reads, dtypes, self.files)
                    for transfer in step.exchange:
                        source = found[transfer.key].box(transfer.region)
                        named[transfer.key].box(transfer.region).copy_from(source)

        self.ways.together("read rows of the checkpoint", staged)
        self._settle()

    @property
    def _is_proven(self) -> bool:
        return self.ways.verify == "xxh3" or self.inspector is not None

    def _read(self, plan: LoadPlan, places: Mapping[str, Shard]) -> None:
        mine = plan.reads.get(self.ways.channel.rank, ())
        nbytes = self.ways.max_staging_bytes // 8
        self.ways.together(
            "read the checkpoint",
            lambda: read_into_places(mine, places, self.files, copy_nbytes=nbytes),
        )

    def _play(
        self, step: Round, places: Mapping[str, Shard], memory: torch.Tensor
    ) -> ExecuteReport:
        """Read rows into staging, and take them from there to their places."""
        named = {name: places[key] for name, key in step.keys.items()}
        dtypes = {name: place.data.dtype for name, place in named.items()}
        mine = step.reads.get(self.ways.channel.rank, ())
        staged = self.ways.together(
            "read rows of the checkpoint",
            lambda: read_into_staging(mine, dtypes, self.files, memory=memory),
        )
        nbytes = self.ways.max_staging_bytes // 2
        return self.ways.execute(
            step.exchange, staged, named, staging_nbytes=nbytes, prove=self._is_proven
        )

    def _settle(self) -> None:
        if self.inspector is not None:
            settle(self.inspector, self.ways)
