"""StreamShard: each item once, whatever the workers, and equal counts where they are asked for."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler, IterableDataset, get_worker_info

from distcore import stream
from distcore.stream import Even, StreamShard, share_length

EVENS: list[Even] = ["none", "pad", "drop"]


class Numbers(IterableDataset[int]):
    """The numbers below `length`, from `start` on, plus 100 for each epoch."""

    def __init__(self, length: int, start: int = 0) -> None:
        self.length = length
        self.start = start
        self.epoch = 0
        self.told: list[int] = []

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start + 100 * self.epoch, self.length + 100 * self.epoch))

    def __len__(self) -> int:
        return self.length - self.start

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.told.append(epoch)


class Endless(IterableDataset[int]):
    """A stream that never ends and has no length."""

    def __iter__(self) -> Iterator[int]:
        number = 0
        while True:
            yield number
            number += 1


class SplitsItself(IterableDataset[int]):
    """The numbers below `length`, each in one worker only: worker `number % num_workers`."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        worker, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(range(worker, self.length, num_workers))


@dataclass
class Info:
    """What a worker process is told about itself."""

    id: int
    num_workers: int


class Workers:
    """Play the workers of one loader in turn."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.patch = patch

    def parts(self, shard: StreamShard[int], num_workers: int) -> list[list[int]]:
        """What each worker yields; without workers, what the process itself does."""
        found = []
        for worker in range(max(1, num_workers)):
            info = Info(worker, num_workers) if num_workers else None
            with self.patch.context() as patch:
                patch.setattr(stream, "get_worker_info", lambda info=info: info)
                patch.setattr(f"{__name__}.get_worker_info", lambda info=info: info)
                found.append(list(shard))
        return found


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Workers:
    return Workers(monkeypatch)


def shards(length: int, world_size: int, even: Even = "none") -> list[list[int]]:
    numbers = Numbers(length)
    return [list(StreamShard(numbers, rank, world_size, even=even)) for rank in range(world_size)]


def test_ten_items_on_three_ranks() -> None:
    assert shards(10, 3) == [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]
    assert shards(10, 3, "drop") == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
    assert shards(10, 3, "pad") == [[0, 3, 6, 9], [1, 4, 7, 0], [2, 5, 8, 1]]


@pytest.mark.parametrize(
    ("length", "padded"),
    [
        (5, [[0, 3], [1, 4], [2, 0]]),
        (2, [[0], [1], [0]]),
        (1, [[0], [0], [0]]),
        (0, [[], [], []]),
    ],
)
def test_pad_repeats_what_a_distributed_sampler_repeats(
    length: int, padded: list[list[int]]
) -> None:
    assert shards(length, 3, "pad") == padded


@pytest.mark.parametrize("length", [0, 1, 2])
def test_fewer_items_than_ranks_drop_to_nothing(length: int) -> None:
    assert shards(length, 3, "drop") == [[], [], []]


def test_two_workers_see_each_item_of_their_rank_once(workers: Workers) -> None:
    numbers = Numbers(10)
    assert workers.parts(StreamShard(numbers, 0, 2), 2) == [[0, 4, 8], [2, 6]]
    assert workers.parts(StreamShard(numbers, 1, 2), 2) == [[1, 5, 9], [3, 7]]


def slow_shares(
    length: int, world_size: int, num_workers: int, even: Even
) -> list[list[list[int]]]:
    """The items of each rank and worker, by the sampler's own padding."""
    ranks: list[list[int]] = []
    for rank in range(world_size):
        if even == "none":
            ranks.append([item for item in range(length) if item % world_size == rank])
        else:
            sampler: DistributedSampler[int] = DistributedSampler(
                range(length),  # type: ignore[arg-type]
                world_size,
                rank,
                shuffle=False,
            )
            whole = length // world_size
            ranks.append(list(sampler)[: whole if even == "drop" else None])
    return [
        [
            [item for place, item in enumerate(mine) if place % num_workers == worker]
            for worker in range(num_workers)
        ]
        for mine in ranks
    ]


@given(
    length=st.integers(0, 60),
    world_size=st.integers(1, 7),
    num_workers=st.integers(1, 4),
    even=st.sampled_from(EVENS),
)
def test_every_share_is_that_of_the_oracle(
    length: int, world_size: int, num_workers: int, even: Even
) -> None:
    got = [
        [
            list(stream.SHARES[even](range(length), rank, world_size, worker, num_workers))
            for worker in range(num_workers)
        ]
        for rank in range(world_size)
    ]
    assert got == slow_shares(length, world_size, num_workers, even)
    for rank, parts in enumerate(got):
        assert share_length(length, rank, world_size, even) == sum(map(len, parts))


