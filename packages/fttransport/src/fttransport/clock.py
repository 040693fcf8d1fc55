"""Clock: how long a transfer may go on, and how long a source may be silent."""

from __future__ import annotations

import time
from dataclasses import dataclass

from fttransport.errors import DeadlineExceeded, SourceSilent


@dataclass(frozen=True, slots=True)
class Clock:
    """A deadline on the monotonic clock, and the silence after which a source counts as lost."""

    deadline: float
    stall_s: float

    @classmethod
    def of(cls, timeout_s: float, patience_s: float) -> Clock:
        """The clock of a call that starts now: lost after `patience_s` or a quarter of it all."""
        return cls(time.monotonic() + timeout_s, max(0.0, min(patience_s, timeout_s / 4)))

    def left_s(self) -> float:
        """The time left; DeadlineExceeded where there is none."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded("timed out: the deadline of the receive has passed")
        return left

    def wait_s(self) -> float:
        """How long to wait for the next byte of a source."""
        return max(0.001, min(self.stall_s, self.left_s()))

    def silence(self, name: str) -> DeadlineExceeded | SourceSilent:
        """The error for a source from which nothing came in `wait_s`."""
        if time.monotonic() >= self.deadline:
            return DeadlineExceeded(f"timed out: the deadline passed while {name} was silent")
        return SourceSilent(f"timed out: {name} has sent nothing for {self.stall_s:.3g} s")
