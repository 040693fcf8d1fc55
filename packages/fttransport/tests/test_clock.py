"""What is left of a call's time."""

from __future__ import annotations

import time

import pytest

from fttransport.clock import Clock
from fttransport.errors import DeadlineExceeded, SourceLost


def test_a_source_is_lost_after_the_smaller_of_patience_and_a_quarter() -> None:
    assert Clock.of(8, 10).stall_s == 2
    assert Clock.of(100, 10).stall_s == 10
    clock = Clock.of(100, 10)
    assert clock.wait_s() == 10
    assert isinstance(clock.silence("a"), SourceLost)
    assert isinstance(clock.silence("a"), TimeoutError)


def test_past_the_deadline_there_is_no_time_left() -> None:
    clock = Clock(time.monotonic() - 1, 5)
    with pytest.raises(DeadlineExceeded, match="timed out"):
        clock.left_s()
    assert isinstance(clock.silence("a"), DeadlineExceeded)
