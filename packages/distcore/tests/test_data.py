"""shard_dataloader: every rank's part, equal counts, and no setting of the loader lost."""

from __future__ import annotations

import inspect
import multiprocessing
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from distcore.data import SETTINGS, ShardedLoader, shard_dataloader
from distcore.stream import Even, StreamShard
from distcore.testing import rank_threads
from distcore.v1.channel import Channel
from distcore.v1.errors import PlanError

WORLD = 3


class Items(Dataset[int]):
    """A map-style data set of the numbers below `length`."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.epochs: list[int] = []

    def __getitem__(self, item: int) -> int:
        return item

    def __len__(self) -> int:
        return self.length

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


class Stream(IterableDataset[int]):
    """The numbers below `length`, plus 100 for each epoch."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        return iter(range(100 * self.epoch, self.length + 100 * self.epoch))

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class MeasuredStream(Stream):
    """A stream that knows its length, as those of Hugging Face datasets do."""

    def __len__(self) -> int:
        return self.length


class SplitStream(Stream):
    """A stream that divides itself among the workers of a loader."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        worker, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(range(worker, self.length, num_workers))


def as_list(batch: Sequence[int]) -> list[int]:
    """Collate to a plain list."""
    return list(batch)


def first_of(worker: int) -> None:
    """Do nothing in the worker."""


def flat(loader: DataLoader[Any]) -> list[int]:
    return [int(item) for batch in loader for item in batch]


def by_rank(loader: DataLoader[Any], world_size: int = WORLD, **how: Any) -> list[list[int]]:
    shares = [shard_dataloader(loader, rank, world_size, **how) for rank in range(world_size)]
    return [flat(share) for share in shares]


# --- Map-style data sets -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "shares"),
    [
        (5, [[0, 3], [1, 4], [2, 0]]),
        (2, [[0], [1], [0]]),
        (1, [[0], [0], [0]]),
        (0, [[], [], []]),
    ],
)
@pytest.mark.parametrize("even", ["none", "pad"])
def test_a_map_style_data_set_gives_equal_counts(
    length: int, shares: list[list[int]], even: Even
) -> None:
    assert by_rank(DataLoader(Items(length), batch_size=2), even=even) == shares


@pytest.mark.parametrize(
    ("length", "shares"), [(5, [[0], [1], [2]]), (2, [[], [], []]), (6, [[0, 3], [1, 4], [2, 5]])]
)
def test_a_map_style_data_set_drops_the_surplus_where_asked(
    length: int, shares: list[list[int]]
) -> None:
    assert by_rank(DataLoader(Items(length)), even="drop") == shares


def test_the_ranks_have_equally_many_batches() -> None:
    loader = DataLoader(Items(13), batch_size=2)
    assert [len(shard_dataloader(loader, rank, WORLD)) for rank in range(WORLD)] == [3, 3, 3]
    assert [len(list(shard_dataloader(loader, rank, WORLD))) for rank in range(WORLD)] == [3, 3, 3]


def test_a_shuffled_loader_stays_shuffled_alike_on_all_ranks() -> None:
    loader = DataLoader(Items(9), shuffle=True)
    torch.manual_seed(1)
    zero = flat(shard_dataloader(loader, 0, WORLD))
    torch.manual_seed(2)
    others = [flat(shard_dataloader(loader, rank, WORLD)) for rank in (1, 2)]
    order = [item for row in zip(zero, *others, strict=True) for item in row]
    assert sorted(order) == list(range(9))
    assert order != list(range(9))


def test_set_epoch_reshuffles_and_an_epoch_can_be_repeated() -> None:
    share = shard_dataloader(DataLoader(Items(30), shuffle=True), 1, WORLD)
    orders = []
    for epoch in (0, 1, 0):
        share.set_epoch(epoch)
        orders.append(flat(share))
    assert orders[0] == orders[2]
    assert orders[0] != orders[1]
    assert isinstance(share.dataset, Items)
    assert share.dataset.epochs == [0, 1, 0]


def test_the_sampler_carries_the_seed_of_the_shuffle() -> None:
    share = shard_dataloader(DataLoader(Items(30), shuffle=True), 1, WORLD)
    before = flat(share)
    assert isinstance(share.sampler, DistributedSampler)
    share.sampler.seed = 7
    assert flat(share) != before


@pytest.mark.parametrize("shuffled", [False, True])
def test_shuffle_can_be_said_instead_of_followed(shuffled: bool) -> None:
    loader = DataLoader(Items(9), shuffle=shuffled)
    assert by_rank(loader, shuffle=False) == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
    order = by_rank(loader, shuffle=True)
    assert order != [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
    assert sorted(item for share in order for item in share) == list(range(9))


def test_a_loader_without_batches_stays_without() -> None:
    shares = [
        shard_dataloader(DataLoader(Items(5), batch_size=None), rank, WORLD)
        for rank in range(WORLD)
    ]
    assert [list(share) for share in shares] == [[0, 3], [1, 4], [2, 0]]
    streamed = shard_dataloader(DataLoader(MeasuredStream(5), batch_size=None), 1, WORLD)
    assert list(streamed) == [1, 4]
    assert len(streamed) == 2


class EveryOther(RandomSampler):
    """A sampler of the caller's own."""


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(Items(6), sampler=SubsetRandomSampler([0, 2])),
        DataLoader(Items(6), sampler=WeightedRandomSampler([1.0] * 6, 6)),
        DataLoader(Items(6), sampler=[5, 4, 3]),
        DataLoader(Items(6), sampler=EveryOther(range(6))),
        DataLoader(Items(6), sampler=RandomSampler(range(6), replacement=True)),
        DataLoader(Items(6), sampler=RandomSampler(range(6), num_samples=4)),
        DataLoader(Items(6), sampler=SequentialSampler(range(4))),
    ],
    ids=["subset", "weighted", "list", "subclass", "replacement", "fewer", "other length"],
)
@pytest.mark.parametrize("shuffle", [None, True, False])
def test_a_sampler_that_cannot_be_kept_is_an_error(
    loader: DataLoader[int], shuffle: bool | None
) -> None:
    with pytest.raises(ValueError, match="would be lost"):
        shard_dataloader(loader, 0, 2, shuffle=shuffle)


