"""save: write a state dict as a checkpoint of which each rank of a group writes a part.

Phases, each one a collective step that fails on all ranks if it fails on one: (1) describe the own
tensors; (2) agree on keys, shapes, dtypes, layouts and values; (3) plan; (4) prove that copies are
equal; (5) make the directory; (6) write the own files; (7) bring the digests together, write what
makes the directory a checkpoint, and give it its name.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Final, TypeAlias

from ckptx.errors import CheckpointingException, as_checkpoint_errors
from ckptx.finishing import Blocks, make_directory, publish_together, write_files
from ckptx.leaves import StateDict
from ckptx.report import SaveReport
from ckptx.savejob import Format, SaveJob
from ckptx.staged import Staged
from ckptx.ways import DEFAULT_STAGING_NBYTES, Ways, seconds_of
from distcore.v1 import Layout
from distcore.v1.runtime import Group, channel_over

DEFAULT_ASYNC_NBYTES: Final = 8 << 30
Path: TypeAlias = str | os.PathLike[str]


def save(
    state_dict: StateDict,
    path: Path,
    *,
    group: Group | None = None,
    format: Format = "safetensors",  # noqa: A002 - the word that users of such functions know
    layouts: Mapping[str, Layout] | None = None,
    overwrite: bool = False,
    split: bool = True,
    digests: bool = True,
    prove_copies: bool = True,
    max_staging_bytes: int = DEFAULT_STAGING_NBYTES,
    timeout: float | timedelta | None = None,
) -> SaveReport:
    """Write the state dict as a checkpoint, a new directory at `path`.

    Collective over `group`: every rank of it calls with the same keys. Afterwards the directory
    holds every element once; what several ranks hold was shared out between them. A plain tensor
    is taken to be the same on all ranks, a DTensor is saved from its local parts. Names of nested
    dicts join with '.'; entries that are no tensors must be plain data, the same on every rank.

    The directory has its name only when it is complete and on the disk. Until then it is called
    `<path>.partial`, and is refused by `open_checkpoint`; an older checkpoint at `path` stays.

    Args:
        path: on a file system that all ranks share.
        group: a process group or a Channel. None is the default group, or this process alone
            where there is none.
        format: `"safetensors"`, or `"dcp"` for what `torch.distributed.checkpoint.load` reads.
        layouts: for tensors that are parts of larger ones but no DTensors: the layout by key.
        overwrite: whether a checkpoint at `path` may be replaced.
        split: whether a tensor that several ranks hold may be written by them in parts. Without
            it, tensors that are not sharded are written whole, as other tools expect.
        digests: whether to write a side file with digests of all bytes.
        prove_copies: whether copies are compared before one of them is written.
        max_staging_bytes: memory that may be held beside the tensors, per rank.
        timeout: seconds that each wait for other ranks may last.

    Raises, on every rank and with nothing published:
        CheckpointPlanError: where tensors, values or `path` do not allow it on all ranks.
        CheckpointPeerError: where one rank has such problems or cannot write, with file and errno.
        CheckpointDisagreement: where ranks differ in keys, shapes, values or copies.
    """
    started = time.monotonic()
    with as_checkpoint_errors(), channel_over(group) as channel:
        ways = Ways(channel, max_staging_bytes, "auto", False, seconds_of(timeout))
        job = _prepared(
            state_dict, os.fspath(path), ways, kind=format, layouts=layouts or {},
            overwrite=overwrite, split=split, prove_copies=prove_copies,
        )  # fmt: skip
        blocks = ways.together("write the checkpoint", lambda: write_files(job.open(), job.pieces))
        publish_together(job, blocks, ways, digests=digests)
        return job.report(time.monotonic() - started)


def save_async(
    state_dict: StateDict,
    path: Path,
    *,
    group: Group | None = None,
    format: Format = "safetensors",  # noqa: A002 - the word that users of such functions know
    layouts: Mapping[str, Layout] | None = None,
    overwrite: bool = False,
    split: bool = True,
    digests: bool = True,
    prove_copies: bool = True,
    max_staging_bytes: int = DEFAULT_ASYNC_NBYTES,
    timeout: float | timedelta | None = None,
) -> SaveHandle:
    """Save as `save` does, but return as soon as the tensors may be changed again.

    Collective. Only what this rank is to write is copied, up to `max_staging_bytes`; boxes beyond
    that are written before the call returns. The rest is written by a thread of this process.
    Every rank then calls `wait()` on the handle: it is collective, raises what went wrong on any
    rank, and publishes the checkpoint; without it there is none.
    """
    started = time.monotonic()
    with as_checkpoint_errors(), channel_over(group) as channel:
        copy_nbytes = min(max_staging_bytes, DEFAULT_STAGING_NBYTES)
        ways = Ways(channel, copy_nbytes, "auto", False, seconds_of(timeout))
        job = _prepared(
            state_dict, os.fspath(path), ways, kind=format, layouts=layouts or {},
            overwrite=overwrite, split=split, prove_copies=prove_copies,
        )  # fmt: skip

        write = ways.together("stage the checkpoint", lambda: _staged(job, max_staging_bytes))
    # What is left to do needs the copies alone; the caller may drop the tensors.
    job.shards, job.tensors = {}, {}
    return SaveHandle(job, _Thread(write), group, digests=digests, timeout=timeout, started=started)


def _staged(job: SaveJob, budget: int) -> Callable[[], Blocks]:
    """Copy what fits into the budget, and write the rest; returns what writes the copies."""
    parts = [part for file in job.mine for part in file.parts]
    staged = Staged(parts, job.pieces, budget)
    files = job.open()
    for file in files:
        file.write([part for part in file.file.parts if part not in staged], job.pieces)
    return lambda: write_files(files, staged.pieces, only=staged)


class SaveHandle:
    """A save that is under way. Belongs to the thread that started it; `wait()` ends it."""

    def __init__(
        self,
        job: SaveJob,
        write: _Thread,
        group: Group | None,
        *,
        digests: bool,
        timeout: float | timedelta | None,
        started: float,
    ) -> None:
        self._job: SaveJob | None = job
        self._write = write
        self._group = group
        self._digests = digests
        self._timeout_s = seconds_of(timeout)
        self._started = started

    def done(self) -> bool:
        """Whether this rank's files are written, or could not be. Local, returns at once."""
        return not self._write.is_alive()

    def wait(self) -> SaveReport:
        """Wait for all ranks, and publish the checkpoint. Collective.

        Raises CheckpointPeerError on every rank where one could not write. May be called once.
        """
        job = self._job
        if job is None:
            raise CheckpointingException("this save has been waited for already")
        self._job = None
        with as_checkpoint_errors(), channel_over(self._group) as channel:
            ways = Ways(channel, DEFAULT_STAGING_NBYTES, "auto", False, self._timeout_s)
            blocks = ways.together("write the checkpoint", self._write.result)
            publish_together(job, blocks, ways, digests=self._digests)
            return job.report(time.monotonic() - self._started)


class _Thread(threading.Thread):
    """A thread whose result, or error, is kept for `result()`."""

    def __init__(self, fn: Callable[[], Blocks]) -> None:
        super().__init__(name="ckptx-save", daemon=True)
        self._fn = fn
        self._found: Blocks | None = None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        """Write."""
        try:
            self._found = self._fn()
        except BaseException as error:  # noqa: BLE001 - raised again by result()
            self._error = error

    def result(self) -> Blocks:
        """What the thread found, once it has ended; raises what it raised."""
        self.join()
        if self._error is not None:
            raise self._error
        return self._found or {}


def _prepared(
    state_dict: StateDict,
    path: str,
    ways: Ways,
    *,
    kind: Format,
    layouts: Mapping[str, Layout],
    overwrite: bool,
    split: bool,
    prove_copies: bool,
) -> SaveJob:
    """Phases 1 to 5."""

    def described() -> SaveJob:
        ways.check()
        return SaveJob.of(state_dict, path, ways.channel, kind=kind, given=layouts)

    job = ways.together("describe the state dict", described)
    job.plan(ways, split=split, overwrite=overwrite)
    if prove_copies:
        job.prove(ways)
    make_directory(path, ways, overwrite=overwrite)
    return job
