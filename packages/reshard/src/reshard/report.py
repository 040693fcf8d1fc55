"""Report: what one run moved on one rank, beside what it had to move at least."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TransferReport:
    """What the calling rank moved in one run; all ranks have confirmed `version`.

    `nbytes_sent` and `nbytes_received` crossed ranks, `nbytes_local` stayed on the rank.
    `bound_received_nbytes` is what this rank's destinations lack in its sources: no plan receives
    less. `reduce_nbytes` were received before that, to reduce partial sources.
    `staging_nbytes` is the memory held beside the tensors for what is on its way, `kept_nbytes`
    that for casts, hooks, partial sums and sources that share memory with destinations.
    """

    version: int
    nbytes_sent: int
    nbytes_received: int
    nbytes_local: int
    bound_received_nbytes: int
    reduce_nbytes: int
    messages: int
    rounds: int
    staging_nbytes: int
    kept_nbytes: int
    verified: bool
    seconds: float
