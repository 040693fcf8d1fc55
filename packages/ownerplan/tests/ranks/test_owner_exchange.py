"""Several groups on their way to their owners and back, on ranks that are threads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from distcore.testing import rank_threads
from distcore.v1 import Channel, PeerError
from ownerplan.layout import GlobalLayout, intersect_ranges
from ownerplan.owner_exchange import OwnerExchange
from ownerplan.owner_planning import GroupOwnerLayout


@dataclass(frozen=True)
class FakeMesh:
    """A mesh without a process group."""

    mesh: list[Any]
    rank: int

    def get_rank(self) -> int:
        return self.rank


FIRST = GlobalLayout.build([(6, 4), (3,), (2, 16), (1, 4)], 3)
SECOND = GlobalLayout(((5, 4), (3, 4)), (0, 20), 32, (0, 4, 28))
OWNERS: list[dict[int, int]] = [{0: 2, 2: 0, 3: 1}, {0: 1, 1: 1}]
Groups = list[dict[int, torch.Tensor]]


def layouts(rank: int) -> list[GroupOwnerLayout]:
    return [
        GroupOwnerLayout(FakeMesh([2, 0, 1], rank), FIRST, OWNERS[0]),
        GroupOwnerLayout(FakeMesh([0, 1, 2], rank), SECOND, OWNERS[1]),
    ]


def full_of(group: int, index: int, dtype: torch.dtype) -> torch.Tensor:
    numel = (FIRST, SECOND)[group].get_tensor_range(index).numel
    return ((torch.arange(numel) + 100 * group + 37 * index) % 120).to(dtype)


def shards_of(rank: int, dtype: torch.dtype) -> Groups:
    found: Groups = []
    for group, one in enumerate(layouts(rank)):
        held = one.layout.get_rank_ranges(one.mesh)[rank]
        shards = {}
        for index in one.tensor_to_owner:
            run = one.layout.get_tensor_range(index)
            part = intersect_ranges(run, held)
            if part.numel:
                start = part.start - run.start
                shards[index] = full_of(group, index, dtype)[start : start + part.numel].clone()
        found.append(shards)
    return found


def room_for(rank: int, dtype: torch.dtype) -> Groups:
    return [
        {
            index: torch.empty(one.layout.tensor_shapes[index], dtype=dtype)
            for index, owner in one.tensor_to_owner.items()
            if owner == rank
        }
        for one in layouts(rank)
    ]


def go_and_return(channel: Channel, dtype: torch.dtype) -> tuple[int, int]:
    rank = channel.rank
    exchange = OwnerExchange(layouts(rank))
    shards, full = shards_of(rank, dtype), room_for(rank, dtype)
    there = exchange.gather(shards, full, channel, timeout=20)
    for group, tensors in enumerate(full):
        for index, tensor in tensors.items():
            assert torch.equal(tensor.view(-1), full_of(group, index, dtype))
            tensor.copy_(tensor.flatten().flip(0).view_as(tensor))
    back = exchange.scatter(full, shards, channel, timeout=20)
    for group, tensors in enumerate(shards):
        for index, tensor in tensors.items():
            wanted = shards_of(rank, dtype)[group][index]
            whole = full_of(group, index, dtype)
            at = next(k for k in range(whole.numel()) if torch.equal(whole[k : k + 1], wanted[:1]))
            assert torch.equal(tensor, whole.flip(0)[at : at + tensor.numel()])
    return there.nbytes_sent, back.nbytes_received


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_groups_share_one_exchange_there_and_one_back(dtype: torch.dtype) -> None:
    seen = rank_threads(3, go_and_return, dtype).values()
    size = dtype.itemsize
    assert [there for there, _ in seen] == [back for _, back in seen]
    moved = OwnerExchange(layouts(0)).plan
    remote = sum(step.region.numel for step in moved if step.src != step.dst)
    assert sum(there for there, _ in seen) == size * remote


def test_the_plan_has_every_element_once() -> None:
    plan = OwnerExchange(layouts(0)).plan
    assert plan.keys == ("0.0", "0.2", "0.3", "1.0", "1.1")
    assert sum(step.region.numel for step in plan) == 24 + 32 + 4 + 20 + 12
    assert {step.key: step.dst for step in plan} == {
        "0.0": 2,
        "0.2": 0,
        "0.3": 1,
        "1.0": 1,
        "1.1": 1,
    }
    assert plan.digest == OwnerExchange(layouts(2)).plan.digest


def fail_on_rank_1(channel: Channel, fault: str) -> str:
    """What every rank is told where one has given something wrong."""
    rank, dtype = channel.rank, torch.float32
    shards, full = shards_of(rank, dtype), room_for(rank, dtype)
    if rank == 1 and fault == "missing":
        full[1].pop(0)
    if rank == 1 and fault == "numel":
        full[1][0] = torch.empty(7)
    if rank == 1 and fault == "strides":
        full[1][0] = torch.empty(4, 5).T
    if rank == 1 and fault == "groups":
        full.pop()
    exchange = OwnerExchange(layouts(rank))
    with pytest.raises(PeerError) as caught:
        exchange.gather(shards, full, channel, timeout=20)
    with pytest.raises(PeerError):
        exchange.scatter(full, shards, channel, timeout=20)
    return caught.value.failures[1]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("missing", "1.0: its tensor of 20 elements is missing"),
        ("numel", "1.0: its tensor of shape (7,) must have 20 elements"),
        ("strides", "1.0: its tensor with strides (1, 5) cannot be viewed flat"),
        ("groups", "full: 1 groups are given, 2 planned"),
    ],
)
def test_what_is_wrong_on_one_rank_is_told_to_all(fault: str, words: str) -> None:
    told = rank_threads(3, fail_on_rank_1, fault).values()
    assert all(words in text for text in told), told
