"""Who fetches which chunks, decided without any network."""

from __future__ import annotations

import threading

from fttransport.board import Board, Link, Run
from fttransport.errors import AuthError, IntegrityError, SourceLost


def nothing() -> None:
    return None


def link(name: str) -> Link:
    return Link(name, (name,))


def taken(board: Board, source: Link) -> Run:
    run = board.take(source, nothing)
    assert run is not None
    return run


def test_the_only_source_has_one_run_per_stream() -> None:
    source = link("a")
    board = Board(list(range(10)), [source], 3)
    runs = [taken(board, source) for _ in range(3)]
    assert [(run.start, run.stop) for run in runs] == [(0, 4), (4, 7), (7, 10)]


def test_runs_never_span_chunks_that_are_there_already() -> None:
    source = link("a")
    board = Board([0, 1, 5, 6, 7], [source], 1)
    first, second = taken(board, source), taken(board, source)
    assert [(first.start, first.stop), (second.start, second.stop)] == [(0, 2), (5, 8)]


def test_shares_follow_the_speed() -> None:
    fast, slow = link("fast"), link("slow")
    fast.nbytes, fast.busy_s = 3000, 1.0
    slow.nbytes, slow.busy_s = 1000, 1.0
    board = Board(list(range(80)), [fast, slow], 2)
    first, second = taken(board, fast), taken(board, slow)
    assert first.stop - first.start == 30
    assert second.stop - second.start == 6


def test_what_a_failed_run_has_left_goes_to_another_source() -> None:
    bad, good = link("bad"), link("good")
    board = Board(list(range(4)), [bad, good], 2)
    run = taken(board, bad)
    assert (run.start, run.stop) == (0, 1)
    board.finish(run)
    board.fail(bad, SourceLost("gone"))
    assert board.take(bad, nothing) is None
    rest = []
    while (found := board.take(good, nothing)) is not None:
        while found.start < found.stop:
            rest.append(found.start)
            board.progress(found)
        board.finish(found)
    assert sorted(rest) == [0, 1, 2, 3]
    assert board.error is None
    assert board.wait(0)


def test_the_last_source_has_three_tries_and_a_wrong_token_one() -> None:
    source = link("a")
    board = Board([0], [source], 1)
    for _ in range(3):
        assert board.error is None
        board.finish(taken(board, source))
        board.fail(source, IntegrityError("wrong bytes"))
    assert isinstance(board.error, IntegrityError)
    board = Board([0], [source := link("a")], 1)
    board.finish(taken(board, source))
    board.fail(source, AuthError("no"))
    assert isinstance(board.error, AuthError)


def test_a_source_that_keeps_the_others_waiting_is_cut_off() -> None:
    fast, slow = link("fast"), link("slow")
    fast.nbytes, fast.busy_s = 1 << 30, 1.0
    board = Board([0], [fast, slow], 2)
    cut = threading.Event()
    run = board.take(slow, cut.set)
    assert run is not None
    waiting = threading.Thread(target=board.take, args=(fast, nothing))
    waiting.start()
    assert cut.wait(5)
    assert isinstance(slow.dropped, SourceLost)
    assert not board.still_wants(run)
    board.finish(run)
    waiting.join(5)
    assert not waiting.is_alive()


def test_the_end_cuts_whoever_is_fetching() -> None:
    source = link("a")
    board = Board([0, 1], [source], 1)
    cut = threading.Event()
    run = board.take(source, cut.set)
    assert run is not None
    assert board.begin(run)
    board.end(KeyError("progress failed"))
    assert cut.is_set()
    assert not board.wait(0)
    board.finish(run)
    assert board.wait(0)
    assert isinstance(board.error, KeyError)


def test_nothing_to_fetch_is_over_at_once() -> None:
    board = Board([], [link("a")], 1)
    assert board.is_over
    assert board.wait(0)


def test_who_waits_for_a_connection_is_not_waited_for_and_finds_it_over() -> None:
    source = link("a")
    board = Board([0, 1], [source], 1)
    run = board.take(source, lambda: None)
    assert run is not None
    board.end(KeyError("the time is over"))
    assert board.wait(0)
    assert not board.begin(run)
    assert board.wait(0)
