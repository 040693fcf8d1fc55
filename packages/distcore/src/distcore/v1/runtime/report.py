"""Report: what one execution of a plan moved on one rank."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExecuteReport:
    """What the calling rank moved. Bytes are those of the plan's Regions, without any framing.

    `nbytes_sent` and `nbytes_received` crossed to and from other ranks, `nbytes_local` were
    copied on the rank. `messages` and `rounds` count what the channel was asked for;
    `staging_nbytes` is the memory that was held beside sources and destinations.
    """

    nbytes_sent: int
    nbytes_received: int
    nbytes_local: int
    messages: int
    rounds: int
    staging_nbytes: int
    seconds: float
