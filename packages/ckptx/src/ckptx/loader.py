"""load: fill a state dict from a checkpoint that each rank of a group reads only a part of.

Phases, each one a collective step that fails on all ranks if it fails on one: (1) open the
checkpoint, describe the own tensors and check them against it; (2) agree on keys, shapes, dtypes
and layouts; (3) plan, which proves that every element is stored; only now is memory written:
(4) read the own part straight into place, and judge it by the digests; (5) exchange; (6) where
rows had to be read whole, read them into staging and exchange, round by round; (7) replace what
is no tensor.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Literal

from ckptx.checkpoint import Source
from ckptx.errors import as_checkpoint_errors
from ckptx.files import FileReader
from ckptx.integrity import Inspector
from ckptx.leaves import StateDict
from ckptx.loadjob import Cast, LoadJob, Mode
from ckptx.reading import Moved, Step
from ckptx.report import LoadReport
from ckptx.shared_values import replace_values
from ckptx.ways import DEFAULT_STAGING_NBYTES, Ways, seconds_of
from distcore.v1 import Layout
from distcore.v1.runtime import Group, channel_over


def load(
    state_dict: StateDict,
    path: Source,
    *,
    group: Group | None = None,
    strict: bool = True,
    cast: Cast = "never",
    mode: Mode = "auto",
    layouts: Mapping[str, Layout] | None = None,
    max_staging_bytes: int = DEFAULT_STAGING_NBYTES,
    same_host: Literal["auto", "off"] = "auto",
    verify: bool | Literal["xxh3"] = True,
    timeout: float | timedelta | None = None,
) -> LoadReport:
    """Fill the tensors of `state_dict`, in place, from the checkpoint at `path`.

    Collective over `group`: every rank of it calls with the same keys. Afterwards each tensor
    holds exactly the stored bytes of its part. A plain tensor is filled whole on every rank, a
    DTensor (FSDP2's parameters are some) with its local part. Each stored byte is read by one
    rank that needs it and sent to the others. Nested dicts, and lists with tensors or dicts in
    them, are entered; names join with '.'. An entry that is no tensor is replaced by the stored
    value, which one rank reads for all.

    Args:
        path: what `open_checkpoint` takes: a directory, a file, or a mapping key -> file. Each
            rank may have the files at another place.
        group: a process group or a Channel. None is the default group, or this process alone
            where there is none.
        strict: whether a key that only one of state dict and checkpoint has is an error.
            Otherwise it is left alone and listed in the report.
        cast: `"allow"` converts what is stored with another dtype; otherwise that is an error.
        mode: `"exchange"` reads each byte once and sends it on, `"direct"` lets every rank read
            all that it needs. `"auto"` reads directly where the ranks need hardly any byte twice.
        layouts: for tensors that are parts of larger ones but no DTensors: the layout by key. A
            rank that has no part in one gives an empty tensor under its key.
        max_staging_bytes: memory that may be held beside the tensors, per rank; 128 KiB at least.
            A tensor that is cast takes its own size besides.
        same_host: whether ranks on one host exchange through memory.
        verify: True proves what was read by the checkpoint's digests, where it has any, and then
            what was exchanged too. `"xxh3"` proves the exchange in any case, False nothing.
        timeout: seconds that each wait for other ranks may last.

    Raises, on every rank of the group and with the memory untouched:
        CheckpointPlanError: where the same things do not fit on all ranks; it lists all of them.
        CheckpointPeerError: where one rank has such problems, or cannot read its files.
        CheckpointDisagreement: where keys, shapes, dtypes or files differ between ranks.

    A read that fails later raises CheckpointPeerError with file and errno on every rank, one that
    does not have the digest it should FormatError where all ranks see that, else
    CheckpointPeerError, both with file, key and byte; a broken connection CheckpointChannelError.
    Then the tensors are incomplete.
    """
    started = time.monotonic()
    with as_checkpoint_errors(), channel_over(group) as channel:
        ways = Ways(channel, max_staging_bytes, same_host, verify, seconds_of(timeout))

        def prepared() -> LoadJob:
            ways.check()
            given = layouts or {}
            return LoadJob.of(state_dict, path, channel, strict=strict, cast=cast, given=given)

        job = ways.together("open the checkpoint", prepared)
        job.plan(ways, mode)
        moved = _fill(job, ways)
        replace_values(job, ways)
        return _report(job, moved, channel.rank, time.monotonic() - started)


def _fill(job: LoadJob, ways: Ways) -> Moved:
    """Read and exchange. Collective; from here on the memory changes."""
    moved = Moved()
    checkpoint = job.checkpoint
    inspector = None
    if ways.verify and checkpoint.integrity is not None:
        inspector = Inspector(checkpoint.integrity, checkpoint.tensors)
    with FileReader(inspector.watch if inspector is not None else None) as files:
        step = Step(ways, files, inspector, moved)
        for batch in job.batches:
            places = job.places(batch, ways.channel.rank)
            (step.alone if job.is_direct else step.together)(batch.plan, places)
            if batch.is_cast:
                job.cast(batch, places, ways.channel.rank)
        moved.read = files.nbytes
    return moved


def _report(job: LoadJob, moved: Moved, rank: int, seconds: float) -> LoadReport:
    plans = [batch.plan for batch in job.batches]
    return LoadReport(
        bytes_read=moved.read,
        bytes_sent=moved.sent,
        bytes_received=moved.received,
        header_bytes_read=job.checkpoint.header_nbytes,
        lower_bound_read=sum(plan.lower_bound_read for plan in plans),
        lower_bound_slowest_read=max(plan.lower_bound_slowest for plan in plans),
        lower_bound_received=sum(plan.lower_bound_received[rank] for plan in plans),
        missing=job.missing,
        unexpected=job.unexpected,
        seconds=seconds,
    )