def test_a_batch_sampler_that_cannot_be_kept_is_an_error() -> None:
    batches = BatchSampler(SequentialSampler(range(6)), 2, drop_last=False)
    loader = DataLoader(Items(6), batch_sampler=batches)
    with pytest.raises(ValueError, match="batch_sampler: BatchSampler is custom"):
        shard_dataloader(loader, 0, 2)


def test_a_subset_is_how_to_select() -> None:
    assert by_rank(DataLoader(Subset(Items(9), [8, 6, 4]))) == [[8], [6], [4]]


def test_a_map_style_data_set_needs_a_length() -> None:
    class Lengthless(Dataset[int]):
        def __getitem__(self, item: int) -> int:
            return item

    with pytest.raises(PlanError, match="needs a length"):
        shard_dataloader(DataLoader(Lengthless()), 0, 2)


@pytest.mark.parametrize("data", [Items(6), Stream(6)], ids=["map", "stream"])
def test_data_that_is_sharded_already_is_an_error(data: Dataset[int]) -> None:
    once = shard_dataloader(DataLoader(data), 0, 2)
    with pytest.raises(PlanError, match="already"):
        shard_dataloader(once, 0, 2)


# --- Streams -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("even", "shares"),
    [
        ("none", [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]),
        ("pad", [[0, 3, 6, 9], [1, 4, 7, 0], [2, 5, 8, 1]]),
        ("drop", [[0, 3, 6], [1, 4, 7], [2, 5, 8]]),
    ],
)
@pytest.mark.parametrize("kind", [Stream, MeasuredStream])
def test_a_stream_is_strided_by_its_type_whether_it_has_a_length_or_not(
    even: Even, shares: list[list[int]], kind: type[Stream]
) -> None:
    assert by_rank(DataLoader(kind(10), batch_size=2), even=even) == shares


