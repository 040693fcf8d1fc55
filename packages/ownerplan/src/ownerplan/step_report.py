"""Report: what one step of the optimizer did on one rank."""

from __future__ import annotations

from dataclasses import dataclass, fields

from distcore.v1.runtime import ExecuteReport


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a step did on the calling rank.

    - `matrices`: how many were orthogonalized here.
    - `exchanges`: how often matrices moved: twice per bucket that had something to step.
    - `collectives`: how often a row of some bytes was gathered from all ranks: once for the active
      set, and twice in each exchange, before and after.
    - `messages`, `nbytes_sent`, `nbytes_received`: what crossed to and from other ranks.
      `nbytes_local` was copied on the rank.
    - `held_nbytes`: the memory that is held for exchanges between steps too, staging included.
    """

    matrices: int = 0
    exchanges: int = 0
    collectives: int = 0
    messages: int = 0
    nbytes_sent: int = 0
    nbytes_received: int = 0
    nbytes_local: int = 0
    held_nbytes: int = 0
    seconds: float = 0.0

    def __add__(self, other: StepReport) -> StepReport:
        """The two taken together."""
        return StepReport(
            *(getattr(self, one.name) + getattr(other, one.name) for one in fields(self))
        )

    @classmethod
    def of_exchange(cls, report: ExecuteReport) -> StepReport:
        """What one exchange adds."""
        return cls(
            exchanges=1,
            collectives=2,
            messages=report.messages,
            nbytes_sent=report.nbytes_sent,
            nbytes_received=report.nbytes_received,
            nbytes_local=report.nbytes_local,
            held_nbytes=report.staging_nbytes,
        )