@pytest.mark.parametrize("even", EVENS)
def test_a_rank_sees_the_same_items_with_any_number_of_workers(
    even: Even, workers: Workers
) -> None:
    for rank in range(3):
        shard = StreamShard(Numbers(17), rank, 3, even=even)
        alone = sorted(shard)
        for num_workers in (1, 2, 4):
            parts = workers.parts(shard, num_workers)
            assert sorted(item for part in parts for item in part) == alone


@pytest.mark.parametrize("even", ["none", "pad", "drop"])
def test_a_stream_without_end_is_read_no_further_than_needed(even: Even) -> None:
    items = iter(StreamShard(Endless(), 1, 3, even=even))
    assert [next(items) for _ in range(4)] == [1, 4, 7, 10]


def test_drop_yields_an_item_only_when_its_window_is_complete() -> None:
    read: list[int] = []

    class Watched(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            for number in range(6):
                read.append(number)
                yield number

    items = iter(StreamShard(Watched(), 0, 3, even="drop"))
    assert next(items) == 0
    assert read == [0, 1, 2]


def test_a_stream_that_splits_itself_is_shared_part_by_part(workers: Workers) -> None:
    # Worker 0 holds 0, 2, 4, 6, 8 and worker 1 holds 1, 3, 5, 7, 9; the two ranks share each.
    numbers = SplitsItself(10)
    zero = StreamShard(numbers, 0, 2, splits_itself=True)
    one = StreamShard(numbers, 1, 2, splits_itself=True)
    assert workers.parts(zero, 2) == [[0, 4, 8], [1, 5, 9]]
    assert workers.parts(one, 2) == [[2, 6], [3, 7]]
    assert workers.parts(zero, 0) == [[0, 2, 4, 6, 8]]


def test_a_stream_that_splits_itself_unsaid_is_split_twice(workers: Workers) -> None:
    seen = [
        item
        for rank in range(2)
        for part in workers.parts(StreamShard(SplitsItself(10), rank, 2), 2)
        for item in part
    ]
    assert len(seen) == 5


@pytest.mark.parametrize(("even", "count"), [("pad", 6), ("drop", 4)])
def test_a_stream_that_splits_itself_gives_equal_counts(
    even: Even, count: int, workers: Workers
) -> None:
    shares = [
        workers.parts(StreamShard(SplitsItself(10), rank, 2, even=even, splits_itself=True), 2)
        for rank in range(2)
    ]
    assert [sum(map(len, parts)) for parts in shares] == [count, count]
    assert [[len(part) for part in parts] for parts in shares] == [[count // 2] * 2] * 2


def test_the_length_is_that_of_the_rank() -> None:
    lengths = [[len(StreamShard(Numbers(10), r, 3, even=e)) for r in range(3)] for e in EVENS]
    assert lengths == [[4, 3, 3], [4, 4, 4], [3, 3, 3]]


def test_a_stream_without_a_length_has_none() -> None:
    with pytest.raises(TypeError, match="Endless is a stream without a length"):
        len(StreamShard(Endless(), 0, 2))


def test_set_epoch_reaches_the_stream() -> None:
    shard = StreamShard(Numbers(4), 1, 2)
    shard.set_epoch(3)
    assert list(shard) == [301, 303]


def test_set_epoch_is_taken_where_the_stream_has_no_use_for_it() -> None:
    shard = StreamShard(Endless(), 0, 1)
    shard.set_epoch(3)
    assert next(iter(shard)) == 0


def test_a_worker_that_lives_on_hears_of_the_epoch(workers: Workers) -> None:
    """Such a worker holds a copy whose memory for the epoch is the original's."""
    shard = StreamShard(Numbers(4), 0, 2, persistent=True)
    assert shard.epoch_cell.is_shared()
    held = copy.copy(shard)
    vars(held)["dataset"] = Numbers(4)
    assert workers.parts(held, 1) == [[0, 2]]
    shard.set_epoch(2)
    assert workers.parts(held, 1) == [[200, 202]]


def test_a_worker_init_fn_configures_the_stream_through_the_shard() -> None:
    numbers = Numbers(10)
    shard = StreamShard(numbers, 0, 2)
    shard.start = 4
    assert numbers.start == 4
    assert shard.length == 10
    assert list(shard) == [4, 6, 8]
    with pytest.raises(AttributeError, match="nothing"):
        _ = shard.nothing


def test_a_shard_is_copied_and_pickled_with_its_stream() -> None:
    shard = StreamShard(Numbers(5), 1, 2, even="pad")
    assert list(copy.deepcopy(shard)) == [1, 3, 0]
    assert list(pickle.loads(pickle.dumps(shard))) == [1, 3, 0]


def test_the_epoch_of_a_shard_is_a_tensor_of_its_own() -> None:
    shard = StreamShard(Numbers(5), 1, 2)
    assert torch.equal(shard.epoch_cell, torch.tensor(-1))
    assert not shard.epoch_cell.is_shared()
