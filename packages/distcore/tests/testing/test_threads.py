"""rank_threads: every rank has its outcome, and no test hangs."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from distcore.testing import DeadlineError, rank_threads
from distcore.v1.channel import Channel


def test_each_rank_returns_its_value_by_rank() -> None:
    def total(channel: Channel, factor: int) -> int:
        return sum(row[0] for row in channel.all_gather(bytes([channel.rank * factor])))

    assert rank_threads(4, total, 10).values() == (60, 60, 60, 60)


def test_one_rank_is_a_group_too() -> None:
    assert rank_threads(1, lambda channel: (channel.rank, channel.size)).values() == ((0, 1),)


def test_values_raise_what_any_rank_raised() -> None:
    def odd_ranks_raise(channel: Channel) -> None:
        if channel.rank % 2:
            raise KeyError(channel.rank)

    outcomes = rank_threads(4, odd_ranks_raise)
    with pytest.raises(ExceptionGroup, match=r"ranks \[1, 3\] of 4 raised") as caught:
        outcomes.values()
    assert [error.args for error in caught.value.exceptions] == [(1,), (3,)]


def test_raised_wants_every_rank() -> None:
    def rank_one_returns(channel: Channel) -> str:
        if channel.rank != 1:
            raise KeyError(channel.rank)
        return "fine"

    with pytest.raises(AssertionError, match=r"(?s)rank 0 raised KeyError.*rank 1 returned 'fine'"):
        rank_threads(2, rank_one_returns).raised(KeyError)


def test_raised_wants_them_in_time() -> None:
    def late(channel: Channel) -> None:
        time.sleep(0.2 * channel.rank)
        raise KeyError(channel.rank)

    outcomes = rank_threads(2, late)
    assert [error.args for error in outcomes.raised(KeyError, within_s=5)] == [(0,), (1,)]
    with pytest.raises(AssertionError, match=r"within 0\.1 s"):
        outcomes.raised(KeyError, within_s=0.1)


def test_a_hang_fails_with_the_stacks_of_the_busy_ranks() -> None:
    def rank_one_naps(channel: Channel) -> None:
        if channel.rank == 1:
            time.sleep(2.5)

    begin = time.monotonic()
    with pytest.raises(DeadlineError, match=r"(?s)ranks \[1\] of 2 .*rank_one_naps"):
        rank_threads(2, rank_one_naps, deadline_s=0.3)
    assert time.monotonic() - begin < 2.4


def test_the_failure_behind_a_hang_is_shown() -> None:
    def rank_one_fails(channel: Channel) -> None:
        if channel.rank == 1:
            raise KeyError("the cause")
        time.sleep(1)

    with pytest.raises(DeadlineError, match=r"rank 1 raised KeyError: 'the cause'") as caught:
        rank_threads(2, rank_one_fails, deadline_s=0.3)
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_hang_does_not_abort_the_process_at_its_end() -> None:
    """A rank may sit inside gloo when the interpreter ends."""
    code = """
import subprocess
import sys
import time
from distcore.testing import DeadlineError, rank_threads

def rank_one_comes_late(channel):
    if channel.rank == 1:
        time.sleep(0.4)
    else:
        channel.all_gather(b"row")

try:
    rank_threads(2, rank_one_comes_late, deadline_s=0.2)
except DeadlineError:
    print("told")
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "told\n"), done.stderr
