"""Execute: a Plan, a Channel and tensors become moved bytes.

One executor serves all packages. It runs in four steps, in this order:

1. *Prepare*: check the own tensors against the plan, then prove with one header that all ranks
   hold the same plan, options and dtypes; give every part its place in memory, and learn, with a
   second header unless little is to be moved, that all have done so. Nothing has moved; every
   mistake raises on all ranks.
2. *Local copies*: transfers from a rank to itself.
3. *Rounds*: pack round i + 1 while round i is on its way, then unpack round i. Large parts that
   lie contiguous move from memory to memory, the rest goes through bounded staging.
4. *Commit*: one header that says whether all ranks succeeded. Only then does the call return.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from types import TracebackType
from typing import Final, Literal, ParamSpec

import torch

from distcore.v1.channel import Channel, Pending
from distcore.v1.errors import PlanError, Problem
from distcore.v1.header import Call, Header, digest16
from distcore.v1.plan import Plan
from distcore.v1.protocols import Progress
from distcore.v1.runtime.agree import fail_together, meet
from distcore.v1.runtime.deadline import Deadline
from distcore.v1.runtime.digests import check, vouch
from distcore.v1.runtime.prepare import SLOTS, Bound, Options, Prepared, Verify, prepare
from distcore.v1.runtime.report import ExecuteReport
from distcore.v1.runtime.shard import Shard
from distcore.v1.runtime.staging import Lane, Slot

DEFAULT_STAGING_NBYTES: Final = 64 << 20
P = ParamSpec("P")


def execute(
    plan: Plan,
    channel: Channel,
    sources: Mapping[str, torch.Tensor | Shard],
    destinations: Mapping[str, torch.Tensor | Shard],
    *,
    max_staging_bytes: int = DEFAULT_STAGING_NBYTES,
    verify: Verify | None = None,
    progress: Progress | None = None,
    timeout: float | timedelta | None = None,
    same_host: Literal["auto", "off"] = "auto",
    failure: BaseException | None = None,
) -> ExecuteReport:
    """Move the bytes of `plan`: afterwards every destination holds what the plan gives it.

    Collective over `channel`; every rank passes the same plan and options, and its own tensors by
    key. A value is a plain tensor (it is the whole tensor, in global coordinates), a DTensor, or
    a Shard. Keys that the plan does not use on this rank are ignored. Destinations are written in
    place, Parameters and strided tensors too. A destination may share memory with a source only
    where both hold the same Region there.

    `max_staging_bytes` bounds the memory held beside the tensors. `verify="xxh3"` proves every
    part after it arrived. `timeout` (seconds or timedelta) bounds the whole call. `same_host`
    says whether ranks on one host may exchange through memory instead of sockets. A rank that has
    failed before it had a plan or tensors gives its error as `failure`, and any plan.

    Raises, on every rank and before a byte has moved: PeerError where a rank's tensors do not fit
    the plan, DisagreementError where plans, options or dtypes differ. PeerError at the end where
    a rank failed on the way; then destinations are incomplete and the channel may be used again.
    Where all ranks failed alike, each raises its own error instead. ChannelError or ChannelTimeout
    where the carrier broke.
    """
    started = time.monotonic()
    timeout_s = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    deadline = Deadline.after(timeout_s)
    with Executor(
        plan,
        channel,
        sources,
        destinations,
        max_staging_bytes=max_staging_bytes,
        verify=verify,
        timeout_s=timeout_s,
        same_host=same_host,
        failure=failure,
    ) as executor:
        return executor._move(progress, deadline, started)


class Executor(AbstractContextManager["Executor"]):
    """A plan bound to a channel and tensors: prepared once, run as often as wanted.

    Making one is collective and raises as `execute` does. `run` moves what the sources hold at
    that time, allocates no memory for data, and is collective too. The tensors must keep their
    memory. `close` frees the staging memory; it is local.
    """

    def __init__(
        self,
        plan: Plan,
        channel: Channel,
        sources: Mapping[str, torch.Tensor | Shard],
        destinations: Mapping[str, torch.Tensor | Shard],
        *,
        max_staging_bytes: int = DEFAULT_STAGING_NBYTES,
        verify: Verify | None = None,
        timeout_s: float | None = None,
        same_host: Literal["auto", "off"] = "auto",
        failure: BaseException | None = None,
    ) -> None:
        deadline = Deadline.after(timeout_s)
        if same_host == "auto" and hasattr(channel, "same_host"):
            channel = channel.same_host(timeout_s=timeout_s)
        self._channel = channel
        options = Options(max_staging_bytes, verify)
        self._label = f"execute {plan.digest[:8]}"
        self._runs = 0
        self._closed = False
        ready = prepare(
            plan,
            channel,
            sources,
            destinations,
            options=options,
            deadline=deadline,
            failure=failure,
        )
        bound = ready.bound
        if bound is None:
            try:
                bound = Bound.of(ready.sides, channel, options, ready.terms)
            except BaseException as error:
                self._meet(Call.PREPARE, error, deadline)
                raise
            self._meet(Call.PREPARE, None, deadline)
        self._prepared, self._slots = bound.prepared, bound.slots

    def run(
        self,
        *,
        progress: Progress | None = None,
        timeout_s: float | None = None,
        failure: BaseException | None = None,
    ) -> ExecuteReport:
        """Move the bytes once more. Collective; see `execute` for errors.

        A rank that has failed before it could fill its sources gives its error as `failure`. Then
        nothing moves and every rank raises PeerError, as where the failure comes to pass in here.
        """
        started, deadline = time.monotonic(), Deadline.after(timeout_s)
        if self._closed:
            failure = PlanError(Problem("executor", "closed", "it has been closed"))
        self._meet(Call.RUN, failure, deadline)
        return self._move(progress, deadline, started)

    def close(self) -> None:
        """Free the staging memory. Local; a second call does nothing."""
        self._slots = ()
        self._closed = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _move(self, progress: Progress | None, deadline: Deadline, started: float) -> ExecuteReport:
        passage = _Passage(self._prepared, self._channel, self._slots, progress, deadline)
        passage.copy_locally()
        passage.play()
        self._runs += 1
        self._meet(Call.COMMIT, passage.failure, deadline)
        return self._report(time.monotonic() - started)

    def _meet(self, call: Call, failure: BaseException | None, deadline: Deadline) -> None:
        """Show the others where this rank is, and whether it has failed; then this raises."""
        header = Header(call, failed=False, label=digest16(self._label), count=self._runs)
        timeout_s = deadline.left_s()
        if failure is not None:
            fail_together(self._label, header, failure, self._channel, timeout_s=timeout_s)
        meet(self._label, header, "", self._channel, timeout_s=timeout_s)

    def _report(self, seconds: float) -> ExecuteReport:
        rounds = self._prepared.rounds
        return ExecuteReport(
            nbytes_sent=sum(lane.nbytes for step in rounds for lane in step.sends),
            nbytes_received=sum(lane.nbytes for step in rounds for lane in step.receives),
            nbytes_local=sum(nbytes for _, _, nbytes in self._prepared.copies),
            messages=sum(len(step.sends) for step in rounds),
            rounds=len(rounds),
            staging_nbytes=sum(slot.nbytes for slot in self._slots),
            seconds=seconds,
        )


class _Passage:
    """One run through the rounds.

    A local failure is kept for the commit: the peers count on this rank's messages, so it goes on
    sending and receiving.
    """

    def __init__(
        self,
        prepared: Prepared,
        channel: Channel,
        slots: tuple[Slot, ...],
        progress: Progress | None,
        deadline: Deadline,
    ) -> None:
        self._prepared = prepared
        self._channel = channel
        self._slots = slots
        self._progress = progress
        self._deadline = deadline
        self._verifies = prepared.options.verify is not None
        self._total = sum(step.nbytes for step in prepared.rounds)
        self._done = 0
        self.failure: BaseException | None = None

    def copy_locally(self) -> None:
        """Copy what the rank sends to itself."""
        # Only in this mode may tensors be written that were made in it; for others it is the same.
        with torch.inference_mode():
            for source, destination, _ in self._prepared.copies:
                self._guard(destination.copy_from, source)

    def play(self) -> None:
        """Pack round i + 1 while round i moves, then unpack round i."""
        moving: tuple[int, Pending] | None = None
        for at in range(len(self._prepared.rounds)):
            pending = self._start(at)
            if moving is not None:
                self._finish(*moving)
            moving = at, pending
        if moving is not None:
            self._finish(*moving)

    def _start(self, at: int) -> Pending:
        step, slot = self._prepared.rounds[at], self._slots[at % SLOTS]
        with torch.inference_mode():
            for lane in step.sends:
                self._guard(self._pack, lane, slot.outgoing)
        sends = [lane.message(slot.outgoing) for lane in step.sends]
        receives = [lane.message(slot.incoming) for lane in step.receives]
        return self._channel.start(sends, receives, timeout_s=self._deadline.left_s())

    def _finish(self, at: int, pending: Pending) -> None:
        step, slot = self._prepared.rounds[at], self._slots[at % SLOTS]
        pending.wait()
        with torch.inference_mode():
            for lane in step.receives:
                self._guard(self._unpack, lane, slot.incoming)
        self._done += step.nbytes
        if self._progress is not None and self.failure is None:
            self._guard(self._progress, self._done, self._total)

    def _pack(self, lane: Lane, slot: torch.Tensor) -> None:
        lane.pack(slot)
        if self._verifies:
            vouch(lane, slot)

    def _unpack(self, lane: Lane, slot: torch.Tensor) -> None:
        lane.unpack(slot)
        if self._verifies:
            check(lane, slot)

    def _guard(self, act: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            act(*args, **kwargs)
        except BaseException as error:  # noqa: BLE001 - told to all ranks at the commit
            if self.failure is None:
                self.failure = error
