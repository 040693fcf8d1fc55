"""Exchange: shards that some ranks of a group have loaded come to the ranks that need them.

Phases: (1) each rank checks what it has and needs against the distribution, and all agree that
they can begin; (2) loaders of quantised tensors tell what is inside them; (3) every rank makes
room; (4) bytes move, only to ranks that need them; (5) all ranks learn whether all succeeded.
A mistake on one rank is the same error on every rank, before a byte has moved.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import torch

from ckptx.distribution import ShardDistribution, shard_nbytes
from ckptx.errors import CheckpointPlanError
from ckptx.inner import empty_tensor, inner_form, inner_tensors, parts_of
from ckptx.shard_table import gather_bytes
from ckptx.sharded import ShardedTensor, ShardId
from ckptx.steps import play, steps_by_round, steps_by_tensor
from distcore.v1 import Channel, Plan, Problem, Region, Transfer
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

    def terms(self, algorithm: str) -> dict[str, str]:
        """What all ranks must have in common."""
        return {
            "algorithm": algorithm,
            "max_staging_bytes": str(self.max_staging_bytes),
            "verify": str(self.verify),
            "same_host": self.same_host,
        }


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

    def check() -> _Work:
        options.check(algorithm)
        return _Work.checked(loaded, needed, distribution, channel)

    work = run_together("exchange shards", check, channel, timeout_s=timeout_s)
    agree("how to exchange shards", options.terms(algorithm), channel, timeout_s=timeout_s)
    forms = _gather_forms(work, channel, timeout_s)
    plan, dtypes = work.plan(channel.ranks, forms)
    device = channel.device if options.device is None else options.device

    def make_room() -> tuple[Tensors, dict[str, torch.Tensor]]:
        return work.room(forms, device)

    received, places = run_together("make room for shards", make_room, channel, timeout_s=timeout_s)
    tensors = work.sources(), places
    if algorithm in STEP_BY_STEP:
        # The executor compares plans and dtypes itself; here the ranks do it before the steps.
        terms = {"plan": plan.digest, **dtypes}
        agree("exchange shards step by step", terms, channel, timeout_s=timeout_s)
        rounds = dtypes if algorithm == "gather_rounds" else None
        sent, got = _step(plan, channel, tensors, rounds, timeout_s)
    else:
        sent, got = _move(plan, channel, tensors, options)
    report = ExchangeReport(algorithm, sent, got, work.bound(), time.monotonic() - started)
    return {**loaded, **received}, report


@dataclass(frozen=True, slots=True)
class _Work:
    """One rank's part in an exchange, checked."""

    loaded: Mapping[ShardId, torch.Tensor]
    needed: Mapping[ShardId, ShardedTensor]
    distribution: ShardDistribution
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
        work = cls(loaded, needed, distribution, channel.index)
        problems = work._problems(channel.size)
        if problems:
            raise ExchangeError(problems)
        return work

    def _problems(self, size: int) -> list[Problem]:
        found = [
            Problem(name_of(name), "missing", "is needed, but not dealt out to this rank")
            for name in self.needed
            if self.index not in self.distribution.all_ranks_for_shard.get(name, ())
        ]
        for name, main in self.distribution.main_rank_for_shard.items():
            ranks = self.distribution.all_ranks_for_shard.get(name, [])
            text = self._problem(name, main, ranks)
            if not {main, *ranks} <= set(range(size)):
                text = f"has ranks {sorted({main, *ranks})}, but the group has {size}"
            if text:
                found.append(Problem(name_of(name), "exchange", text))
        return found

    def _problem(self, name: ShardId, main: int, ranks: list[int]) -> str:
        """What is wrong with one shard, or nothing."""
        if len(ranks) == 1 and ranks != [main]:
            return f"rank {ranks[0]} alone needs it, but rank {main} loads it"
        form = self.distribution.shard_to_metadata.get(name)
        if form is None:
            return "has no metadata in the distribution"
        if main == self.index:
            tensor = self.loaded.get(name)
            if tensor is None:
                return "is to be loaded by this rank, which has not loaded it"
            if (tensor.dtype, tuple(tensor.shape)) != (form.dtype, form.local_shape):
                got = f"{tensor.dtype} {tuple(tensor.shape)}"
                return f"expected {form.dtype} {form.local_shape}, loaded {got}"
            return ""
        if name in self.loaded:
            return f"is loaded by this rank, but dealt out to rank {main}"
        if self.index not in ranks:
            return ""
        shard = self.needed.get(name)
        if shard is None:
            return "is dealt out to this rank, which does not ask for it"
        if (shard.dtype, shard.local_shape) != (form.dtype, form.local_shape):
            got = f"{shard.dtype} {shard.local_shape}"
            return f"expected {form.dtype} {form.local_shape}, this rank needs {got}"
        return ""

    def crossing(self) -> list[tuple[ShardId, int, list[int]]]:
        """The shards that leave their loader: id, loader, and the others that need it."""
        found = []
        for name, main in self.distribution.main_rank_for_shard.items():
            ranks = self.distribution.all_ranks_for_shard.get(name, ())
            others = [rank for rank in ranks if rank != main]
            if others:
                found.append((name, main, others))
        return found

    def plan(self, ranks: Sequence[int], forms: Mapping[str, str]) -> tuple[Plan, dict[str, str]]:
        """Who sends what to whom, the same on all ranks; and the dtype of each of its keys."""
        transfers = []
        dtypes: dict[str, str] = {}
        for shard, main, others in self.crossing():
            name, metadata = name_of(shard), self.distribution.shard_to_metadata[shard]
            form = forms.get(name)
            inner = [("", dtype_name(metadata.dtype), metadata.local_shape)]
            for path, dtype, shape in inner if form is None else parts_of(form):
                key, region = name + path, Region.of_shape(shape)
                dtypes[key] = dtype
                transfers += [Transfer(key, ranks[main], ranks[other], region) for other in others]
        return Plan(transfers), dtypes

    def own_forms(self) -> dict[str, str]:
        """What is inside the quantised tensors that this rank gives away."""
        found = {}
        for name, main, _ in self.crossing():
            form = inner_form(self.loaded[name]) if main == self.index else None
            if form is not None:
                found[name_of(name)] = form
        return found

    def sources(self) -> dict[str, torch.Tensor]:
        """The plain tensors that this rank gives away, by the plan's keys."""
        return {
            name_of(name) + path: part
            for name, main, _ in self.crossing()
            if main == self.index
            for path, part in inner_tensors(self.loaded[name]).items()
        }

    def room(
        self, forms: Mapping[str, str], device: str | torch.device
    ) -> tuple[Tensors, dict[str, torch.Tensor]]:
        """Tensors for all that this rank receives, and the plain tensors in them by plan key."""
        tensors: Tensors = {}
        places: dict[str, torch.Tensor] = {}
        for name, _, others in self.crossing():
            if self.index in others:
                tensors[name] = place_for(self.needed[name], forms.get(name_of(name)), device)
                for path, part in inner_tensors(tensors[name]).items():
                    places[name_of(name) + path] = part
        return tensors, places

    def bound(self) -> int:
        """The bytes of all shards that this rank needs and has not loaded."""
        return sum(
            shard_nbytes(self.distribution.shard_to_metadata[name])
            for name, _, others in self.crossing()
            if self.index in others
        )


