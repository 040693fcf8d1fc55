"""Deadline: what is left of a timeout."""

from __future__ import annotations

import time

from distcore.v1.runtime.deadline import Deadline


def test_without_a_timeout_there_is_no_limit() -> None:
    assert Deadline.after(None).left_s() is None


def test_what_is_left_shrinks_and_never_falls_below_zero() -> None:
    left_s = Deadline.after(5.0).left_s()
    assert left_s is not None
    assert 4.0 < left_s <= 5.0
    assert Deadline(time.monotonic() - 1).left_s() == 0.0
