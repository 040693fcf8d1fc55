"""Probes in a run of several ranks, and in a subgroup that does not start at rank 0."""

from __future__ import annotations

import torch.distributed as dist

import distcore
from distcore.testing import RankPool
from distcore.v1.channel import Channel


def probed(channel: Channel) -> tuple[object, ...]:
    odd = dist.new_group([1, 3])
    return (
        distcore.backend(),
        distcore.is_distributed_run(),
        (distcore.size(), distcore.rank(), distcore.is_master()),
        (distcore.size(odd), distcore.rank(odd), distcore.is_master(odd)),
    )


def test_the_world_and_a_subgroup(pool: RankPool) -> None:
    assert pool.run(probed).values() == (
        ("torch", True, (4, 0, True), (-1, -1, False)),
        ("torch", True, (4, 1, False), (2, 0, True)),
        ("torch", True, (4, 2, False), (-1, -1, False)),
        ("torch", True, (4, 3, False), (2, 1, False)),
    )
