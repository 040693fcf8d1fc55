"""The failure board: who fails outside every collective wakes those that wait inside one."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable

import pytest
from torch._C._distributed_c10d import HashStore
from torch.distributed import ProcessGroup

from distcore import all_reduce, barrier, broadcast_from, failure_scope, gather_bytes
from distcore.board import Board, board_of
from distcore.testing import rank_threads
from distcore.v1.errors import ChannelError, ChannelTimeout, PeerError
from distcore.v1.runtime import GroupChannel

TOTAL: Callable[[list[int]], int] = sum
SOON_S = 2.0
WorldOf = Callable[[GroupChannel], ProcessGroup]


@pytest.fixture
def fail_outside(world_of: WorldOf) -> Callable[..., tuple[BaseException | None, ...]]:
    """Run `call(group)` on ranks 0 and 2 while rank 1 fails outside, and stays alive."""

    def run(call: Callable[[ProcessGroup], object]) -> tuple[BaseException | None, ...]:
        waiting = threading.Barrier(3)

        def rank_of(channel: GroupChannel) -> None:
            group = world_of(channel)
            barrier(group)
            waiting.wait()
            if channel.rank == 1:
                time.sleep(0.2)
                with failure_scope("load", group):
                    raise ValueError("boom")
            if channel.rank == 2:
                time.sleep(0.5)
            call(group)

        outcomes = rank_threads(3, rank_of)
        assert max(outcome.seconds for outcome in outcomes) < SOON_S
        return outcomes.exceptions

    return run


CALLS = {
    "all_reduce": lambda group: all_reduce("x", lambda: 1, TOTAL, group=group),
    "broadcast_from": lambda group: broadcast_from("x", lambda: 1, rank=1, group=group),
    "barrier": barrier,
    "gather_bytes": lambda group: gather_bytes(b"x", 0, group),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_failure_outside_wakes_the_waiting_pytorch_122529_trl_6862(
    name: str, fail_outside: Callable[..., tuple[BaseException | None, ...]]
) -> None:
    raised = fail_outside(CALLS[name])
    assert isinstance(raised[1], ValueError)
    for error in (raised[0], raised[2]):
        assert isinstance(error, PeerError)
        assert list(error.failures) == [1]
        assert "failed in 'load', outside any collective: ValueError: boom" in error.failures[1]
        assert 'raise ValueError("boom")' in error.__notes__[0]


def test_later_calls_raise_at_once_on_every_rank_lightning_6430(world_of: WorldOf) -> None:
    """Also on the failed rank: it must not go on to save a checkpoint, say."""

    def rank_of(channel: GroupChannel) -> list[str]:
        group = world_of(channel)
        told = []
        try:
            if channel.rank == 1:
                with failure_scope("step", group):
                    raise ValueError("boom")
            barrier(group)
        except (ValueError, PeerError) as error:
            told.append(type(error).__name__)
        begin = time.monotonic()
        with pytest.raises(PeerError, match="rank 1: failed in 'step'"):
            broadcast_from("checkpoint", lambda: 1, group=group)
        assert time.monotonic() - begin < 0.1
        return told

    assert rank_threads(2, rank_of).values() == (["PeerError"], ["ValueError"])


def test_what_all_ranks_raise_needs_no_report_and_poisons_nothing(world_of: WorldOf) -> None:
    def rank_of(channel: GroupChannel) -> int:
        group = world_of(channel)
        with pytest.raises(PeerError, match="rank 1: ZeroDivisionError"), failure_scope("a", group):
            all_reduce("x", lambda: 1 // (1 - channel.rank), list, group=group)
        return all_reduce("next", lambda: 1, TOTAL, group=group)

    assert rank_threads(2, rank_of).values() == (2, 2)


@pytest.mark.parametrize("code", [None, 0])
def test_a_clean_exit_is_no_failure(code: int | None, world_of: WorldOf) -> None:
    def rank_of(channel: GroupChannel) -> int:
        group = world_of(channel)
        if channel.rank == 1:
            with pytest.raises(SystemExit), failure_scope("a", group):
                raise SystemExit(code)
        return all_reduce("next", lambda: 1, TOTAL, group=group)

    assert rank_threads(2, rank_of).values() == (2, 2)


def test_a_rank_that_leaves_a_call_in_its_middle_wakes_the_others(
    world_of: WorldOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The destination has no memory for the payload, after all ranks agreed on it."""
    from distcore import collectives

    make = collectives._buffer

    def no_memory(nbytes: int, channel: GroupChannel) -> object:
        if channel.rank == 1:
            raise MemoryError("no room")
        return make(nbytes, channel)

    monkeypatch.setattr(collectives, "_buffer", no_memory)

    def rank_of(channel: GroupChannel) -> None:
        all_reduce("x", lambda: 1, TOTAL, group=world_of(channel))

    outcomes = rank_threads(3, rank_of)
    assert [type(error) for error in outcomes.exceptions] == [PeerError, MemoryError, PeerError]
    assert "failed in 'x', outside any collective: MemoryError: no room" in str(
        outcomes.exceptions[0]
    )
    assert max(outcome.seconds for outcome in outcomes) < SOON_S


