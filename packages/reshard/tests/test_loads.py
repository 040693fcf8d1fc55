"""Loads: the holder that sends least sends next."""

from __future__ import annotations

from reshard.loads import Loads


def test_sends_are_dealt_by_load() -> None:
    loads = Loads({})
    assert loads.deal((0,), [5, 6], 10) == (0, 0)
    assert loads.deal((0, 1), [5, 6, 7], 10) == [1, 1, 0]
    assert loads.deal((0, 1), [8], 10) == (1,)


def test_the_own_node_comes_first() -> None:
    loads = Loads({0: 0, 1: 1, 5: 1, 6: 2})
    assert loads.deal((0, 1), [5, 5, 6], 10) == [1, 1, 0]


def test_old_peers_are_kept() -> None:
    loads = Loads({}, max_peers=1)
    assert loads.deal((0, 1), [5], 10) == [0]
    assert loads.deal((0, 1), [5], 10) == [0]
    assert loads.deal((0, 1), [6], 10) == [1]
    assert loads.deal((1,), [5], 10) == [1]  # there is no choice