def name_of(shard_id: ShardId) -> str:
    """The name of a shard among the keys of a plan, which messages show too."""
    key, offset, flat = shard_id
    return f"{key} at {list(offset)}" + ("" if flat is None else f" flat {flat[0]}:{flat[1]}")


def place_for(shard: ShardedTensor, form: str | None, device: str | torch.device) -> torch.Tensor:
    """The tensor into which a shard is received: its data, or a new one.

    `form` is the inner form of the tensor that comes. CheckpointPlanError where they do not fit.
    """
    own = None if shard.data is None else inner_form(shard.data)
    if own != form:
        text = f"cannot be filled: comes as {form or 'a plain tensor'}, has {own or 'none such'}"
        raise CheckpointPlanError(Problem(name_of(shard.shard_id), "class", text))
    if shard.data is not None:
        return shard.data
    return empty_tensor(shard.local_shape, shard.dtype, device)


def _gather_forms(work: _Work, channel: Channel, timeout_s: float | None) -> dict[str, str]:
    """The inner forms of all quantised shards that move. Collective."""

    def describe() -> bytes:
        own = work.own_forms()
        return json.dumps(own).encode() if own else b""

    data = run_together("describe shards", describe, channel, timeout_s=timeout_s)
    found: dict[str, str] = {}
    for row in gather_bytes(data, channel, timeout_s=timeout_s):
        found |= json.loads(row or b"{}")
    return found


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
