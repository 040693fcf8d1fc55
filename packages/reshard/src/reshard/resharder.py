"""Resharder: a state dict's way between meshes, planned once and run as often as wanted.

Making one goes in these steps, each of which ends for all ranks alike:

1. *Describe*: every rank reads its own tensors; records go to all ranks.
2. *Settle*: all ranks hold the records against each other, and plan.
3. *Bind*: every rank gives the plan's Regions their places in its memory; buffers are made.

A run moves what the sources hold at that time:

1. *Agree* on the version and on how to verify; hooks, casts and copies are done on the way.
2. *Reduce* partial sources. Until here no destination has changed.
3. *Move* and write; destinations are dirty until the end.
4. *Commit*: every rank confirms the version and that it has received all bytes, or all raise.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from types import TracebackType
from typing import Final

from distcore.v1 import Channel, PlanError, Problem
from distcore.v1.runtime import ExecuteReport, Group, agree, channel_over, run_together
from reshard.bounds import Bounds
from reshard.compiled import Compiled, Verify, exchanges_of
from reshard.deadlines import Countdown
from reshard.ends import Ends
from reshard.handle import Handle, Tally
from reshard.hooks import Hook
from reshard.inventory import Cast, take_inventory
from reshard.missing import missing_nbytes
from reshard.options import Options
from reshard.plan import ReshardPlan
from reshard.plan_cache import PlanCache
from reshard.report import TransferReport
from reshard.stats import Stats

DEFAULT_STAGING_NBYTES: Final = 64 << 20


class Resharder(AbstractContextManager["Resharder"]):
    """Carries the tensors of `src` into those of `dst`, from any mesh and placement to any other.

    `src` and `dst` are (nested) dicts of tensors, or single ones: DTensors, plain tensors (held
    whole by every rank that gives them), `Placed` tensors, references with a shape, a dtype, a
    mesh, placements and a local tensor, and any of these on the meta device (then it plans, and
    cannot run). A rank outside a mesh passes None or leaves the key out; torch's empty DTensor of
    a non-member counts as None. Mesh ranks are global ranks, in a subgroup too.

    `group` is a process group or a channel; None is the default group. All its ranks make the
    Resharder, and run it, together. Sources that are partial are reduced on the way. A
    destination is written in place, Parameters too; sources may share memory with destinations.

    `cast` says whether a source may be converted to its destination's dtype (`"convert"`) or not
    (`"error"`), for all tensors or by key, where `"*"` stands for the rest. `hooks` are local,
    by key. `nodes` says on which node each rank is. `max_staging_bytes` bounds the memory for
    what is on its way; each of up to three exchanges has at least 64 KiB of it. What `cache`
    has is not planned again; it is local, as the hooks are. `timeout_s` bounds every call that
    names no timeout of its own.

    Every mistake raises on every rank and names ranks and keys, before a destination has
    changed: PeerError where a rank's own tensors are wrong, DisagreementError where ranks
    describe a tensor differently or ask for different options, PlanError where the whole does
    not fit. After an error the group stays usable, unless it was a ChannelError that says not.
    """

    def __init__(
        self,
        src: object,
        dst: object,
        group: Group | None = None,
        *,
        options: Options | None = None,
        nodes: Mapping[int, int] | Sequence[int] | None = None,
        cast: Cast | Mapping[str, Cast] = "error",
        hooks: Mapping[str, Hook] | None = None,
        max_staging_bytes: int = DEFAULT_STAGING_NBYTES,
        cache: PlanCache | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self._opened = channel_over(group)
        self._timeout_s = timeout_s
        self._max_staging_bytes = max_staging_bytes
        self._compiled: Compiled | None = None
        self._handle: Handle | None = None
        self._closed = False
        self._dirty = False
        self._version = 0
        countdown = Countdown(timeout_s)
        try:
            self._inventory = take_inventory(
                src,
                dst,
                self._channel,
                terms=(options or Options(), nodes, cast, max_staging_bytes),
                hooks=hooks or {},
                cache=cache,
                countdown=countdown,
            )
            self._digest = self._inventory.plan.digest
            self._bound = missing_nbytes(self._inventory.plan, self._channel.rank)
            if self._inventory.has_values:
                self._compiled = self._compile(None, countdown)
        except BaseException:
            self._opened.close()
            raise

    @property
    def plan(self) -> ReshardPlan:
        """The plan, the same on all ranks."""
        return self._inventory.plan

    @property
    def stats(self) -> Stats:
        """What the plan moves."""
        return self.plan.stats()

    @property
    def bounds(self) -> Bounds:
        """What no plan between these layouts can go below."""
        return self.plan.bounds()

    @property
    def version(self) -> int:
        """The version that all ranks confirmed last; 0 before the first run."""
        return self._version

    @property
    def dirty(self) -> bool:
        """Whether a run began to write destinations and did not come to its end."""
        return self._dirty

    def run(
        self,
        version: int | None = None,
        verify: Verify | None = None,
        *,
        timeout_s: float | None = None,
    ) -> TransferReport:
        """Move what the sources hold now; afterwards all destinations hold it, on all ranks.

        Collective. `version` is what the destinations hold then, by default one more than
        before. `verify="digest"` proves every part by its digest after it has arrived. A run that
        verifies as the one before it did allocates nothing; any other gives the staging memory
        back and prepares anew.

        Raises, on every rank: DisagreementError where versions or ways to verify differ,
        PeerError where a rank failed. `dirty` says whether destinations have been touched.
        """
        self._refuse_while_running()
        return self._run(version, verify, timeout_s, Tally())

    def start(
        self,
        version: int | None = None,
        verify: Verify | None = None,
        *,
        timeout_s: float | None = None,
    ) -> Handle:
        """Begin a run in the background; its handle waits for the end and shows the progress.

        Give the Resharder a group that carries nothing else meanwhile. A second run, and `close`,
        come after `wait`.
        """
        self._refuse_while_running()
        self._handle = Handle(lambda tally: self._run(version, verify, timeout_s, tally))
        return self._handle

    def close(self) -> None:
        """Free all buffers; idempotent and local. A run in the background is waited for."""
        handle, self._handle = self._handle, None
        if handle is not None and not handle.done:
            handle.join()
        self._release()
        self._inventory = replace(self._inventory, ends=Ends(self._channel.rank))
        self._closed = True
        self._opened.close()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def _channel(self) -> Channel:
        return self._opened.channel

    def _refuse_while_running(self) -> None:
        if self._handle is not None and not self._handle.done:
            raise PlanError(Problem("run", "busy", "a run is under way; wait for its handle"))

    def _release(self) -> None:
        compiled, self._compiled = self._compiled, None
        if compiled is not None:
            compiled.close()

    def _compiled_for(self, verify: Verify | None, countdown: Countdown) -> Compiled:
        """What runs with `verify`. One at a time, so that staging is within its bound."""
        if self._compiled is None or self._compiled.verify != verify:
            self._release()
            self._compiled = self._compile(verify, countdown)
        return self._compiled

    def _compile(self, verify: Verify | None, countdown: Countdown) -> Compiled:
        inventory = self._inventory
        exchanges = exchanges_of(inventory.plan, inventory.summands, inventory.ends)
        return Compiled(
            exchanges,
            self._channel,
            max_staging_bytes=self._max_staging_bytes,
            verify=verify,
            timeout_s=countdown.left_s(),
        )

    def _run(
        self, version: int | None, verify: Verify | None, timeout_s: float | None, tally: Tally
    ) -> TransferReport:
        began = time.monotonic()
        countdown = Countdown(self._timeout_s if timeout_s is None else timeout_s)
        number = self._version + 1 if version is None else version
        self._begin(number, verify, countdown)
        compiled = self._compiled_for(verify, countdown)
        tally.total_nbytes = self._inventory.total_nbytes
        gathered = compiled.gather_summands(tally, countdown.left_s)
        if compiled.reduces:
            run_together(
                "reshard: reduce",
                self._inventory.reduce,
                self._channel,
                timeout_s=countdown.left_s(),
            )
        self._dirty = True
        moved = compiled.move(tally, countdown.left_s)
        self._commit(number, moved, countdown)
        self._dirty = False
        self._version = number
        return self._report(number, verify, gathered, moved, time.monotonic() - began)

    def _begin(self, version: int, verify: Verify | None, countdown: Countdown) -> None:
        """Agree on what is to be done, with everything prepared that can fail on one rank."""
        terms: object = {"version": version, "verify": verify, "plan": self._digest}
        try:
            self._check(version, verify)
            self._inventory.fill()
        except BaseException as error:  # noqa: BLE001 - told to the peers and raised again
            terms = error
        agree("reshard: run", terms, self._channel, timeout_s=countdown.left_s())

    def _check(self, version: int, verify: Verify | None) -> None:
        problems = []
        if self._closed:
            problems.append(Problem("resharder", "closed", "it has been closed"))
        if type(version) is not int or version < 0:
            problems.append(Problem("version", "range", f"{version!r} is no version"))
        if verify not in (None, "digest"):
            problems.append(
                Problem("verify", "value", f"expected None or 'digest', got {verify!r}")
            )
        if not self._inventory.has_values:
            text = "a tensor is on the meta device on some rank, so there is nothing to move"
            problems.append(Problem("values", "meta", text))
        if problems:
            raise PlanError(problems)

    def _commit(self, version: int, moved: list[ExecuteReport], countdown: Countdown) -> None:
        """Write what stands in buffers, count what has arrived, and confirm."""

        def finish() -> None:
            received = sum(report.nbytes_received for report in moved)
            if received != self._bound:
                text = f"received {received} bytes, expected {self._bound}"
                raise PlanError(Problem(f"version {version}", "coverage", text))
            self._inventory.deliver()

        label = f"reshard: commit version {version}"
        run_together(label, finish, self._channel, timeout_s=countdown.left_s())

    def _report(
        self,
        version: int,
        verify: Verify | None,
        gathered: ExecuteReport | None,
        moved: list[ExecuteReport],
        seconds: float,
    ) -> TransferReport:
        runs = moved if gathered is None else [gathered, *moved]
        return TransferReport(
            version=version,
            nbytes_sent=sum(report.nbytes_sent for report in moved),
            nbytes_received=sum(report.nbytes_received for report in moved),
            nbytes_local=sum(report.nbytes_local for report in moved),
            bound_received_nbytes=self._bound,
            reduce_nbytes=0 if gathered is None else gathered.nbytes_received,
            messages=sum(report.messages for report in runs),
            rounds=sum(report.rounds for report in runs),
            staging_nbytes=sum(report.staging_nbytes for report in runs),
            kept_nbytes=self._inventory.ends.kept_nbytes,
            verified=verify is not None,
            seconds=seconds,
        )


def transfer(
    src: object,
    dst: object,
    group: Group | None = None,
    *,
    options: Options | None = None,
    cast: Cast | Mapping[str, Cast] = "error",
    hooks: Mapping[str, Hook] | None = None,
    verify: Verify | None = None,
    cache: PlanCache | None = None,
    timeout_s: float | None = None,
) -> TransferReport:
    """Bring what `src` holds into `dst`, in place, on all ranks of `group`; and report.

    Collective. Tensors or (nested) dicts of them, None on ranks that have none; see `Resharder`,
    which is worth having where the same tensors are carried more than once. Where other tensors
    of the same layouts are, a `cache` spares the planning.
    """
    with Resharder(
        src,
        dst,
        group,
        options=options,
        cast=cast,
        hooks=hooks,
        cache=cache,
        timeout_s=timeout_s,
    ) as resharder:
        return resharder.run(verify=verify)
