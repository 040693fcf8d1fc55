"""Exchange: shards that some ranks of a group have loaded come to the ranks that need them.

Phases: (1) each rank checks what it has and needs against the distribution and makes room, and all
learn whether they can begin; (2) ranks with quantised tensors tell what is inside them; (3) bytes
move, only to ranks that need them; (4) all ranks learn whether all succeeded.
A mistake on one rank is the same error on every rank, before a byte has moved.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal, TypeAlias, cast

import torch

from ckptx.distribution import ShardDistribution
from ckptx.errors import CheckpointPlanError
from ckptx.packs import pack_small
from ckptx.part import Entry, Part, Tensors, plan_of
from ckptx.shard_table import gather_bytes
from ckptx.sharded import ShardedTensor, ShardId
from ckptx.steps import play, steps_by_round, steps_by_tensor
from distcore.v1 import Channel, DisagreementError, PeerError, Plan, Problem
from distcore.v1.runtime import agree, execute, run_together, scratch

ALGORITHMS: Final = ("broadcast", "gather_rounds", "gather_object", "planned")
STEP_BY_STEP: Final = ("broadcast", "gather_rounds")
DEFAULT_STAGING_NBYTES: Final = 64 << 20


# The inner forms of quantised tensors that a rank sends, and of those that it receives in.
Forms: TypeAlias = tuple[dict[str, str], dict[str, str]]
# The tensors that a rank sends from, and those that it receives in, by the plan's keys.
Ends: TypeAlias = tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]


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

    def prepare() -> tuple[Part, Tensors, Forms]:
        options.check(algorithm)
        work = Part.checked(loaded, needed, distribution, channel)
        room = work.room(channel.device if options.device is None else options.device)
        return work, room, work.forms(room)

    # The label carries the options, so that ranks with other ones are in another call.
    work, room, own = run_together(options.label(algorithm), prepare, channel, timeout_s=timeout_s)
    if algorithm == "planned" and options.same_host == "auto":
        channel = _with_short_ways(channel, timeout_s)
    forms = _agree_on_forms(work, own, channel, timeout_s)
    if algorithm == "planned" and options.verify is None:
        sent, got = _exchange_packed(work, room, forms, channel, options)
    else:
        sent, got = _exchange_singly(work, room, forms, channel, (algorithm, options))
    report = ExchangeReport(algorithm, sent, got, work.bound(), time.monotonic() - started)
    return {**loaded, **room}, report


def _with_short_ways(channel: Channel, timeout_s: float | None) -> Channel:
    """The channel that goes through memory between ranks of one host, where it has one."""
    find = getattr(channel, "same_host", None)
    return channel if find is None else cast("Channel", find(timeout_s=timeout_s))


def _agree_on_forms(
    work: Part, own: Forms, channel: Channel, timeout_s: float | None
) -> dict[str, str]:
    """The inner forms of all quantised shards that move, which fit on every rank. Collective.

    One small exchange where no rank has any.
    """
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


def _exchange_singly(
    work: Part,
    room: Tensors,
    forms: Mapping[str, str],
    channel: Channel,
    how: tuple[str, ExchangeOptions],
) -> tuple[int, int]:
    """Move every tensor as one of its own; the bytes that were sent and received. Collective."""
    algorithm, options = how
    plan, dtypes = plan_of(work.entries(forms), channel.ranks)
    ends, failure = _attempted(lambda: (work.sources(), work.places(room)))
    if algorithm not in STEP_BY_STEP:
        return _move(plan, channel, ends, options, failure)
    # The executor compares plans and dtypes itself; here the ranks do it before the steps.
    terms = {"plan": plan.digest, **dtypes} if failure is None else failure
    agree("exchange shards step by step", terms, channel, timeout_s=options.timeout_s)
    rounds = algorithm == "gather_rounds"
    steps = steps_by_round(plan, dtypes) if rounds else steps_by_tensor(plan)
    return play(steps, channel, *ends, timeout_s=options.timeout_s)


def _exchange_packed(
    work: Part,
    room: Tensors,
    forms: Mapping[str, str],
    channel: Channel,
    options: ExchangeOptions,
) -> tuple[int, int]:
    """Move small shards in packs and the others singly; what was sent and received. Collective."""
    packs, rest = pack_small(work.crossing, forms, options.max_staging_bytes // 2)
    if not packs:
        return _exchange_singly(work, room, forms, channel, ("planned", options))
    singly, device, index = replace(work, crossing=rest), channel.device, channel.index
    timeout_s = options.timeout_s

    def pack() -> Ends:
        out = {p.key: p.fill(work.loaded, device) for p in packs if p.moves[0].main == index}
        into = {p.key: scratch(p.nbytes, device) for p in packs if index in p.moves[0].others}
        return {**out, **singly.sources()}, {**into, **singly.places(room)}

    def unpack() -> None:
        for p in packs:
            if index in p.moves[0].others:
                p.empty_into(ends[1][p.key], room, device)

    ends, failure = _attempted(pack)
    entries: list[Entry] = [(p.key, "uint8", (p.nbytes,), p.moves[0]) for p in packs]
    plan, _ = plan_of([*entries, *singly.entries(forms)], channel.ranks)
    half = replace(options, max_staging_bytes=max(options.max_staging_bytes // 2, 1 << 16))
    try:
        moved = _move(plan, channel, ends, half, failure)
    except DisagreementError:
        # All ranks are here, with plans that differ; let them see which shards do.
        shards = {key: f"{dtype} {shape}" for key, dtype, shape, _ in work.entries(forms)}
        agree("which shards are exchanged", shards, channel, timeout_s=timeout_s)
        raise
    run_together("unpack shards", unpack, channel, timeout_s=timeout_s)
    return moved


def _attempted(fn: Callable[[], Ends]) -> tuple[Ends, BaseException | None]:
    """What `fn` returns, or why it failed; the peers are told later, when they listen."""
    try:
        return fn(), None
    except BaseException as error:  # noqa: BLE001 - told to all ranks, and raised by them
        return ({}, {}), error


def _move(
    plan: Plan,
    channel: Channel,
    ends: Ends,
    options: ExchangeOptions,
    failure: BaseException | None,
) -> tuple[int, int]:
    """Carry out a plan; the bytes that this rank sent and received. Collective.

    With a `failure` of this rank nothing moves, and every rank raises.
    """
    moved = execute(
        plan,
        channel,
        *ends,
        max_staging_bytes=options.max_staging_bytes,
        verify=options.verify,
        timeout=options.timeout_s,
        same_host=options.same_host,
        failure=failure,
    )
    return moved.nbytes_sent, moved.nbytes_received
