"""The order in which point-to-point operations are handed to a carrier that can be deadlocked.

Both ends of a message cut it into the same groups and come to the groups in the same order, so a
carrier that runs one group after the other never waits for a group that the peer cannot reach.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

MAX_OPERATIONS = 256


class Operation(NamedTuple):
    """One buffer to (`sends`) or from the rank at position `peer` of the group."""

    sends: bool
    peer: int
    buffer: torch.Tensor


Buffers = Mapping[int, Sequence["torch.Tensor"]]
"""Position of the peer in the group -> the buffers for it, or from it, without empty ones."""


def cut_groups(
    index: int,
    size: int,
    sends: Buffers,
    receives: Buffers,
    *,
    max_operations: int = MAX_OPERATIONS,
) -> Iterator[tuple[Operation, ...]]:
    """Yield groups of at most `max_operations` operations, cut alike at both ends.

    A message from position `i` to position `j` has the distance `(j - i) mod size`. Distances
    are taken in blocks, buffers in slices of one width; block and slice of a buffer follow from
    the distance and the buffer's place in its message, which both ends know.
    """
    block = max(1, min(size - 1, max_operations // 2))
    width = max(1, max_operations // (2 * block))
    longest = max((len(buffers) for buffers in (*sends.values(), *receives.values())), default=0)
    for begin in range(0, longest, width):
        for nearest in range(1, size, block):
            group: list[Operation] = []
            for distance in range(nearest, min(nearest + block, size)):
                to, source = (index + distance) % size, (index - distance) % size
                cut = slice(begin, begin + width)
                group += [Operation(True, to, buffer) for buffer in sends.get(to, ())[cut]]
                group += [Operation(False, source, b) for b in receives.get(source, ())[cut]]
            if group:
                yield tuple(group)


def in_pair_order(index: int, sends: Buffers, receives: Buffers) -> tuple[Operation, ...]:
    """Return all operations in an order that is safe where each waits for its counterpart.

    Pairs of ranks come in one order on all ranks; within a pair the lower position sends first.
    """
    operations: list[Operation] = []
    for peer in sorted({*sends, *receives}, key=lambda peer: (min(index, peer), max(index, peer))):
        for sending in (True, False) if index < peer else (False, True):
            buffers = (sends if sending else receives).get(peer, ())
            operations += [Operation(sending, peer, buffer) for buffer in buffers]
    return tuple(operations)
