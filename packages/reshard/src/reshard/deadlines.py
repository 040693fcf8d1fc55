"""Deadlines: the time that is left for a call of several steps."""

from __future__ import annotations

import time


class Countdown:
    """Counts down from `timeout_s` seconds; None means that there is no end."""

    def __init__(self, timeout_s: float | None) -> None:
        self._end = None if timeout_s is None else time.monotonic() + timeout_s

    def left_s(self) -> float | None:
        """The seconds that are left, never negative, or None."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())
