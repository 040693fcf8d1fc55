"""load: fill a state dict from a checkpoint that each rank of a group reads only a part of.

Phases, each one a collective step that fails on all ranks if it fails on one: (1) open the
checkpoint, describe the own tensors and check them against it; (2) agree on keys, shapes, dtypes
and layouts; (3) plan, which proves that every element is stored; only now is memory written:
(4) read the own part straight into place; (5) exchange; (6) where rows had to be read whole, read
them into staging and exchange, round by round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, Literal, TypeVar

import torch

from ckptx.checkpoint import Checkpoint, Source, open_checkpoint
from ckptx.consensus import agree_on_layouts
from ckptx.destination import StateDict, layouts_here, tensors_of
from ckptx.errors import CheckpointPlanError, as_checkpoint_errors
from ckptx.files import FileReader
from ckptx.plan import MAX_STAGED_NBYTES, LoadPlan, Round, check, plan_load
from ckptx.reader import read_into_places, read_into_staging
from ckptx.report import LoadReport
from distcore.v1 import Channel, Layout, Plan, Problem
from distcore.v1.runtime import ExecuteReport, Group, Shard, channel_over, execute, run_together

T = TypeVar("T")

DEFAULT_STAGING_NBYTES: Final = 64 << 20
MIN_STAGING_NBYTES: Final = 128 << 10


def load(
    state_dict: StateDict,
    path: Source,
    *,
    group: Group | None = None,
    strict: bool = True,
    layouts: Mapping[str, Layout] | None = None,
    max_staging_bytes: int = DEFAULT_STAGING_NBYTES,
    same_host: Literal["auto", "off"] = "auto",
    verify: Literal["xxh3"] | None = None,
    timeout: float | timedelta | None = None,
) -> LoadReport:
    """Fill the tensors of `state_dict`, in place, from the checkpoint at `path`.

    Collective over `group`: every rank of it calls with the same keys. Afterwards each tensor
    holds exactly the stored bytes of its part. A plain tensor is filled whole on every rank, a
    DTensor (FSDP2's parameters are some) with its local part. Each stored byte is read by one
    rank that needs it and sent to the others. Nested dicts are entered; names join with '.'.

    Args:
        path: what `open_checkpoint` takes: a file, a directory, or a mapping key -> file. Each
            rank may have the files at another place.
        group: a process group or a Channel. None is the default group, or this process alone
            where there is none.
        strict: whether a key that only one of state dict and checkpoint has is an error.
            Otherwise it is left alone and listed in the report.
        layouts: for tensors that are parts of larger ones but no DTensors: the layout by key. A
            rank that has no part in one gives an empty tensor under its key.
        max_staging_bytes: memory that may be held beside the tensors, per rank; 128 KiB at least.
        same_host: whether ranks on one host exchange through memory.
        verify: `"xxh3"` proves what was exchanged by a digest.
        timeout: seconds that each wait for other ranks may last.

    Raises, on every rank of the group and with the memory untouched:
        CheckpointPlanError: where the same things do not fit on all ranks; it lists all of them.
        CheckpointPeerError: where one rank has such problems, or cannot read its files.
        CheckpointDisagreement: where keys, shapes, dtypes or files differ between ranks.

    A read that fails later raises CheckpointPeerError with file and errno on every rank, a broken
    connection CheckpointChannelError; then the tensors are incomplete.
    """
    started = time.monotonic()
    timeout_s = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    with as_checkpoint_errors(), channel_over(group) as channel:
        ways = _Ways(channel, max_staging_bytes, same_host, verify, timeout_s)

        def prepared() -> _Job:
            ways.check()
            return _Job.of(state_dict, path, channel, strict=strict, given=layouts or {})

        job = ways.together("open the checkpoint", prepared)
        plan, found = job.plan(ways)
        moved = _fill(job.places(found, channel.rank), plan, ways)
        return _report(job, plan, moved, channel.rank, time.monotonic() - started)


@dataclass(frozen=True, slots=True)
class _Ways:
    """How bytes travel: the channel, and what the caller said about it."""

    channel: Channel
    max_staging_bytes: int
    same_host: Literal["auto", "off"]
    verify: Literal["xxh3"] | None
    timeout_s: float | None

    def check(self) -> None:
        """Refuse what no exchange can be made with."""
        if self.max_staging_bytes < MIN_STAGING_NBYTES:
            text = f"{self.max_staging_bytes} is below {MIN_STAGING_NBYTES}"
            raise CheckpointPlanError(Problem("max_staging_bytes", "range", text))

    def together(self, step: str, fn: Callable[[], T]) -> T:
        """Run `fn` on every rank; where it fails on one, fail on all."""
        return run_together(step, fn, self.channel, timeout_s=self.timeout_s)

    def execute(
        self,
        plan: Plan,
        sources: Mapping[str, Shard],
        destinations: Mapping[str, Shard],
        staging_nbytes: int,
    ) -> ExecuteReport:
        """Carry out an exchange."""
        return execute(
            plan,
            self.channel,
            sources,
            destinations,
            max_staging_bytes=staging_nbytes,
            verify=self.verify,
            timeout=self.timeout_s,
            same_host=self.same_host,
        )


@dataclass(frozen=True, slots=True)
class _Job:
    """What one rank has to do, checked on that rank alone."""

    checkpoint: Checkpoint
    tensors: Mapping[str, torch.Tensor]
    layouts: Mapping[str, Layout]
    given: Mapping[str, Layout]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]

    @classmethod
    def of(
        cls,
        state_dict: StateDict,
        path: Source,
        channel: Channel,
        *,
        strict: bool,
        given: Mapping[str, Layout],
    ) -> _Job:
        """Open and describe; raises with everything that does not fit on this rank."""
        checkpoint = open_checkpoint(path)
        tensors = tensors_of(state_dict)
        layouts = layouts_here(tensors, given, channel.rank, channel.ranks)
        missing = tuple(key for key in tensors if key not in checkpoint.tensors)
        unexpected = tuple(key for key in checkpoint if key not in tensors)
        wanted = [key for key in tensors if key in checkpoint.tensors]
        problems = [p for key in wanted for p in check(key, layouts[key], checkpoint.tensors[key])]
        if strict:
            problems += [
                Problem(key, "missing", f"not in the checkpoint {checkpoint.name}")
                for key in missing
            ]
            text = f"in the checkpoint {checkpoint.name}, but not in the state dict"
            problems += [Problem(key, "unexpected", text) for key in unexpected]
        if problems:
            raise CheckpointPlanError(sorted(problems, key=lambda problem: problem.where))
        return cls(
            checkpoint,
            {key: tensors[key] for key in wanted},
            {key: layouts[key] for key in wanted},
            {key: given[key] for key in wanted if key in given},
            missing,
            unexpected,
        )

    def plan(self, ways: _Ways) -> tuple[LoadPlan, Mapping[str, Layout]]:
        """Agree with the other ranks, and plan. Collective."""
        channel = ways.channel
        found = agree_on_layouts(
            {"<files>": self.checkpoint.digest, "<max_staging_bytes>": ways.max_staging_bytes},
            self.layouts,
            self.tensors,
            channel,
            given=self.given,
            timeout_s=ways.timeout_s,
        )
        staged = min(ways.max_staging_bytes // 2, MAX_STAGED_NBYTES)

        def planned() -> LoadPlan:
            return plan_load(found, self.checkpoint.tensors, channel.ranks, max_staged=staged)

        return ways.together("plan the load", planned), found

    def places(self, layouts: Mapping[str, Layout], rank: int) -> dict[str, Shard]:
        """This rank's tensors with the regions that lie in them."""
        return {
            key: _shard(tensor, layouts[key], rank, given=key in self.given)
            for key, tensor in self.tensors.items()
        }


def _shard(tensor: torch.Tensor, layout: Layout, rank: int, *, given: bool) -> Shard:
    if given:
        return Shard(tensor.detach(), layout.pieces(rank))
    return Shard.of(tensor, rank, layout)


@dataclass(slots=True)
class _Moved:
    """Bytes that one rank has moved so far."""

    read: int = 0
    sent: int = 0
    received: int = 0

    def add(self, report: ExecuteReport) -> None:
        """Count an exchange in."""
        self.sent += report.nbytes_sent
        self.received += report.nbytes_received


def _fill(places: Mapping[str, Shard], plan: LoadPlan, ways: _Ways) -> _Moved:
    """Read and exchange. Collective; from here on the memory changes."""
    moved = _Moved()
    mine = plan.reads.get(ways.channel.rank, ())
    staging = ways.max_staging_bytes
    with FileReader() as files:
        ways.together(
            "read the checkpoint",
            lambda: read_into_places(mine, places, files, copy_nbytes=staging // 8),
        )
        moved.add(ways.execute(plan.exchange, places, places, staging))
        for step in plan.rounds:
            moved.add(_play(step, places, files, ways))
        moved.read = files.nbytes
    return moved


def _play(
    step: Round, places: Mapping[str, Shard], files: FileReader, ways: _Ways
) -> ExecuteReport:
    """Read rows into staging, and take them from there to their places."""
    named = {name: places[key] for name, key in step.keys.items()}
    dtypes = {name: place.data.dtype for name, place in named.items()}
    mine = step.reads.get(ways.channel.rank, ())
    staged = ways.together(
        "read rows of the checkpoint", lambda: read_into_staging(mine, dtypes, files)
    )
    return ways.execute(step.exchange, staged, named, ways.max_staging_bytes // 2)


def _report(job: _Job, plan: LoadPlan, moved: _Moved, rank: int, seconds: float) -> LoadReport:
    return LoadReport(
        bytes_read=moved.read,
        bytes_sent=moved.sent,
        bytes_received=moved.received,
        header_bytes_read=job.checkpoint.header_nbytes,
        lower_bound_read=plan.lower_bound_read,
        lower_bound_slowest_read=plan.lower_bound_slowest,
        lower_bound_received=plan.lower_bound_received[rank],
        missing=job.missing,
        unexpected=job.unexpected,
        seconds=seconds,
    )
