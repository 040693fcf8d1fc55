"""Part: what one rank has to do in an exchange of shards, checked against the distribution."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch

from ckptx.distribution import ShardDistribution, shard_nbytes
from ckptx.errors import CheckpointPlanError
from ckptx.inner import empty_tensor, inner_form, inner_tensors, parts_of
from ckptx.sharded import ShardedTensor, ShardId
from distcore.v1 import Channel, Columns, Plan, Problem
from distcore.v1.runtime import dtype_name

Tensors = dict[ShardId, torch.Tensor]


class ExchangeError(CheckpointPlanError, AssertionError):
    """What the ranks have and need does not fit the distribution; `problems` lists everything."""


class Crossing(NamedTuple):
    """A shard that leaves its loader: to `others`, the ranks besides that need it."""

    shard_id: ShardId
    name: str
    metadata: ShardedTensor
    main: int
    others: tuple[int, ...]
    nbytes: int


class _Way(NamedTuple):
    """What shards with the same loader and ranks have in common, seen from one rank."""

    others: tuple[int, ...]
    is_known: bool
    is_astray: bool
    is_loaded: bool
    is_needed: bool

    @classmethod
    def of(cls, dealt: tuple[int, ...], index: int, size: int) -> _Way:
        """The way of shards that `dealt` names: their loader first, then all ranks."""
        main, *ranks = dealt
        others = tuple(rank for rank in dealt if rank != main)
        is_known = 0 <= min(dealt) <= max(dealt) < size
        is_astray = len(ranks) == 1 and bool(others)
        return cls(others, is_known, is_astray, index == main, index in others)

    def fits(
        self, form: ShardedTensor, has: torch.Tensor | None, place: ShardedTensor | None
    ) -> bool:
        """Whether this rank has the shard, or a place for it, as it must; `_problem` tells why."""
        if self.is_astray:
            return False
        if self.is_loaded:
            return has is not None and has.dtype == form.dtype and has.shape == form.local_shape
        if has is not None:
            return False
        if not self.is_needed:
            return True
        return (
            place is not None
            and place.dtype == form.dtype
            and place.local_shape == form.local_shape
        )


# One tensor of a plan: its key, dtype and shape, and whose way it goes.
Entry = tuple[str, str, tuple[int, ...], Crossing]


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's part in an exchange, checked."""

    loaded: Mapping[ShardId, torch.Tensor]
    needed: Mapping[ShardId, ShardedTensor]
    crossing: tuple[Crossing, ...]
    index: int

    @classmethod
    def checked(
        cls,
        loaded: Mapping[ShardId, torch.Tensor],
        needed: Mapping[ShardId, ShardedTensor],
        distribution: ShardDistribution | None,
        channel: Channel,
    ) -> Part:
        """Check what this rank has and needs; raises with all that does not fit."""
        if distribution is None:
            raise ExchangeError(Problem("shard_distribution", "missing", "is None"))
        index, size = channel.index, channel.size
        ranks_of, forms = distribution.all_ranks_for_shard, distribution.shard_to_metadata
        problems = [
            Problem(name_of(shard), "missing", "is needed, but not dealt out to this rank")
            for shard in needed
            if index not in ranks_of.get(shard, ())
        ]
        crossing = []
        ways: dict[tuple[int, ...], _Way] = {}
        for shard, main in distribution.main_rank_for_shard.items():
            dealt, form = (main, *ranks_of.get(shard, ())), forms.get(shard)
            way = ways.get(dealt) or ways.setdefault(dealt, _Way.of(dealt, index, size))
            if form is None or not way.is_known:
                text = f"has ranks {sorted({*dealt})} of {size} and the metadata {form}"
                problems.append(Problem(name_of(shard), "distribution", text))
                continue
            has, place = loaded.get(shard), needed.get(shard)
            if not way.fits(form, has, place):
                wrong = _problem(form, dealt, index, has, place)
                problems.append(Problem(name_of(shard), "exchange", wrong))
            if way.others:
                nbytes = shard_nbytes(form)
                crossing.append(Crossing(shard, name_of(shard), form, main, way.others, nbytes))
        if problems:
            raise ExchangeError(problems)
        return cls(loaded, needed, tuple(crossing), index)

    def room(self, device: str | torch.device) -> Tensors:
        """A tensor for every shard that this rank receives: its data, or a new one."""
        return {
            move.shard_id: place_for(self.needed[move.shard_id], device)
            for move in self.crossing
            if self.index in move.others
        }

    def forms(self, room: Tensors) -> tuple[dict[str, str], dict[str, str]]:
        """The inner forms of quantised tensors that this rank sends, and of those to receive in."""
        sent, awaited = {}, {}
        for move in self.crossing:
            if move.main == self.index:
                form = inner_form(self.loaded[move.shard_id])
                if form is not None:
                    sent[move.name] = form
            elif self.index in move.others:
                form = inner_form(room[move.shard_id])
                if form is not None:
                    awaited[move.name] = form
        return sent, awaited

    def misfits(self, rank: int, forms: Mapping[str, str], awaited: Mapping[str, str]) -> str:
        """What a rank cannot receive, because it comes as a tensor of another class."""
        for move in self.crossing:
            comes, has = forms.get(move.name), awaited.get(move.name)
            if rank in move.others and comes != has:
                return f"{move.name} comes as {comes or 'a plain tensor'}, but is {has or 'plain'}"
        return ""

    def entries(self, forms: Mapping[str, str]) -> Iterator[Entry]:
        """What the plan has for these shards: one entry per plain tensor."""
        for move in self.crossing:
            form, metadata = forms.get(move.name), move.metadata
            inner = [("", dtype_name(metadata.dtype), metadata.local_shape)]
            for path, dtype, shape in inner if form is None else parts_of(form):
                yield move.name + path, dtype, shape, move

    def sources(self) -> dict[str, torch.Tensor]:
        """The plain tensors that this rank gives away, by the plan's keys."""
        return {
            move.name + path: part
            for move in self.crossing
            if move.main == self.index
            for path, part in inner_tensors(self.loaded[move.shard_id]).items()
        }

    def places(self, room: Tensors) -> dict[str, torch.Tensor]:
        """The plain tensors that this rank receives in, by the plan's keys."""
        return {
            move.name + path: part
            for move in self.crossing
            if self.index in move.others
            for path, part in inner_tensors(room[move.shard_id]).items()
        }

    def bound(self) -> int:
        """The bytes of all shards that this rank needs and has not loaded."""
        return sum(move.nbytes for move in self.crossing if self.index in move.others)


