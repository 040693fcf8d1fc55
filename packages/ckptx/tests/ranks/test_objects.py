"""Objects between thread ranks, and the failing twins."""

from __future__ import annotations

from typing import Any

import torch

from ckptx import CheckpointPlanError
from ckptx.objects import gather_objects
from distcore.testing import rank_threads
from distcore.v1 import Channel, PeerError

Objects = dict[tuple[Any, ...], Any]


def name(rank: int) -> tuple[str, tuple[int], tuple[int]]:
    return ("rng", (rank,), (3,))


def test_every_rank_gets_every_object() -> None:
    def job(channel: Channel) -> Objects:
        own = {"step": channel.rank, "state": torch.full((2,), channel.rank, dtype=torch.uint8)}
        return gather_objects({name(channel.rank): own}, channel, timeout_s=5)

    for found in rank_threads(3, job).values():
        assert list(found) == [name(0), name(1), name(2)]
        for rank in range(3):
            assert found[name(rank)]["step"] == rank
            assert found[name(rank)]["state"].tolist() == [rank, rank]


def test_own_objects_are_returned_as_they_are() -> None:
    def job(channel: Channel) -> bool:
        own = {"a": [1]}
        return gather_objects({name(channel.rank): own}, channel)[name(channel.rank)] is own

    assert rank_threads(2, job).values() == (True, True)


def test_one_id_on_two_ranks_is_an_error_on_all() -> None:
    def job(channel: Channel) -> None:
        gather_objects({name(0): channel.rank} if channel.rank else {}, channel, timeout_s=5)

    errors = rank_threads(3, job).raised(CheckpointPlanError, within_s=5)
    assert all("Duplicate shard ids" in str(error) for error in errors)


def test_an_object_that_does_not_travel_fails_all_ranks() -> None:
    def job(channel: Channel) -> None:
        own: Any = object() if channel.rank == 1 else 3
        gather_objects({name(channel.rank): own}, channel, timeout_s=5)

    for error in rank_threads(2, job).raised(PeerError, within_s=5):
        assert list(error.failures) == [1]
        assert "rng" in error.failures[1]
