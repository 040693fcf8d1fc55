"""Partial: tensors of which every rank holds a summand, reduced before they are moved on.

The ranks that hold summands of the same Regions are a team. The Regions are cut into as many
slabs as there are ranks that could reduce them, each rank receives the summands of its slab from
its team, and from then on the slabs are the source: nobody ever holds more than the plan needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

import torch

from distcore.v1 import Layout, Piece, Plan, Region, Transfer
from distcore.v1.runtime import Shard, torch_dtype


@dataclass(frozen=True, slots=True)
class Slab:
    """What one rank reduces: a run along `dim` of the local tensor, and whose summands it takes.

    `team` is in mesh order, the order in which the summands are added up.
    """

    dim: int
    low: int
    high: int
    team: tuple[int, ...]
    pieces: tuple[Piece, ...]


def slabs_of(layout: Layout, axes: Sequence[int]) -> dict[int, Slab]:
    """Which rank reduces what of a tensor that is partial along `axes` of its mesh.

    Ranks that repeat each other's summands share the work. A rank without a slab is left out.
    """
    form = layout.form
    if form is None:
        return {}
    repeated = [axis for axis, p in enumerate(form.placements) if p.dim is None]
    sizes = form.sizes
    places = {place: n for n, place in enumerate(product(*map(range, sizes)))}
    teams: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for place in places:
        teams.setdefault(_less(place, repeated), []).append(place)
    found: dict[int, Slab] = {}
    for members in teams.values():
        shape = layout.local_shape(form.ranks[places[members[0]]])
        dim = shape.index(max(shape)) if shape else 0
        length = shape[dim] if shape else 1
        for number, place in enumerate(members):
            low, high = (length * (number + step) // len(members) for step in (0, 1))
            rank = form.ranks[places[place]]
            held = layout.pieces(rank)
            pieces = held if not shape else tuple(_cut(held, dim, low, high))
            if low == high or not any(piece.region.numel for piece in pieces):
                continue
            others = [axis for axis in range(len(sizes)) if axis not in axes]
            team = tuple(
                form.ranks[places[other]]
                for other in members
                if all(other[axis] == place[axis] for axis in others)
            )
            found[rank] = Slab(dim, low, high, team, pieces)
    return found


def owner_layout(layout: Layout, slabs: Mapping[int, Slab], dtype: str) -> Layout:
    """The layout in which each rank holds its slab, reduced."""
    if not slabs:  # no elements at all
        whole = Region((0,) * len(layout.shape), (0,) * len(layout.shape))
        empty = Piece(whole, whole.start)
        return Layout(shape=layout.shape, dtype=dtype, pieces={layout.ranks[0]: [empty]})
    pieces = {rank: slab.pieces for rank, slab in slabs.items()}
    return Layout(shape=layout.shape, dtype=dtype, pieces=pieces)


def gather_plan(slabs: Mapping[str, Mapping[int, Slab]]) -> Plan:
    """The plan that brings the summands of each slab to the rank that reduces it.

    The summand of a rank travels under a key of its own, so that each has its own destination.
    """
    return Plan(
        Transfer(summand_key(key, member), member, rank, piece.region)
        for key in sorted(slabs)
        for rank, slab in sorted(slabs[key].items())
        for member in slab.team
        if member != rank
        for piece in slab.pieces
    )


def summand_key(key: str, rank: int) -> str:
    """The key under which the summand of `rank` travels."""
    return f"{key}\n{rank}"


@dataclass(frozen=True, slots=True, eq=False)
class Reduction:
    """One rank's part in the reduction of one tensor.

    `summands` are buffers for what the team sends, in the order of the team, the own local tensor
    being seen through `own`; `result` is what `reduce` writes.
    """

    op: str
    slab: Slab
    own: torch.Tensor
    result: torch.Tensor
    summands: dict[int, torch.Tensor]
    total: torch.Tensor = field(repr=False)

    @classmethod
    def of(cls, slab: Slab, local: torch.Tensor, op: str, wire: str, rank: int) -> Reduction:
        """Allocate what this rank needs to reduce its slab of `local`."""
        own = local.narrow(slab.dim, slab.low, slab.high - slab.low) if local.ndim else local
        summands = {
            member: torch.empty(own.shape, dtype=local.dtype, device=local.device)
            for member in slab.team
            if member != rank
        }
        # What has few bits is added up with more of them, and rounded once.
        sums = op not in ("max", "min")
        small = sums and local.dtype.is_floating_point and local.element_size() < 4
        total = torch.empty(
            own.shape, dtype=torch.float32 if small else local.dtype, device=local.device
        )
        result = torch.empty(own.shape, dtype=torch_dtype(wire), device=local.device)
        return cls(op, slab, own, result, summands, total)

    @property
    def nbytes(self) -> int:
        """The bytes of all buffers."""
        buffers = [*self.summands.values(), self.total, self.result]
        return sum(buffer.numel() * buffer.element_size() for buffer in buffers)

    def shards(self, key: str) -> dict[str, Shard]:
        """Where the summands of the others arrive."""
        return {
            summand_key(key, member): Shard(buffer, self.slab.pieces)
            for member, buffer in self.summands.items()
        }

    def reduce(self) -> None:
        """Put the summands together, in the order of the team, into `result`."""
        for number, member in enumerate(self.slab.team):
            summand = self.summands.get(member, self.own)
            if number == 0:
                self.total.copy_(summand)
            elif self.op in ("sum", "avg"):
                self.total.add_(summand)
            elif self.op == "product":
                self.total.mul_(summand)
            elif self.op == "max":
                torch.maximum(self.total, summand, out=self.total)
            else:
                torch.minimum(self.total, summand, out=self.total)
        if self.op == "avg":
            self.total.div_(len(self.slab.team))
        self.result.copy_(self.total)


def _less(place: tuple[int, ...], axes: Sequence[int]) -> tuple[int, ...]:
    return tuple(digit for axis, digit in enumerate(place) if axis not in axes)


def _cut(pieces: Sequence[Piece], dim: int, low: int, high: int) -> Iterator[Piece]:
    """What of the pieces lies in the run from `low` to `high` of the local tensor along `dim`."""
    for piece in pieces:
        first = max(low, piece.place[dim])
        last = min(high, piece.place[dim] + piece.region.shape[dim])
        if first >= last:
            continue
        start, stop, place = list(piece.region.start), list(piece.region.stop), list(piece.place)
        shift = start[dim] - place[dim]
        start[dim], stop[dim], place[dim] = first + shift, last + shift, first - low
        yield Piece(Region(tuple(start), tuple(stop)), tuple(place))