def plan_of(entries: Iterable[Entry], ranks: Sequence[int]) -> tuple[Plan, dict[str, str]]:
    """Who sends what to whom, the same on all ranks; and the dtype of each of its keys."""
    dtypes: dict[str, str] = {}
    key, src, dst, coords = array("q"), array("q"), array("q"), array("q")
    widths = array("q")
    for name, dtype, shape, move in entries:
        count = len(move.others)
        key.extend((len(dtypes),) * count)
        src.extend((ranks[move.main],) * count)
        dst.extend([ranks[other] for other in move.others])
        coords.extend(((0,) * len(shape) + shape) * count)
        widths.extend((2 * len(shape),) * count)
        dtypes[name] = dtype
    at = array("q", accumulate(widths, initial=0))
    return Plan.from_columns(Columns(tuple(dtypes), key, src, dst, at, coords)), dtypes


def _problem(
    form: ShardedTensor,
    dealt: tuple[int, ...],
    index: int,
    tensor: torch.Tensor | None,
    shard: ShardedTensor | None,
) -> str:
    """What is wrong with a shard on a rank, or nothing; `dealt` is its loader, then all ranks."""
    main, *ranks = dealt
    wanted = (form.dtype, form.local_shape)
    if len(ranks) == 1 and ranks[0] != main:
        return f"rank {ranks[0]} alone needs it, but rank {main} loads it"
    if main == index:
        if tensor is None:
            return "is to be loaded by this rank, which has not loaded it"
        if (tensor.dtype, tuple(tensor.shape)) != wanted:
            got = f"{tensor.dtype} {tuple(tensor.shape)}"
            return f"expected {form.dtype} {form.local_shape}, loaded {got}"
    elif tensor is not None:
        return f"is loaded by this rank, but dealt out to rank {main}"
    elif index in ranks:
        if shard is None:
            return "is dealt out to this rank, which does not ask for it"
        if (shard.dtype, shard.local_shape) != wanted:
            got = f"{shard.dtype} {shard.local_shape}"
            return f"expected {form.dtype} {form.local_shape}, this rank needs {got}"
    return ""


def name_of(shard_id: ShardId) -> str:
    """The name of a shard among the keys of a plan, which messages show too."""
    key, offset, flat = shard_id
    return f"{key} at {list(offset)}" + ("" if flat is None else f" flat {flat[0]}:{flat[1]}")


def place_for(shard: ShardedTensor, device: str | torch.device) -> torch.Tensor:
    """The tensor into which a shard is received: its data, or a new one."""
    if shard.data is not None:
        return shard.data
    return empty_tensor(shard.local_shape, shard.dtype, device)
