"""The fence: who is let in, who is waited for, who is cut off."""

from __future__ import annotations

import socket
import threading
import time

import pytest
import torch

from fttransport.codec import Codec
from fttransport.digests import Digester
from fttransport.fence import Closed, Fence
from fttransport.snapshot import Snapshot, take_snapshot


def staged() -> Snapshot:
    return take_snapshot({"w": torch.ones(2)}, 1, codec=Codec(), digester=Digester("xxh3"))


def any_step(step: int) -> bool:
    return True


def test_a_fence_starts_closed_and_waits_as_long_as_told() -> None:
    fence = Fence()
    here, there = socket.socketpair()
    with here, there, fence.visit(here) as visitor:
        begin = time.monotonic()
        with fence.enter(visitor, "", 0.1, any_step) as found:
            assert found == Closed(empty=False)
        assert time.monotonic() - begin >= 0.1


def test_an_open_fence_gives_the_snapshot_the_step_or_nothing() -> None:
    fence, snapshot = Fence(), staged()
    here, there = socket.socketpair()
    with here, there, fence.visit(here) as visitor:
        fence.open(4, snapshot)
        with fence.enter(visitor, "", 0, any_step) as found:
            assert found is snapshot
        with fence.enter(visitor, "", 0, lambda step: step == 5) as found:
            assert found == 4
        fence.open(4, None)
        with fence.enter(visitor, "", 0, any_step) as found:
            assert found == Closed(empty=True)


def test_close_waits_for_a_reader_inside() -> None:
    fence = Fence()
    fence.open(1, staged())
    here, there = socket.socketpair()
    inside = threading.Event()
    left_at = []

    def read() -> None:
        with fence.visit(here) as visitor, fence.enter(visitor, "", 0, any_step):
            inside.set()
            time.sleep(0.2)
            left_at.append(time.monotonic())

    thread = threading.Thread(target=read)
    with here, there:
        thread.start()
        inside.wait(5)
        fence.close(5)
        assert left_at
        assert time.monotonic() >= left_at[0]
        thread.join()
    assert fence.snapshot is None
    assert fence.cut_count == 0


def test_close_cuts_a_reader_off_that_takes_too_long() -> None:
    fence = Fence()
    fence.open(1, staged())
    here, there = socket.socketpair()
    inside, ended = threading.Event(), threading.Event()

    def read() -> None:
        with fence.visit(here) as visitor, fence.enter(visitor, "", 0, any_step):
            inside.set()
            while here.recv(1):
                continue
        ended.set()

    thread = threading.Thread(target=read)
    with here, there:
        thread.start()
        inside.wait(5)
        begin = time.monotonic()
        fence.close(0.2)
        assert 0.2 <= time.monotonic() - begin < 3
        thread.join(5)
        assert ended.is_set()
    assert fence.cut_count == 1


def test_a_known_reader_may_come_back_while_the_fence_closes_and_a_new_one_may_not() -> None:
    fence, snapshot = Fence(), staged()
    fence.open(1, snapshot)
    pairs = [socket.socketpair() for _ in range(2)]
    with fence.visit(pairs[0][0]) as visitor, fence.visit(pairs[1][0]) as stranger:
        with fence.enter(visitor, "r", 0, any_step):
            pass
        closer = threading.Thread(target=fence.close, args=(5,))
        closer.start()
        while fence.allowed:
            time.sleep(0.01)
        with fence.enter(stranger, "other", 0.05, any_step) as found:
            assert found == Closed(empty=False)
        with fence.enter(visitor, "r", 0.05, any_step) as found:
            assert found is snapshot
        assert closer.is_alive()
    closer.join(5)
    assert not closer.is_alive()
    for pair in pairs:
        pair[0].close()
        pair[1].close()


def test_after_the_end_nothing_can_be_staged() -> None:
    fence = Fence()
    fence.end()
    with pytest.raises(RuntimeError, match="shut down"):
        fence.open(1, staged())