def test_set_epoch_reaches_a_stream() -> None:
    share = shard_dataloader(DataLoader(Stream(4)), 1, 2)
    share.set_epoch(2)
    assert flat(share) == [201, 203]


def test_the_number_of_batches_of_a_stream_is_that_of_the_rank() -> None:
    loader = DataLoader(MeasuredStream(10), batch_size=2)
    shares = [shard_dataloader(loader, rank, WORLD) for rank in range(WORLD)]
    assert [len(share) for share in shares] == [len(list(share)) for share in shares] == [2, 2, 2]
    with pytest.raises(TypeError, match="without a length"):
        len(shard_dataloader(DataLoader(Stream(10)), 0, WORLD))


@pytest.mark.parametrize(("drop_last", "batches"), [(False, 4), (True, 2)])
def test_the_number_of_batches_counts_those_of_each_worker(drop_last: bool, batches: int) -> None:
    """A rank's 10 items in batches of 4: its two workers make one whole and one of one item."""
    loader = DataLoader(MeasuredStream(20), batch_size=4, num_workers=2, drop_last=drop_last)
    assert len(shard_dataloader(loader, 1, 2)) == batches


@pytest.mark.parametrize(("even", "count"), [("pad", 2), ("drop", 1)])
def test_pytorch_141069_uneven_streams_hang_the_collectives_of_each_step(
    even: Even, count: int
) -> None:
    """Also torchrec 1014, composer 3415 and CosyVoice 297."""
    loader = DataLoader(Stream(9), batch_size=2)
    assert [len(share) for share in by_rank(loader, 4, even="none")] == [3, 2, 2, 2]

    def steps(channel: Channel) -> int:
        done = 0
        for batch in shard_dataloader(loader, channel.rank, channel.size, even=even):
            channel.all_gather(bytes([len(batch)]))
            done += 1
        return done

    assert rank_threads(4, steps, deadline_s=8.0).values() == (count,) * 4


# --- Settings ------------------------------------------------------------------------------------


def test_every_setting_of_a_data_loader_is_known() -> None:
    """A setting that torch adds must be forwarded: this test names it."""
    others = {"self", "dataset", "shuffle", "sampler", "batch_sampler", "pin_memory_device"}
    known = inspect.signature(DataLoader.__init__).parameters
    assert set(known) - others == set(SETTINGS)


@pytest.mark.parametrize("data", [Items(6), Stream(6)], ids=["map", "stream"])
def test_no_setting_is_lost(data: Dataset[int]) -> None:
    generator = torch.Generator()
    context = multiprocessing.get_context("spawn")
    settings = {
        "batch_size": 3,
        "num_workers": 2,
        "collate_fn": as_list,
        "pin_memory": True,
        "drop_last": True,
        "timeout": 7.0,
        "worker_init_fn": first_of,
        "multiprocessing_context": context,
        "generator": generator,
        "prefetch_factor": 5,
        "persistent_workers": True,
        "in_order": False,
    }
    assert set(settings) == set(SETTINGS)
    loader: DataLoader[int] = DataLoader(data, pin_memory_device="cuda:1", **settings)  # type: ignore[arg-type]
    share = shard_dataloader(loader, 0, 2)
    assert {name: getattr(share, name) for name in settings} == settings
    assert share.generator is generator
    assert share.pin_memory_device == "cuda:1"


@pytest.mark.parametrize("data", [Items(6), Stream(6)], ids=["map", "stream"])
def test_the_settings_may_be_the_defaults(data: Dataset[int]) -> None:
    loader: DataLoader[int] = DataLoader(data)
    share = shard_dataloader(loader, 0, 2)
    for name in (*SETTINGS, "pin_memory_device"):
        assert getattr(share, name) == getattr(loader, name)


