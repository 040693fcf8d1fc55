"""Deadline: the moment until which a call of several exchanges may last."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Deadline:
    """A moment on the monotonic clock, or None where a call may last as long as it likes."""

    at: float | None = None

    @classmethod
    def after(cls, timeout_s: float | None) -> Deadline:
        """The deadline that lies `timeout_s` from now."""
        return cls(None if timeout_s is None else time.monotonic() + timeout_s)

    def left_s(self) -> float | None:
        """The seconds that are left, 0.0 where the moment has passed: a timeout for one step."""
        return None if self.at is None else max(0.0, self.at - time.monotonic())
