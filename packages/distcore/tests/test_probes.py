"""Probes without a run, and of groups outside the default world."""

from __future__ import annotations

import pytest

import distcore
from distcore.testing import rank_threads
from distcore.v1.runtime import GroupChannel


def test_without_a_run() -> None:
    assert distcore.is_available()
    assert not distcore.is_initialized()
    assert not distcore.is_distributed_run()
    assert distcore.backend() is None
    assert (distcore.size(), distcore.rank(), distcore.is_master()) == (1, 0, True)
    distcore.barrier()


@pytest.mark.parametrize("marker", [-1, -100])
def test_a_rank_outside_the_group(marker: int) -> None:
    assert distcore.size(marker) == -1
    assert distcore.rank(marker) == -1
    assert not distcore.is_master(marker)


def test_a_group_outside_the_default_world_is_asked_itself() -> None:
    def probe(channel: GroupChannel) -> tuple[int, int, bool]:
        group = channel.group
        return distcore.size(group), distcore.rank(group), distcore.is_master(group)

    assert rank_threads(2, probe).values() == ((2, 0, True), (2, 1, False))
