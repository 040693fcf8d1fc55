"""Ranks as threads of this process, over real gloo groups that are in no default world.

Starting four ranks takes some tens of milliseconds, so this is the way to test whatever takes a
channel. What needs the default group (DeviceMesh, FSDP2) is for `rank_pool`.
"""

from __future__ import annotations

import atexit
import faulthandler
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Generic, TypeVar, TypeVarTuple

from torch._C._distributed_c10d import HashStore, ProcessGroupGloo, Store

from distcore.testing.outcomes import DeadlineError, Outcome, Outcomes
from distcore.v1.runtime.group_channel import GroupChannel

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_MAX_EXIT_S = 30.0


def rank_threads(
    size: int,
    fn: Callable[[GroupChannel, *Ts], T],
    /,
    *args: *Ts,
    deadline_s: float = 20.0,
) -> Outcomes[T]:
    """Run `fn(channel, *args)` on `size` ranks, a thread each, and return all outcomes by rank.

    Each rank has a `GroupChannel` (its group is `channel.group`) with ranks 0 to `size - 1`; all
    ranks share `args`. A rank that raises leaves its group open, as a living process would, so
    the others run into their own timeout. The group's own timeout is `deadline_s`.
    Raises DeadlineError with the stacks of the ranks that are still busy after `deadline_s`; it
    also dumps the stacks of all threads to stderr.

        def total(channel: Channel, factor: int) -> int:
            rows = channel.all_gather(bytes([channel.rank * factor]))
            return sum(row[0] for row in rows)

        assert rank_threads(4, total, 10).values() == (60, 60, 60, 60)

    The twin of each test, in which a rank fails:

        rank_threads(4, broken).raised(PeerError, within_s=3)
    """
    store = HashStore()
    # Held here until all ranks are done, so that none is cut off by a faster one.
    groups: dict[int, ProcessGroupGloo] = {}

    def run(rank: int) -> T:
        groups[rank] = loopback_group(store, rank, size, timeout_s=deadline_s)
        return fn(GroupChannel(groups[rank], ranks=range(size)), *args)

    return run_threads(size, run, deadline_s=deadline_s)


def run_threads(size: int, run: Callable[[int], T], *, deadline_s: float) -> Outcomes[T]:
    """Run `run(rank)` in `size` threads at once; the bare form of `rank_threads`."""
    ranks = [_RankThread(rank, run) for rank in range(size)]
    deadline = time.monotonic() + deadline_s
    for rank in ranks:
        rank.thread.start()
    for rank in ranks:
        rank.thread.join(max(0.0, deadline - time.monotonic()))
    busy = [rank for rank in ranks if rank.thread.is_alive()]
    if busy:
        for rank in busy:
            # A thread that wakes up inside gloo while the interpreter ends would abort it.
            atexit.register(rank.thread.join, min(deadline_s + 5, _MAX_EXIT_S))
        faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)
        ended = [rank.outcome() for rank in ranks if rank not in busy]
        raise DeadlineError.of(deadline_s, {rank.rank: rank.stack() for rank in busy}, ended)
    return Outcomes(tuple(rank.outcome() for rank in ranks))


def loopback_group(
    store: Store, rank: int, size: int, *, timeout_s: float = 20.0
) -> ProcessGroupGloo:
    """Return a gloo group over the loopback device that is in no default world."""
    # Typed as private by torch's stubs, but the only way to name the device.
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=timeout_s)
    return ProcessGroupGloo(store, rank, size, options)


class _RankThread(Generic[T]):
    """One rank: its thread and what becomes of it."""

    def __init__(self, rank: int, run: Callable[[int], T]) -> None:
        self.rank = rank
        self._run = run
        self._outcome: Outcome[T] | None = None
        self.thread = threading.Thread(target=self._main, name=f"rank-{rank}", daemon=True)

    def _main(self) -> None:
        begin = time.monotonic()
        try:
            value = self._run(self.rank)
            self._outcome = Outcome(self.rank, time.monotonic() - begin, value=value)
        except BaseException as error:  # noqa: BLE001 - the outcome carries it
            self._outcome = Outcome(self.rank, time.monotonic() - begin, exception=error)

    def outcome(self) -> Outcome[T]:
        """Return what became of the rank, once its thread has ended."""
        if self._outcome is None:
            raise RuntimeError(f"rank {self.rank} has not ended")
        return self._outcome

    def stack(self) -> str:
        """Return where the rank's thread is, as text."""
        frame = sys._current_frames().get(self.thread.ident or 0)
        lines = traceback.format_stack(frame) if frame is not None else ["  (ended)\n"]
        return "".join(lines)
