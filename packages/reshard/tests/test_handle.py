"""Handles: runs in the background, and what becomes of them."""

from __future__ import annotations

import threading

import pytest

from distcore.v1 import ChannelTimeout
from reshard import Handle, TransferReport
from reshard.handle import Tally

REPORT = TransferReport(1, 0, 0, 0, 0, 0, 0, 0, 0, 0, False, 0.0)


def test_a_run_that_lasts_can_be_waited_for_again() -> None:
    go_on = threading.Event()

    def run(tally: Tally) -> TransferReport:
        tally.total_nbytes = 10
        go_on.wait(10)
        tally.done_nbytes = 10
        return REPORT

    handle = Handle(run)
    with pytest.raises(ChannelTimeout, match=r"not ended within 0\.01 s"):
        handle.wait(0.01)
    assert not handle.done
    go_on.set()
    assert handle.wait(10) is REPORT
    assert handle.done
    assert handle.progress == (10, 10)


def test_what_the_run_raised_is_raised_by_wait() -> None:
    def run(tally: Tally) -> TransferReport:
        raise RuntimeError("no link")

    handle = Handle(run)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no link"):
            handle.wait(10)
