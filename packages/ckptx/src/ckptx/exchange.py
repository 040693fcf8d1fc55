"""Exchange: shards that some ranks of a group have loaded come to the ranks that need them.

Phases: (1) each rank checks what it has and needs against the distribution and makes room, and all
learn whether they can begin; (2) ranks with quantised tensors tell what is inside them; (3) bytes
move, only to ranks that need them; (4) all ranks learn whether all succeeded.
A mistake on one rank is the same error on every rank, before a byte has moved.
"""

from __future__ import annotations

import json
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final, Literal, cast

import torch

from ckptx.distribution import ShardDistribution, shard_nbytes
from ckptx.errors import CheckpointPlanError
from ckptx.inner import empty_tensor, inner_form, inner_tensors, parts_of
from ckptx.shard_table import gather_bytes
from ckptx.sharded import ShardedTensor, ShardId
from ckptx.steps import play, steps_by_round, steps_by_tensor
from distcore.v1 import Channel, Columns, PeerError, Plan, Problem
from distcore.v1.runtime import agree, dtype_name, execute, run_together

Tensors = dict[ShardId, torch.Tensor]
ALGORITHMS: Final = ("broadcast", "gather_rounds", "gather_object", "planned")
STEP_BY_STEP: Final = ("broadcast", "gather_rounds")
DEFAULT_STAGING_NBYTES: Final = 64 << 20


class ExchangeError(CheckpointPlanError, AssertionError):
    """What the ranks have and need does not fit the distribution; `problems` lists everything."""


class UnknownAlgorithmError(CheckpointPlanError, NotImplementedError):
    """There is no algorithm of this name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeOptions:
    """How shards travel; the same on all ranks.

    `max_staging_bytes` bounds the memory beside the tensors, and `verify` proves every part after
    it arrived ("xxh3"); both concern `planned` and `gather_object`. `timeout_s` bounds each wait.
    `device` is where a shard is made that has no data; the default is the channel's.
    """

    max_staging_bytes: int = DEFAULT_STAGING_NBYTES
    verify: Literal["xxh3"] | None = None
    timeout_s: float | None = None
    same_host: Literal["auto", "off"] = "auto"
    device: str | torch.device | None = field(default=None, compare=False)

    def check(self, algorithm: str) -> None:
        """Refuse what is no algorithm, or what it cannot do."""
        if algorithm not in ALGORITHMS:
            text = f"{algorithm!r} is none of {', '.join(ALGORITHMS)}"
            raise UnknownAlgorithmError(Problem("exchange_algo", "value", text))
        if self.verify is not None and algorithm in STEP_BY_STEP:
            text = f"{algorithm!r} does not verify; 'planned' does"
            raise CheckpointPlanError(Problem("verify", "value", text))

    def label(self, algorithm: str) -> str:
        """What the exchange is called, with all that the ranks must have in common."""
        return (
            f"exchange shards ({algorithm}, max_staging_bytes={self.max_staging_bytes}, "
            f"verify={self.verify}, same_host={self.same_host})"
        )


@dataclass(frozen=True, slots=True)
class ExchangeReport:
    """What the calling rank moved; the bound is what it had to receive at the least."""

    algorithm: str
    bytes_sent: int
    bytes_received: int
    lower_bound_received: int
    seconds: float


def exchange(
    loaded: Mapping[ShardId, torch.Tensor],
    needed: Mapping[ShardId, ShardedTensor],
    distribution: ShardDistribution | None,
    channel: Channel,
    *,
    algorithm: str = "planned",
    options: ExchangeOptions | None = None,
) -> tuple[Tensors, ExchangeReport]:
    """Return what this rank loaded and, in the distribution's order, every shard it needs.

    Collective. A shard that comes with data is received in place, into that data, and returned as
    that tensor; for others a tensor is made. The inputs are not changed.

    `planned` sends everything at once, in rounds of bounded size, small shards packed;
    `broadcast` one shard after the other; `gather_rounds` one shard per loader at a time, dtype
    by dtype. All of them give the same bits.

    Raises, on every rank, before a byte has moved: ExchangeError where the same thing is wrong
    everywhere, PeerError where something is wrong on one rank, DisagreementError where the ranks
    have different distributions or options.
    """
    started = time.monotonic()
    options = options or ExchangeOptions()
    timeout_s = options.timeout_s

    def prepare() -> tuple[_Work, Tensors]:
        options.check(algorithm)
        work = _Work.checked(loaded, needed, distribution, channel)
        return work, work.room(channel.device if options.device is None else options.device)

    # The label carries the options, so that ranks with other ones are in another call.
    work, room = run_together(options.label(algorithm), prepare, channel, timeout_s=timeout_s)
    if algorithm == "planned" and options.same_host == "auto":
        channel = _with_short_ways(channel, timeout_s)
    forms = _agree_on_forms(work, room, channel, timeout_s)
    plan, dtypes = work.plan(channel.ranks, forms)
    tensors = work.sources(), work.places(room)
    if algorithm in STEP_BY_STEP:
        # The executor compares plans and dtypes itself; here the ranks do it before the steps.
        terms = {"plan": plan.digest, **dtypes}
        agree("exchange shards step by step", terms, channel, timeout_s=timeout_s)
        rounds = dtypes if algorithm == "gather_rounds" else None
        sent, got = _step(plan, channel, tensors, rounds, timeout_s)
    else:
        sent, got = _move(plan, channel, tensors, options)
    report = ExchangeReport(algorithm, sent, got, work.bound(), time.monotonic() - started)
    return {**loaded, **room}, report


@dataclass(frozen=True, slots=True)
class _Crossing:
    """A shard that leaves its loader: to `others`, the ranks besides that need it."""

    shard_id: ShardId
    name: str
    metadata: ShardedTensor
    main: int
    others: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Work:
    """One rank's part in an exchange, checked."""

    loaded: Mapping[ShardId, torch.Tensor]
    needed: Mapping[ShardId, ShardedTensor]
    crossing: tuple[_Crossing, ...]
    index: int

    @classmethod
    def checked(
        cls,
        loaded: Mapping[ShardId, torch.Tensor],
        needed: Mapping[ShardId, ShardedTensor],
        distribution: ShardDistribution | None,
        channel: Channel,
    ) -> _Work:
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
        known: dict[tuple[int, ...], tuple[int, ...]] = {}
        for shard, main in distribution.main_rank_for_shard.items():
            dealt, form = (main, *ranks_of.get(shard, ())), forms.get(shard)
            if form is None or not 0 <= min(dealt) <= max(dealt) < size:
                text = f"has ranks {sorted({*dealt})} of {size} and the metadata {form}"
                problems.append(Problem(name_of(shard), "distribution", text))
                continue
            wrong = _problem(form, dealt, index, loaded.get(shard), needed.get(shard))
            if wrong:
                problems.append(Problem(name_of(shard), "exchange", wrong))
            if dealt not in known:
                known[dealt] = tuple(rank for rank in dealt if rank != main)
            if known[dealt]:
                crossing.append(_Crossing(shard, name_of(shard), form, main, known[dealt]))
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

    def plan(self, ranks: Sequence[int], forms: Mapping[str, str]) -> tuple[Plan, dict[str, str]]:
        """Who sends what to whom, the same on all ranks; and the dtype of each of its keys."""
        dtypes: dict[str, str] = {}
        key, src, dst, coords = array("q"), array("q"), array("q"), array("q")
        widths = array("q")
        for move in self.crossing:
            form, metadata = forms.get(move.name), move.metadata
            inner = [("", dtype_name(metadata.dtype), metadata.local_shape)]
            targets = array("q", [ranks[other] for other in move.others])
            for path, dtype, shape in inner if form is None else parts_of(form):
                count = len(targets)
                key.extend((len(dtypes),) * count)
                src.extend((ranks[move.main],) * count)
                dst.extend(targets)
                coords.extend(((0,) * len(shape) + shape) * count)
                widths.extend((2 * len(shape),) * count)
                dtypes[move.name + path] = dtype
        at = array("q", accumulate(widths, initial=0))
        return Plan.from_columns(Columns(tuple(dtypes), key, src, dst, at, coords)), dtypes

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
        return sum(
            shard_nbytes(move.metadata) for move in self.crossing if self.index in move.others
        )


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