def test_a_timeout_says_which_rank_is_in_which_call(world_of: WorldOf) -> None:
    def rank_of(channel: GroupChannel) -> str:
        group = world_of(channel)
        barrier(group)

        def load() -> int:
            time.sleep(1.2 if channel.rank == 2 else 0)
            return 1

        if channel.rank == 2:
            with pytest.raises(ChannelError):
                all_reduce("load", load, TOTAL, group=group)
            return ""
        with pytest.raises(ChannelError) as caught:
            all_reduce("load", load, TOTAL, group=group, timeout_s=0.5)
        return str(caught.value)

    told = rank_threads(3, rank_of).values()
    assert "ranks 0, 1, 2 last entered 'load' (call 2)" in told[0]


def test_a_timeout_names_the_ranks_that_never_came(world_of: WorldOf) -> None:
    def rank_of(channel: GroupChannel) -> str:
        group = world_of(channel)
        barrier(group)
        if channel.rank == 1:
            time.sleep(1.2)
            return ""
        with pytest.raises(ChannelTimeout) as caught:
            all_reduce("save", lambda: 1, TOTAL, group=group, timeout_s=0.4)
        return str(caught.value)

    told = rank_threads(2, rank_of).values()[0]
    assert told.startswith("'save' (call 2): ")
    assert "rank 0 last entered 'save' (call 2); rank 1 last entered 'barrier' (call 1)" in told


def test_a_group_without_a_store_has_no_board() -> None:
    def rank_of(channel: GroupChannel) -> None:
        assert board_of(channel) is None
        with pytest.raises(KeyError), failure_scope("a", channel.group):
            raise KeyError

    rank_threads(1, rank_of).values()


def test_a_new_group_on_the_same_store_starts_afresh() -> None:
    """State hangs on the group object, not on its id, which the next group may have."""
    store = HashStore()
    first = [Board(store, rank, 2) for rank in (0, 1)]
    first[1].place("'x' (call 7)")
    first[1].report("load", ValueError("boom"))
    again = Board(store, 0, 2)
    assert again.look() is None
    assert again.places([0, 1]) == "ranks 0, 1 entered no labelled call"
    assert first[0].look() == first[1].failure


def test_a_new_group_counts_and_waits_as_if_nothing_had_been(world_of: WorldOf) -> None:
    def rank_of(channel: GroupChannel) -> int:
        group = world_of(channel)
        with pytest.raises(KeyError), failure_scope("a", group):
            raise KeyError
        del group
        gc.collect()
        return all_reduce("next", lambda: 1, TOTAL, group=world_of(channel))

    assert rank_threads(2, rank_of).values() == (2, 2)


def test_the_first_report_stays() -> None:
    store = HashStore()
    boards = [Board(store, rank, 3) for rank in range(3)]
    boards[2].report("a", ValueError("first"))
    boards[1].report("b", ValueError("second"))
    found = [board.look() for board in boards]
    assert [failure and (failure.rank, failure.text) for failure in found] == [
        (2, "ValueError: first")
    ] * 3


class GoneStore:
    """A store whose process has ended."""

    def check(self, *args: object) -> bool:
        raise RuntimeError("connection refused")

    set = get = add = compare_set = check


def test_a_store_that_is_gone_has_nothing_to_tell() -> None:
    board = Board(GoneStore(), 0, 2)  # type: ignore[arg-type]
    board.place("'x' (call 1)")
    assert board.look() is None
    assert board.places([1]) == "rank 1 entered no labelled call"
    board.report("load", ValueError("boom"))
    assert board.failure is not None