def test_the_last_batch_is_dropped_where_the_loader_drops_it() -> None:
    loader = DataLoader(Items(10), batch_size=2, drop_last=True)
    assert by_rank(loader, 2) == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_two_workers_share_the_part_of_their_rank() -> None:
    """Real worker processes, two epochs of one pair of them; the batches take turns."""
    loader: DataLoader[int] = DataLoader(
        MeasuredStream(10),
        batch_size=2,
        num_workers=2,
        collate_fn=as_list,
        multiprocessing_context="forkserver",
        persistent_workers=True,
        timeout=60,
    )
    share = shard_dataloader(loader, 0, 2, even="pad")
    try:
        assert list(share) == [[0, 4], [2, 6], [8]]
        assert len(share) == 3
        share.set_epoch(1)
        assert list(share) == [[100, 104], [102, 106], [108]]
    finally:
        workers: Any = share._iterator
        workers._shutdown_workers()


# --- What is wrong -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rank", "world_size", "said"),
    [
        (0, 0, "world_size: 0 is not 1 or more"),
        (2, 2, "rank: 2 is not one of the ranks 0 to 1"),
        (-1, 2, "rank: -1 is not one of the ranks 0 to 1"),
        (0.0, 2, "rank: 0.0 is a float, not an int"),
        (0, "2", "world_size: '2' is a str, not an int"),
    ],
)
@pytest.mark.parametrize("data", [Items(6), Stream(6)], ids=["map", "stream"])
def test_a_rank_outside_the_world_is_an_error(
    data: Dataset[int], rank: Any, world_size: Any, said: str
) -> None:
    with pytest.raises(PlanError, match=said):
        shard_dataloader(DataLoader(data), rank, world_size)


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(PlanError) as caught:
        shard_dataloader(DataLoader(Stream(4)), 0, 2, even="odd", shuffle=True)  # type: ignore[arg-type]
    assert [problem.where for problem in caught.value.problems] == ["even", "shuffle"]
    with pytest.raises(PlanError, match="only a stream splits itself"):
        shard_dataloader(DataLoader(Items(4)), 0, 2, splits_itself=True)


def test_a_loader_that_behaves_otherwise_than_a_data_loader_is_an_error() -> None:
    class Doubled(DataLoader[int]):
        def __iter__(self) -> Any:
            return iter([*super().__iter__()] * 2)

    with pytest.raises(PlanError, match="Doubled changes __iter__ of DataLoader"):
        shard_dataloader(Doubled(Items(4)), 0, 2)


def test_a_loader_that_only_adds_to_a_data_loader_is_taken() -> None:
    class Named(DataLoader[int]):
        """A loader with a name."""

        name = "train"

        def __init__(self, data: Dataset[int]) -> None:
            super().__init__(data, batch_size=2)

    assert flat(shard_dataloader(Named(Items(4)), 0, 2)) == [0, 2]


def test_the_given_loader_is_left_as_it_was() -> None:
    stream = Stream(6)
    loader = DataLoader(stream, batch_size=2)
    share = shard_dataloader(loader, 0, 2)
    assert isinstance(share, ShardedLoader)
    assert isinstance(share.dataset, StreamShard)
    assert share.dataset.dataset is loader.dataset is stream
    assert flat(loader) == [0, 1, 2, 3, 4, 5]


def test_one_rank_sees_everything() -> None:
    assert by_rank(DataLoader(Items(5), batch_size=2), 1) == [[0, 1, 2, 3, 4]]
    assert by_rank(DataLoader(Stream(5), batch_size=2), 1, even="drop") == [[0, 1, 2, 3, 4]]


def test_a_stream_that_splits_itself_is_whole_without_workers() -> None:
    assert by_rank(DataLoader(SplitStream(6)), 2, splits_itself=True) == [[0, 2, 4], [1, 3, 5]]
    measured = shard_dataloader(
        DataLoader(MeasuredStream(10), batch_size=2, num_workers=2), 0, 2, splits_itself=True
    )
    assert len(measured) == 3
