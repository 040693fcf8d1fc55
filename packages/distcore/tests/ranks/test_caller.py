"""The caller of a group: what outlives a call, and how a wait ends early."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable

import pytest
from torch.distributed import ProcessGroup

from distcore import all_reduce, barrier
from distcore.caller import Caller, caller_in
from distcore.testing import RankPool, rank_pool, rank_threads
from distcore.testing.pool import RankDiedError
from distcore.v1.channel import Channel
from distcore.v1.errors import ChannelError, PeerError
from distcore.v1.runtime import GroupChannel

TOTAL: Callable[[list[int]], int] = sum
WorldOf = Callable[[GroupChannel], ProcessGroup]


def test_the_count_hangs_on_the_group_object(world_of: WorldOf) -> None:
    def rank_of(channel: GroupChannel) -> list[int]:
        first, second = world_of(channel), world_of(channel)
        barrier(first)
        barrier(first)
        barrier(second)
        return [caller_in(group)[0].calls for group in (first, second, channel.group)]

    assert rank_threads(2, rank_of).values() == ([2, 1, 0],) * 2


def test_the_caller_and_its_thread_end_with_the_group(world_of: WorldOf) -> None:
    def threads() -> int:
        return sum(t.name == "distcore-labelled-calls" for t in threading.enumerate())

    def rank_of(channel: GroupChannel) -> weakref.ref[Caller]:
        group = world_of(channel)
        barrier(group)
        assert threads()
        return weakref.ref(caller_in(group)[0])

    before = threads()
    callers = rank_threads(2, rank_of).values()
    gc.collect()
    deadline = time.monotonic() + 2
    while threads() > before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert threads() <= before
    assert [caller() for caller in callers] == [None, None]


def test_a_thread_that_waits_holds_no_group(world_of: WorldOf) -> None:
    def rank_of(channel: GroupChannel) -> object:
        group = world_of(channel)
        barrier(group)
        found = weakref.ref(group)
        del group
        gc.collect()
        return found()

    assert rank_threads(2, rank_of).values() == (None, None)


def test_an_interrupt_while_waiting_is_raised_and_wakes_the_peers(
    world_of: WorldOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Ctrl-C does on the main thread, which only looks at the board meanwhile."""
    interrupted = threading.Event()
    raise_failure = Caller._raise_failure

    def look(self: Caller, label: str, cause: Exception | None = None) -> None:
        if self.board is not None and self.board.rank == 1 and not interrupted.is_set():
            interrupted.set()
            raise KeyboardInterrupt
        raise_failure(self, label, cause)

    monkeypatch.setattr(Caller, "_raise_failure", look)

    def rank_of(channel: GroupChannel) -> None:
        group = world_of(channel)
        if channel.rank == 2:
            interrupted.wait(5)
        # The exchange that was under way may still end well, without the interrupted rank.
        all_reduce("load", lambda: 1, TOTAL, group=group)
        all_reduce("next", lambda: 1, TOTAL, group=group)

    outcomes = rank_threads(3, rank_of)
    assert [type(error) for error in outcomes.exceptions] == [
        PeerError,
        KeyboardInterrupt,
        PeerError,
    ]
    assert "rank 1: failed in 'load'" in str(outcomes.exceptions[2])
    assert max(outcome.seconds for outcome in outcomes) < 3


def dies_between_calls(channel: Channel) -> str:
    """Rank 1 is killed after its first call."""
    barrier()
    if channel.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(ChannelError) as caught:
        all_reduce("load", lambda: 1, TOTAL)
    assert time.monotonic() - begin < 5
    return str(caught.value)


def test_a_rank_that_is_killed_is_named_with_its_last_call() -> None:
    pool: RankPool
    with rank_pool(2) as pool:
        outcomes = pool.run(dies_between_calls)
    assert isinstance(outcomes.exceptions[1], RankDiedError)
    told = str(outcomes[0].value)
    assert told.startswith("'load' (call 2): ")
    assert "rank 0 last entered 'load' (call 2); rank 1 last entered 'barrier' (call 1)" in told
