"""Ways: the channel of one load or save, and what the caller said about its use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, Literal, TypeVar

from ckptx.errors import CheckpointPlanError
from ckptx.rows import gather_rows
from distcore.v1 import Channel, Plan, Problem
from distcore.v1.runtime import ExecuteReport, Shard, execute, run_together

T = TypeVar("T")

DEFAULT_STAGING_NBYTES: Final = 64 << 20
MIN_STAGING_NBYTES: Final = 128 << 10


def seconds_of(timeout: float | timedelta | None) -> float | None:
    """A timeout in seconds."""
    return timeout.total_seconds() if isinstance(timeout, timedelta) else timeout


@dataclass(frozen=True, slots=True)
class Ways:
    """How bytes travel: the channel, and what the caller said about it."""

    channel: Channel
    max_staging_bytes: int
    same_host: Literal["auto", "off"]
    verify: bool | Literal["xxh3"]
    timeout_s: float | None

    def check(self) -> None:
        """Refuse what no exchange can be made with."""
        if self.max_staging_bytes < MIN_STAGING_NBYTES:
            text = f"{self.max_staging_bytes} is below {MIN_STAGING_NBYTES}"
            raise CheckpointPlanError(Problem("max_staging_bytes", "range", text))

    def together(self, step: str, fn: Callable[[], T]) -> T:
        """Run `fn` on every rank; where it fails on one, fail on all."""
        return run_together(step, fn, self.channel, timeout_s=self.timeout_s)

    def rows(self, data: bytes) -> tuple[bytes, ...]:
        """What every rank gave, in group order."""
        return gather_rows(data, self.channel, timeout_s=self.timeout_s)

    def execute(
        self,
        plan: Plan,
        sources: Mapping[str, Shard],
        destinations: Mapping[str, Shard],
        *,
        staging_nbytes: int,
        prove: bool,
    ) -> ExecuteReport:
        """Carry out an exchange; `prove` it by digests."""
        return execute(
            plan,
            self.channel,
            sources,
            destinations,
            max_staging_bytes=staging_nbytes,
            verify="xxh3" if prove else None,
            timeout=self.timeout_s,
            same_host=self.same_host,
        )
