"""Work: a tensor that needs an owner: its shape, who holds how much of it, who may own it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from distcore.v1 import PlanError, Problem
from ownerplan.layout import GlobalLayout, Holders
from ownerplan.placements import Ranks


@dataclass(frozen=True, slots=True)
class Work:
    """One matrix step to be given to a rank.

    - `shape`: the full shape.
    - `held`: (rank, elements) for every rank that holds some of the tensor. Together they may be
      more than the tensor, where ranks hold the same elements.
    - `candidates`: the ranks that may own it; None for any.
    - `cost`: what the step costs; None to have it computed from the shape.
    """

    shape: tuple[int, ...]
    held: tuple[tuple[int, int], ...] = ()
    candidates: tuple[int, ...] | None = None
    cost: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        object.__setattr__(self, "held", tuple((rank, numel) for rank, numel in self.held))
        if self.candidates is not None:
            object.__setattr__(self, "candidates", tuple(self.candidates))
        problems = []
        if any(side < 0 for side in self.shape):
            problems.append(Problem("shape", "shape", f"{self.shape} has a negative dim"))
        numel = prod(self.shape)
        problems += [
            Problem(f"rank {rank}", "numel", f"holds {held} elements of {numel}")
            for rank, held in self.held
            if not 0 <= held <= numel
        ]
        if len({rank for rank, _ in self.held}) < len(self.held):
            problems.append(Problem("held", "duplicate", f"a rank is named twice in {self.held}"))
        if problems:
            raise PlanError(problems)

    @property
    def numel(self) -> int:
        """The elements of the whole tensor."""
        return prod(self.shape)

    @property
    def holders(self) -> tuple[int, ...]:
        """The ranks that hold some of the tensor."""
        return tuple(rank for rank, numel in self.held if numel)


def work_in_chunks(shape: Iterable[int], num_ranks: int) -> Work:
    """A tensor cut along dim 0 into equal chunks, as FSDP2 does; the last ones may be empty.

    >>> work_in_chunks((5, 4), 4).held
    ((0, 8), (1, 8), (2, 4))
    """
    shape = tuple(shape)
    if not shape:
        return Work(shape, tuple((rank, 1) for rank in range(num_ranks)))
    rows, row = -(-shape[0] // num_ranks), prod(shape[1:])
    cuts = [min(shape[0], at * rows) for at in range(num_ranks + 1)]
    sizes = [(high - low) * row for low, high in pairwise(cuts)]
    return Work(shape, tuple((rank, numel) for rank, numel in enumerate(sizes) if numel))


def works_in_buffer(
    layout: GlobalLayout, mesh: Ranks, indices: Sequence[int] | None = None
) -> list[Work]:
    """The tensors of one flat buffer, those of two dims and more unless `indices` says which.

    The ranks are those of the mesh; every axis cuts the buffer.
    """
    if indices is None:
        indices = [at for at, shape in enumerate(layout.tensor_shapes) if len(shape) >= 2]
    holders = Holders(layout.get_rank_ranges(mesh))
    return [
        Work(
            layout.tensor_shapes[index],
            tuple((rank, part.numel) for rank, part in holders.of(layout.get_tensor_range(index))),
        )
        for index in indices
    ]
