"""Placement: how one mesh axis divides a tensor, and the index arithmetic that follows.

Each axis of a mesh either repeats a tensor (`R`), cuts one of its dims (`S(d)`), or cuts a dim
that an axis further right has already cut (`_S(d,f)`: FSDP2 over tensor parallelism, f being the
number of cuts made before).  Every cut follows torch.chunk: n indices over k ranks give runs of
ceil(n / k), the last ones shorter or empty.

torch reads `_S(d,f)` in two ways that agree whenever the cuts are even:

- *order*: f tells where the axis stands in the order in which the axes cut the dim, so that the
  dim is cut by the axis further right first.  FSDP2 and `redistribute` produce this.
- *index*: the dim is cut into f runs, each run into k, and rank i holds the i-th part of every
  run.  `distribute_tensor(src_data_rank=None)` and the offset helper of torch use this, and it is
  the only one where f is no product of axis sizes.

`Reading` names the two; which one a given tensor follows can only be told from the local shapes
that torch really made. Where one factor is no such product, torch reads the whole tensor by index,
and so does `intervals`, whichever reading is asked for.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Final, Literal, TypeAlias

from distcore.v1.errors import PlanError, Problem
from distcore.v1.integers import as_int

Reading: TypeAlias = Literal["order", "index"]

_FORM: Final = re.compile(r"R|S\((-?[0-9]{1,18})\)|_S\((-?[0-9]{1,18}), ?([0-9]{1,18})\)")


@dataclass(frozen=True, slots=True)
class Placement:
    """What one mesh axis does to a tensor: `dim` None repeats it, else it cuts that dim.

    `split_factor` is 1 for a plain cut, and the number of earlier cuts for a strided one.
    PlanError where `dim` is negative, or the factor below 1, or there is one without a cut.
    """

    dim: int | None
    split_factor: int = 1

    def __post_init__(self) -> None:
        dim = self.dim if self.dim is None else as_int(self.dim, "placement")
        factor = as_int(self.split_factor, "placement")
        object.__setattr__(self, "dim", dim)
        object.__setattr__(self, "split_factor", factor)
        if dim is not None and dim < 0:
            raise _refused(f"dim {dim} is negative; Placement.parse counts from the end")
        if factor < 1 or (dim is None and factor != 1):
            raise _refused(f"a split factor of {factor} with dim {dim}")

    @classmethod
    def parse(cls, form: str, ndim: int) -> Placement:
        """Read `'R'`, `'S(d)'` or `'_S(d,f)'`; a negative d counts from the end.

        PlanError where `form` is none of them, or names a dim that the tensor lacks.

        >>> Placement.parse("S(-1)", 2)
        Placement(dim=1, split_factor=1)
        """
        match = _FORM.fullmatch(form) if isinstance(form, str) else None
        if match is None:
            raise _refused(f"{form!r} is none of 'R', 'S(d)', '_S(d,f)'")
        text = match[1] or match[2]
        if text is None:
            return cls(None)
        dim = int(text)
        if not -ndim <= dim < ndim:
            raise _refused(f"{form!r} names a dim that a {ndim}-d tensor lacks")
        factor = int(match[3] or 1)
        if factor < 1:
            raise _refused(f"{form!r} has a split factor below 1")
        return cls(dim % ndim, factor)

    def __str__(self) -> str:
        if self.dim is None:
            return "R"
        return f"S({self.dim})" if self.split_factor == 1 else f"_S({self.dim},{self.split_factor})"


def _refused(text: str) -> PlanError:
    return PlanError(Problem("placement", "placement", text))


@dataclass(frozen=True, slots=True)
class Interval:
    """`length` consecutive indices of a dim: globally from `start`, locally from `place`."""

    start: int
    length: int
    place: int


def cut(start: int, length: int, parts: int, part: int) -> tuple[int, int]:
    """The `part`-th of `parts` pieces of `length` indices from `start`, as torch.chunk cuts.

    >>> [cut(0, 10, 4, part) for part in range(4)]
    [(0, 3), (3, 3), (6, 3), (9, 1)]
    """
    step = -(-length // parts)
    low = min(length, part * step)
    return start + low, min(length, low + step) - low


def cutting_order(
    dim: int, placements: Sequence[Placement], sizes: Sequence[int]
) -> tuple[int, ...] | None:
    """The mesh axes that cut `dim`, in the order in which they cut it.

    None where a split factor is no product of the sizes of axes that cut before.
    """
    order: list[int] = []
    for axis in reversed(range(len(sizes))):
        placement = placements[axis]
        if placement.dim != dim:
            continue
        products = [prod(sizes[a] for a in order[:i]) for i in range(len(order) + 1)]
        if placement.split_factor not in products:
            return None
        order.insert(products.index(placement.split_factor), axis)
    return tuple(order)


def intervals(
    dim: int,
    length: int,
    placements: Sequence[Placement],
    sizes: Sequence[int],
    coordinates: Sequence[int],
    *,
    reading: Reading = "order",
) -> tuple[Interval, ...]:
    """The indices of `dim` that the rank at `coordinates` of the mesh holds, in local order.

    An empty shard is one empty interval: at the place where torch.chunk leaves it, or at the end
    of the dim where strided cuts are read by index.
    """
    plain = all(p.split_factor == 1 for p in placements if p.dim == dim)
    if plain or (reading == "order" and _have_order(placements, sizes)):
        start = 0
        for axis in cutting_order(dim, placements, sizes) or ():
            start, length = cut(start, length, sizes[axis], coordinates[axis])
        return (Interval(start, length, 0),)
    held = [(0, length)] if length else []
    for axis, placement in enumerate(placements):
        if placement.dim == dim:
            held = _strided_cut(held, placement.split_factor, sizes[axis], coordinates[axis])
    return _placed(held) or (Interval(length, 0, 0),)


def _have_order(placements: Sequence[Placement], sizes: Sequence[int]) -> bool:
    """Whether an order of cuts explains the split factors of every dim."""
    dims = {placement.dim for placement in placements if placement.dim is not None}
    return all(cutting_order(dim, placements, sizes) is not None for dim in dims)


def _strided_cut(
    held: list[tuple[int, int]], factor: int, parts: int, part: int
) -> list[tuple[int, int]]:
    """Cut the indices in `held` into `factor` runs and take the `part`-th piece of each."""
    total = sum(length for _, length in held)
    taken: list[tuple[int, int]] = []
    for run in range(min(factor, total)):  # further runs are empty
        low, length = cut(*cut(0, total, factor, run), parts, part)
        taken += _window(held, low, length)
    return taken


def _window(held: list[tuple[int, int]], low: int, length: int) -> list[tuple[int, int]]:
    """Positions [low, low + length) of the indices in `held`, as runs of indices."""
    runs: list[tuple[int, int]] = []
    position = 0
    for start, count in held:
        first, last = max(low, position), min(low + length, position + count)
        if first < last:
            runs.append((start + first - position, last - first))
        position += count
    return runs


def _placed(held: list[tuple[int, int]]) -> tuple[Interval, ...]:
    """Join neighbouring runs, and give each its place in the local dim."""
    placed: list[Interval] = []
    place = 0
    for start, length in held:
        last = placed[-1] if placed else None
        if last is not None and last.start + last.length == start:
            placed[-1] = Interval(last.start, last.length + length, last.place)
        else:
            placed.append(Interval(start, length, place))
        place += length
    return tuple(placed)