def _with_short_ways(channel: Channel, timeout_s: float | None) -> Channel:
    """The channel that goes through memory between ranks of one host, where it has one."""
    find = getattr(channel, "same_host", None)
    return channel if find is None else cast("Channel", find(timeout_s=timeout_s))


def _agree_on_forms(
    work: _Work, room: Tensors, channel: Channel, timeout_s: float | None
) -> dict[str, str]:
    """The inner forms of all quantised shards that move, which fit on every rank. Collective.

    One small exchange where no rank has any.
    """
    own = work.forms(room)
    data = json.dumps(own).encode() if any(own) else b""
    rows = gather_bytes(data, channel, timeout_s=timeout_s)
    if not any(rows):
        return {}
    told = [json.loads(row or b"[{}, {}]") for row in rows]
    forms: dict[str, str] = {name: form for sent, _ in told for name, form in sent.items()}
    failures = {
        channel.ranks[index]: text
        for index, (_, awaited) in enumerate(told)
        if (text := work.misfits(index, forms, awaited))
    }
    if failures:
        raise PeerError("receive shards", failures)
    return forms


def _move(
    plan: Plan,
    channel: Channel,
    tensors: tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]],
    options: ExchangeOptions,
) -> tuple[int, int]:
    """Carry out a plan; the bytes that this rank sent and received. Collective."""
    moved = execute(
        plan,
        channel,
        *tensors,
        max_staging_bytes=options.max_staging_bytes,
        verify=options.verify,
        timeout=options.timeout_s,
        same_host=options.same_host,
    )
    return moved.nbytes_sent, moved.nbytes_received


def _step(
    plan: Plan,
    channel: Channel,
    tensors: tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]],
    dtypes: Mapping[str, str] | None,
    timeout_s: float | None,
) -> tuple[int, int]:
    """The same, in rounds of one dtype or, without `dtypes`, tensor by tensor. Collective."""
    steps = steps_by_tensor(plan) if dtypes is None else steps_by_round(plan, dtypes)
    return play(steps, channel, *tensors, timeout_s=timeout_s)
