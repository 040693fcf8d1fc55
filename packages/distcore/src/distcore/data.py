"""Shard a data loader: each rank gets its own part of the data, and keeps every other setting.

A map-style data set is divided by `torch.utils.data.DistributedSampler`, a stream (an
`IterableDataset`) by `distcore.stream.StreamShard`. Nothing here communicates: each rank decides
alone, and all come to the same division.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from operator import index
from typing import Any, Final, TypeVar, get_args

from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from distcore.stream import Even, StreamShard, share_length
from distcore.v1.errors import PlanError, Problem

T = TypeVar("T")

SETTINGS: Final = (
    "batch_size",
    "num_workers",
    "collate_fn",
    "pin_memory",
    "drop_last",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "in_order",
)
"""What a DataLoader is told besides its data set and how to sample it."""


class ShardedLoader(DataLoader[T]):
    """A DataLoader over one rank's share of the data."""

    def set_epoch(self, epoch: int) -> None:
        """Tell the sampler and the data set which epoch the next iteration belongs to.

        Every rank must name the same epoch before iterating: a shuffled order follows from it.
        """
        for part in (self.sampler, self.dataset):
            listener = getattr(part, "set_epoch", None)
            if callable(listener):
                listener(epoch)

    def __len__(self) -> int:
        """Return the number of batches of this rank; TypeError where a stream has no length.

        It is exact, except for a stream that splits itself: how, is not known beforehand.
        """
        shard = self.dataset
        if not isinstance(shard, StreamShard):
            return super().__len__()
        size = self.batch_size
        if size is None:
            return len(shard)
        parts = 1 if shard.splits_itself else max(1, self.num_workers)
        counts = [share_length(len(shard), worker, parts, "none") for worker in range(parts)]
        return sum(count // size if self.drop_last else -(-count // size) for count in counts)


def shard_dataloader(
    loader: DataLoader[T],
    rank: int,
    world_size: int,
    *,
    even: Even = "none",
    shuffle: bool | None = None,
    splits_itself: bool = False,
) -> ShardedLoader[T]:
    """Return a loader like `loader` that yields only the part of the data that is `rank`'s.

    A map-style data set: rank `r` gets items `r`, `r + world_size`, ... of the order, and all
    ranks get equally many. The order is repeated from its beginning for the up to
    `world_size - 1` items that are missing; with `even="drop"` the surplus is dropped instead.
    `shuffle` says whether the order is shuffled (None: as `loader` does it). The shuffle follows
    from the sampler's seed (0) and the epoch, never from a random state of one rank: call
    `set_epoch(epoch)` of the returned loader before each epoch.

    A stream: every rank and worker reads all of it and keeps its own items, see
    `distcore.stream`. With `even="none"` the ranks' counts differ by up to one, and a loop with a
    collective in each step hangs at the end: such loops take `"pad"` (a rank without an item in
    the last round repeats one from the beginning) or `"drop"` (the incomplete round is dropped).
    `splits_itself=True` says that the data set divides its items among the workers of a rank by
    `get_worker_info()`; the ranks then share each worker's part.

    Everything else that `loader` was told holds for the new loader too; the data set, the
    generator and the functions are shared with `loader`. The new loader has `set_epoch`.

    Raises PlanError (a ValueError) that names all that is wrong: a rank outside the world, a
    sampler, batch sampler or subclass of DataLoader whose behaviour would be lost, a data set
    that is sharded already.
    """
    rank, world_size = _checked_place(rank, world_size)
    streams = isinstance(loader.dataset, IterableDataset)
    check = _stream_problems if streams else _map_problems
    problems = [*_option_problems(loader, even), *check(loader, shuffle, splits_itself)]
    if problems:
        raise PlanError(problems)
    if isinstance(loader.dataset, IterableDataset):
        shard = StreamShard(
            loader.dataset,
            rank,
            world_size,
            even=even,
            splits_itself=splits_itself,
            persistent=loader.persistent_workers,
        )
        return ShardedLoader(shard, **_settings(loader))
    if shuffle is None:
        shuffle = isinstance(loader.sampler, RandomSampler)
    sampler: DistributedSampler[T] = DistributedSampler(
        loader.dataset, world_size, rank, shuffle=shuffle, drop_last=even == "drop"
    )
    return ShardedLoader(loader.dataset, sampler=sampler, **_settings(loader))


def _settings(loader: DataLoader[T]) -> dict[str, Any]:
    settings = {name: getattr(loader, name) for name in SETTINGS}
    # Deprecated in torch: named only where the caller named it.
    if getattr(loader, "pin_memory_device", ""):
        settings["pin_memory_device"] = loader.pin_memory_device
    return settings


def _checked_place(rank: int, world_size: int) -> tuple[int, int]:
    problems = []
    for name, value in (("rank", rank), ("world_size", world_size)):
        try:
            index(value)
        except TypeError:
            text = f"{value!r} is a {type(value).__name__}, not an int"
            problems.append(Problem(name, "type", text))
    if not problems and world_size < 1:
        problems.append(Problem("world_size", "range", f"{world_size} is not 1 or more"))
    elif not problems and not 0 <= rank < world_size:
        text = f"{rank} is not one of the ranks 0 to {world_size - 1}"
        problems.append(Problem("rank", "range", text))
    if problems:
        raise PlanError(problems)
    return index(rank), index(world_size)


def _option_problems(loader: DataLoader[T], even: str) -> Iterator[Problem]:
    if even not in get_args(Even):
        yield Problem("even", "choice", f"{even!r} is not one of {', '.join(get_args(Even))}")
    kind = type(loader)
    own = [base for base in kind.__mro__ if issubclass(base, DataLoader) and base is not DataLoader]
    changed = {
        name
        for base in own
        for name, value in vars(base).items()
        if name != "__init__" and hasattr(DataLoader, name)
        if inspect.isroutine(value) or isinstance(value, property)
    }
    if changed and kind is not ShardedLoader:
        text = f"{kind.__name__} changes {', '.join(sorted(changed))} of DataLoader, and that "
        yield Problem("loader", "kind", text + "would be lost; shard the DataLoader inside it")


def _stream_problems(
    loader: DataLoader[T], shuffle: bool | None, splits_itself: bool
) -> Iterator[Problem]:
    if isinstance(loader.dataset, StreamShard):
        yield Problem("loader", "sharded", "its stream is one rank's shard already")
    if shuffle:
        yield Problem("shuffle", "choice", "a stream cannot be shuffled; shuffle in the data set")


def _map_problems(
    loader: DataLoader[T], shuffle: bool | None, splits_itself: bool
) -> Iterator[Problem]:
    if splits_itself:
        text = "only a stream splits itself; a map-style data set is divided by its sampler"
        yield Problem("splits_itself", "choice", text)
    if loader.batch_size is None and loader.batch_sampler is not None:
        name = type(loader.batch_sampler).__name__
        text = f"{name} is custom and would be lost; give batch_size and shuffle instead"
        yield Problem("batch_sampler", "kind", text)
        return
    yield from _sampler_problems(loader)


def _sampler_problems(loader: DataLoader[T]) -> Iterator[Problem]:
    sampler, name = loader.sampler, type(loader.sampler).__name__
    if isinstance(sampler, DistributedSampler):
        yield Problem("sampler", "sharded", f"a {name} divides the data among ranks already")
        return
    if type(sampler) not in (RandomSampler, SequentialSampler):
        text = f"{name} is custom and would be lost; select with torch.utils.data.Subset instead"
        yield Problem("sampler", "kind", text)
        return
    try:
        drawn, held = len(sampler), len(loader.dataset)  # type: ignore[arg-type]
    except TypeError as error:
        yield Problem("dataset", "length", f"a map-style data set needs a length: {error}")
        return
    if drawn != held or (isinstance(sampler, RandomSampler) and sampler.replacement):
        text = f"{name} draws {drawn} of {held} items otherwise than each once, which would be lost"
        yield Problem("sampler", "kind", text)
