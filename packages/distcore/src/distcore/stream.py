"""One rank's share of a stream, split over its data-loader workers.

Item `i` of the stream goes to rank `i % world_size`, and there to worker
`(i // world_size) % num_workers`. Every worker of every rank reads the whole stream and keeps its
own items, so nothing is seen twice, and which items a rank sees does not depend on its workers.

The items `k * world_size` to `(k + 1) * world_size - 1` form window `k`: one item for each rank.
Only the last window can be incomplete, and each rank decides alone what becomes of it:

    none  a rank yields what it has; the counts of two ranks differ by at most one
    drop  an incomplete window is dropped; the counts are equal
    pad   a rank without an item in the last window repeats one from the stream's beginning, the
          one that `DistributedSampler` would repeat; the counts are equal
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from itertools import islice
from typing import Any, Final, Literal, TypeVar

import torch
from torch.utils.data import IterableDataset, get_worker_info

T = TypeVar("T")

Even = Literal["none", "pad", "drop"]
"""What becomes of a stream's last, incomplete window."""

NO_EPOCH: Final = -1


def share_none(
    items: Iterable[T], rank: int, world_size: int, worker: int, num_workers: int
) -> Iterator[T]:
    """Yield the worker's items as they come; an incomplete last window is yielded as it is."""
    return islice(items, rank + world_size * worker, None, world_size * num_workers)


def share_drop(
    items: Iterable[T], rank: int, world_size: int, worker: int, num_workers: int
) -> Iterator[T]:
    """Yield the worker's items, each once the last item of its window has been read."""
    mine: list[T] = []
    for number, item in enumerate(items):
        window, place = divmod(number, world_size)
        if window % num_workers != worker:
            continue
        if place == rank:
            mine.append(item)
        if place == world_size - 1:
            yield mine.pop()


def share_pad(
    items: Iterable[T], rank: int, world_size: int, worker: int, num_workers: int
) -> Iterator[T]:
    """Yield the worker's items as they come, and one of the first `rank` where it has none."""
    first: list[T] = []
    count = 0
    for item in items:
        window, place = divmod(count, world_size)
        count += 1
        if window == 0 and place < rank:
            first.append(item)
        if place == rank and window % num_workers == worker:
            yield item
    windows, left = divmod(count, world_size)
    if 0 < left <= rank and windows % num_workers == worker:
        yield first[(rank - left) % min(count, world_size)]


SHARES: Final[Mapping[Even, Callable[..., Iterator[Any]]]] = {
    "none": share_none,
    "drop": share_drop,
    "pad": share_pad,
}


def share_length(length: int, rank: int, world_size: int, even: Even) -> int:
    """Return how many items of a stream of `length` items go to `rank`."""
    full, left = divmod(length, world_size)
    extra = {"none": rank < left, "drop": False, "pad": left > 0}[even]
    return full + extra


class StreamShard(IterableDataset[T]):
    """The items of `dataset` that go to `rank`; in a worker process, that worker's part of them.

    `dataset` must yield the same items in the same order on every rank and in every worker. With
    `splits_itself` it divides its items among the workers of a rank on its own; then the rule
    above is applied to each worker's part as if that were the whole stream: the ranks share each
    part, but which items a rank sees depends on the number of workers.

    Apart from iteration and length this is `dataset` itself: attributes are read from it and
    written to it, so that a `worker_init_fn` that configures the data set of its worker works on.
    """

    def __init__(
        self,
        dataset: IterableDataset[T],
        rank: int,
        world_size: int,
        *,
        even: Even = "none",
        splits_itself: bool = False,
        persistent: bool = False,
    ) -> None:
        epoch = torch.tensor(NO_EPOCH)
        vars(self).update(
            dataset=dataset,
            rank=rank,
            world_size=world_size,
            even=even,
            splits_itself=splits_itself,
            # Workers that outlive an epoch hold a copy of this object: only memory that they
            # share can tell them of the next one.
            epoch_cell=epoch.share_memory_() if persistent else epoch,
        )

    dataset: IterableDataset[T]
    rank: int
    world_size: int
    even: Even
    splits_itself: bool
    epoch_cell: torch.Tensor

    def __iter__(self) -> Iterator[T]:
        """Yield the items of this rank and worker, in the order of the stream."""
        worker, num_workers = 0, 1
        info = get_worker_info()
        if info is not None:
            self._tell_epoch()
            if not self.splits_itself:
                worker, num_workers = info.id, info.num_workers
        share = SHARES[self.even]
        return share(iter(self.dataset), self.rank, self.world_size, worker, num_workers)

    def __len__(self) -> int:
        """Return how many items this rank sees; TypeError where the stream has no length."""
        if not isinstance(self.dataset, Sized):
            raise TypeError(f"{type(self.dataset).__name__} is a stream without a length")
        return share_length(len(self.dataset), self.rank, self.world_size, self.even)

    def set_epoch(self, epoch: int) -> None:
        """Tell the stream its epoch, if it asks for one; persistent workers hear of it too.

        It holds from the next iteration on.
        """
        self.epoch_cell.fill_(epoch)
        self._tell_epoch()

    def _tell_epoch(self) -> None:
        epoch = int(self.epoch_cell)
        listener = getattr(self.dataset, "set_epoch", None)
        if epoch != NO_EPOCH and callable(listener):
            listener(epoch)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "dataset" not in vars(self):
            # Being copied or unpickled: there is nothing to ask yet.
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self.dataset, name, value)
