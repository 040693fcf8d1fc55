"""Compiled: a plan bound to a channel and to one rank's tensors, ready to run.

Up to three exchanges follow each other: the summands of partial sources, the sources themselves,
and what receivers pass on to each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from distcore.v1 import Channel, Plan
from distcore.v1.runtime import ExecuteReport, Executor, Shard
from reshard.ends import Ends
from reshard.handle import Tally
from reshard.plan import ReshardPlan

Verify: TypeAlias = Literal["digest"]
MIN_STAGING_NBYTES: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Exchange:
    """One plan with the tensors of this rank that it reads and writes."""

    plan: Plan
    sources: dict[str, Shard]
    destinations: dict[str, Shard]


def exchanges_of(plan: ReshardPlan, summands: Plan, ends: Ends) -> tuple[Exchange, ...]:
    """What has to be exchanged, in order; the first is that of summands, empty or not."""
    arriving: dict[str, Shard] = {}
    for key, reduction in ends.reductions.items():
        arriving |= reduction.shards(key)
    first = Exchange(summands, ends.summands, arriving)
    found = [first]
    sources = ends.sources
    for stage in plan.stages:
        found.append(Exchange(stage, sources, ends.destinations))
        sources = ends.destinations
    return tuple(found)


class Compiled:
    """The executors of all exchanges. Making it is collective, and so is each of its runs."""

    def __init__(
        self,
        exchanges: tuple[Exchange, ...],
        channel: Channel,
        *,
        max_staging_bytes: int,
        verify: Verify | None,
        timeout_s: float | None,
    ) -> None:
        self.verify = verify
        self._executors: list[Executor | None] = []
        count = sum(1 for exchange in exchanges if len(exchange.plan))
        budget = max(MIN_STAGING_NBYTES, max_staging_bytes // max(1, count))
        try:
            for exchange in exchanges:
                executor = None
                if len(exchange.plan):
                    executor = Executor(
                        exchange.plan,
                        channel,
                        exchange.sources,
                        exchange.destinations,
                        max_staging_bytes=budget,
                        verify=None if verify is None else "xxh3",
                        timeout_s=timeout_s,
                    )
                self._executors.append(executor)
        except BaseException:
            self.close()
            raise

    @property
    def reduces(self) -> bool:
        """Whether summands are exchanged first."""
        return self._executors[0] is not None

    def gather_summands(
        self, tally: Tally, left_s: Callable[[], float | None]
    ) -> ExecuteReport | None:
        """Exchange the summands of partial sources. Collective."""
        return self._run(self._executors[0], tally, left_s)

    def move(self, tally: Tally, left_s: Callable[[], float | None]) -> list[ExecuteReport]:
        """Bring sources to destinations. Collective."""
        reports = [self._run(executor, tally, left_s) for executor in self._executors[1:]]
        return [report for report in reports if report is not None]

    def close(self) -> None:
        """Free the staging memory; idempotent."""
        for executor in self._executors:
            if executor is not None:
                executor.close()

    def _run(
        self, executor: Executor | None, tally: Tally, left_s: Callable[[], float | None]
    ) -> ExecuteReport | None:
        if executor is None:
            return None
        before = tally.done_nbytes

        def note(done_nbytes: int, total_nbytes: int, /) -> None:
            tally.done_nbytes = before + done_nbytes

        report = executor.run(progress=note, timeout_s=left_s())
        tally.done_nbytes = before + report.nbytes_sent + report.nbytes_received
        return report
