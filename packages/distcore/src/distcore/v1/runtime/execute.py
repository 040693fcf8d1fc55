"""Execute: a Plan, a Channel and tensors become moved bytes.

One executor serves all packages. It runs in four steps, in this order:

1. *Prepare*: check the own tensors against the plan, then prove with one header that all ranks
   hold the same plan, options and dtypes. Nothing has moved; every mistake raises on all ranks.
2. *Local copies*: transfers from a rank to itself.
3. *Rounds*: pack round i + 1 while round i is on its way, then unpack round i. Large parts that
   lie contiguous move from memory to memory, the rest goes through bounded staging.
4. *Commit*: one header that says whether all ranks succeeded. Only then does the call return.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Final, Literal, ParamSpec

import torch

from distcore.v1.channel import Channel, Message, Pending
from distcore.v1.header import Call, Header, digest16
from distcore.v1.plan import Plan
from distcore.v1.protocols import Progress
from distcore.v1.runtime.agree import failure_text, meet
from distcore.v1.runtime.digests import DIGEST_NBYTES, check_parts, digest_parts
from distcore.v1.runtime.group_channel import GroupChannel
from distcore.v1.runtime.prepare import Options, Prepared, Verify, prepare
from distcore.v1.runtime.report import ExecuteReport
from distcore.v1.runtime.shard import Shard
from distcore.v1.runtime.staging import Lane, Slot

DEFAULT_STAGING_NBYTES: Final = 64 << 20
SLOTS: Final = 2
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
) -> ExecuteReport:
    """Move the bytes of `plan`: afterwards every destination holds what the plan gives it.

    Collective over `channel`; every rank passes the same plan and options, and its own tensors by
    key. A value is a plain tensor (it is the whole tensor, in global coordinates), a DTensor, or
    a Shard. Keys that the plan does not use on this rank are ignored. Destinations are written in
    place, Parameters and strided tensors too. A destination may share memory with a source only
    where both hold the same Region there.

    `max_staging_bytes` bounds the memory held beside the tensors. `verify="xxh3"` proves every
    part after it arrived. `timeout` (seconds or timedelta) bounds the whole call. `same_host`
    says whether ranks on one host may exchange through memory instead of sockets.

    Raises, on every rank and before a byte has moved: PeerError where a rank's tensors do not fit
    the plan, DisagreementError where plans, options or dtypes differ. PeerError at the end where
    a rank failed on the way; then destinations are incomplete and the channel may be used again.
    ChannelError or ChannelTimeout where the carrier broke.
    """
    timeout_s = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    with Executor(
        plan,
        channel,
        sources,
        destinations,
        max_staging_bytes=max_staging_bytes,
        verify=verify,
        timeout_s=timeout_s,
        same_host=same_host,
    ) as executor:
        return executor.run(progress=progress, timeout_s=timeout_s)


class Executor(AbstractContextManager["Executor"]):
    """A plan bound to a channel and tensors: prepared once, run as often as wanted.

    Making one is collective and raises as `execute` does. `run` moves what the sources hold at
    that time, allocates nothing, and is collective too. The tensors must keep their memory.
    `close` frees the staging memory; it is local.
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
    ) -> None:
        self._started = time.monotonic()
        deadline = None if timeout_s is None else self._started + timeout_s
        if same_host == "auto" and hasattr(channel, "same_host"):
            channel = channel.same_host(timeout_s=timeout_s)
        self._channel = channel
        options = Options(max_staging_bytes, verify)
        prepared = prepare(
            plan, channel, sources, destinations, options=options, timeout_s=_left(deadline)
        )
        self._prepared = prepared
        self._slots: tuple[Slot, ...] = tuple(
            Slot.of(prepared.slot_nbytes, channel.device)
            for _ in range(min(SLOTS, len(prepared.rounds)))
        )
        self._label = f"execute {plan.digest[:8]}"
        self._runs = 0

    def run(
        self, *, progress: Progress | None = None, timeout_s: float | None = None
    ) -> ExecuteReport:
        """Move the bytes once more. Collective; see `execute` for errors."""
        started = time.monotonic() if self._runs else self._started
        deadline = None if timeout_s is None else started + timeout_s
        self._meet(Call.RUN if self._runs else None, None, deadline)
        passage = _Passage(self._prepared, self._channel, self._slots, progress, deadline)
        passage.copy_locally()
        passage.play()
        self._runs += 1
        self._meet(Call.COMMIT, passage.failure, deadline)
        return self._report(time.monotonic() - started)

    def close(self) -> None:
        """Free the staging memory. Local; a second call does nothing."""
        self._slots = ()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _meet(
        self, call: Call | None, failure: BaseException | None, deadline: float | None
    ) -> None:
        """Show the others where this rank is, and whether it has failed."""
        if call is None:
            return
        header = Header(
            call, failed=failure is not None, label=digest16(self._label), count=self._runs
        )
        text = "" if failure is None else failure_text(failure)
        meet(self._label, header, text, self._channel, timeout_s=_left(deadline), cause=failure)

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
        deadline: float | None,
    ) -> None:
        self._prepared = prepared
        self._channel = channel
        self._slots = slots
        self._progress = progress
        self._deadline = deadline
        self._total = sum(step.nbytes for step in prepared.rounds)
        self._done = 0
        self.failure: Exception | None = None

    def copy_locally(self) -> None:
        """Copy what the rank sends to itself."""
        for source, destination, _ in self._prepared.copies:
            self._guard(destination.copy_from, source)

    def play(self) -> None:
        """Pack round i + 1 while round i moves, then unpack round i."""
        moving: tuple[int, _Flight] | None = None
        for at in range(len(self._prepared.rounds)):
            flight = self._start(at)
            if moving is not None:
                self._finish(*moving)
            moving = at, flight
        if moving is not None:
            self._finish(*moving)

    def _start(self, at: int) -> _Flight:
        step, slot = self._prepared.rounds[at], self._slots[at % SLOTS]
        for lane in step.sends:
            self._guard(lane.pack, slot.outgoing)
        sends = [lane.message(slot.outgoing) for lane in step.sends]
        receives = [lane.message(slot.incoming) for lane in step.receives]
        digests: list[torch.Tensor] = []
        if self._prepared.options.verify is not None:
            sends = [
                self._vouched(lane, message)
                for lane, message in zip(step.sends, sends, strict=True)
            ]
            digests = [self._space_for_digests(lane) for lane in step.receives]
            receives = [
                Message(message.peer, (*message.buffers, digest))
                for message, digest in zip(receives, digests, strict=True)
            ]
        pending = self._channel.start(sends, receives, timeout_s=_left(self._deadline))
        return _Flight(pending, digests)

    def _finish(self, at: int, flight: _Flight) -> None:
        step, slot = self._prepared.rounds[at], self._slots[at % SLOTS]
        flight.pending.wait()
        for number, lane in enumerate(step.receives):
            self._guard(lane.unpack, slot.incoming)
            if flight.digests:
                digests = flight.digests[number]
                self._guard(check_parts, lane.batch, self._prepared.destinations, digests)
        self._done += step.nbytes
        if self._progress is not None and self.failure is None:
            self._guard(self._progress, self._done, self._total)

    def _vouched(self, lane: Lane, message: Message) -> Message:
        digests = self._space_for_digests(lane)
        self._guard(lambda: digests.copy_(digest_parts(lane.batch, self._prepared.sources)))
        return Message(message.peer, (*message.buffers, digests))

    def _space_for_digests(self, lane: Lane) -> torch.Tensor:
        nbytes = DIGEST_NBYTES * len(lane.batch.parts)
        return torch.zeros(nbytes, dtype=torch.uint8, device=self._channel.device)

    def _guard(self, act: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            act(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - told to all ranks at the commit
            if self.failure is None:
                self.failure = error


@dataclass(frozen=True, slots=True)
class _Flight:
    """A round that is on its way, and where its digests arrive."""

    pending: Pending
    digests: list[torch.Tensor]


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())
