"""Prepare: check a rank's tensors against a plan, agree with all ranks, and bind the rounds.

Ranks see only their own tensors, so a dtype that differs between the two ends of a transfer
shows on neither of them. Each rank therefore sums a number per transfer and dtype, with a plus
where it sends and a minus where it receives: if every pair agrees, all sums together are zero.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Final, Literal, TypeAlias

import torch

from distcore.v1.channel import Channel
from distcore.v1.errors import DisagreementError, PlanError, Problem
from distcore.v1.header import Call, Header, digest16
from distcore.v1.plan import Plan
from distcore.v1.region import Region
from distcore.v1.runtime.agree import MAX_TEXT_NBYTES, gather_texts, meet
from distcore.v1.runtime.layouts import dtype_name
from distcore.v1.runtime.shard import Box, Shard
from distcore.v1.runtime.staging import Binding, Lane
from distcore.v1.schedule import Batch, Part, Terms, plan_rounds, regions_of, rows_of

Verify: TypeAlias = Literal["xxh3"]
_MASK: Final = (1 << 64) - 1
_CONTIGUOUS: Final = 1
MIN_STAGING_NBYTES: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Options:
    """What all ranks must ask for alike."""

    max_staging_bytes: int
    verify: Verify | None

    def problems(self) -> list[Problem]:
        """What is wrong with them."""
        found = []
        if self.max_staging_bytes < MIN_STAGING_NBYTES:
            text = f"expected at least {MIN_STAGING_NBYTES} bytes, got {self.max_staging_bytes}"
            found.append(Problem("max_staging_bytes", "range", text))
        if self.verify not in (None, "xxh3"):
            text = f"expected None or 'xxh3', got {self.verify!r}"
            found.append(Problem("verify", "value", text))
        return found


@dataclass(frozen=True, slots=True)
class BoundRound:
    """One round of this rank, bound to memory."""

    sends: tuple[Lane, ...]
    receives: tuple[Lane, ...]

    @property
    def nbytes(self) -> int:
        """The bytes that this rank sends and receives in it."""
        return sum(lane.nbytes for lane in (*self.sends, *self.receives))


@dataclass(frozen=True, slots=True)
class Prepared:
    """What this rank has to do: local copies, then rounds."""

    copies: tuple[tuple[Box, Box, int], ...]
    rounds: tuple[BoundRound, ...]
    slot_nbytes: tuple[int, int]
    sources: Binding
    destinations: Binding
    options: Options


def prepare(
    plan: Plan,
    channel: Channel,
    sources: Mapping[str, torch.Tensor | Shard],
    destinations: Mapping[str, torch.Tensor | Shard],
    *,
    options: Options,
    timeout_s: float | None = None,
) -> Prepared:
    """Check, agree, and bind. Collective; raises on every rank before anything has moved."""
    sides = _Sides.of(plan, channel, sources, destinations)
    problems = [*options.problems(), *sides.problems]
    contiguous = not problems and sides.all_flat(channel.device)
    label = "execute"
    header = Header(
        Call.PREPARE,
        failed=bool(problems),
        label=digest16(label),
        value=digest16(f"{plan.digest} {options}"),
        extra=0 if problems else sides.dtype_balance(),
        flags=_CONTIGUOUS if contiguous else 0,
    )
    error = PlanError(problems) if problems else None
    text = partial(_describe, plan, options) if error is None else str(error)
    headers = meet(label, header, text, channel, timeout_s=timeout_s, cause=error)
    if sum(peer.extra for peer in headers) & _MASK:
        raise _dtype_dispute(sides, channel, timeout_s)
    flat = {
        rank: bool(peer.flags & header.flags & _CONTIGUOUS)
        for rank, peer in zip(channel.ranks, headers, strict=True)
    }
    terms = Terms(options.max_staging_bytes, channel.scatters, flat.__getitem__)
    return _bind(channel, sides, options, terms)


def _bind(channel: Channel, sides: _Sides, options: Options, terms: Terms) -> Prepared:
    """Give every part of every round its place in memory."""
    sources = Binding(sides.sources, channel.device)
    destinations = Binding(sides.destinations, channel.device)
    copies = tuple(
        (sources.box_of(part), destinations.box_of(part), part.nbytes)
        for part in sides.copies
        if part.nbytes
    )
    rounds, needed = [], [0, 0]
    for step in plan_rounds(sides.sends, sides.receives, channel.index, channel.ranks, terms):
        sends, outgoing = _lanes(sources, step.sends)
        receives, incoming = _lanes(destinations, step.receives)
        needed = [max(needed[0], outgoing), max(needed[1], incoming)]
        rounds.append(BoundRound(sends, receives))
    slot_nbytes = (needed[0], needed[1])
    return Prepared(copies, tuple(rounds), slot_nbytes, sources, destinations, options)


def _lanes(binding: Binding, batches: Sequence[Batch]) -> tuple[tuple[Lane, ...], int]:
    lanes, offset = [], 0
    for batch in batches:
        lane, offset = binding.lane(batch, offset)
        lanes.append(lane)
    return tuple(lanes), offset


@dataclass(frozen=True, slots=True)
class _Sides:
    """The part of a plan that concerns one rank, and that rank's Shards.

    `rows` are the rows of the plan behind `sends` and `receives`, in the same order.
    """

    copies: list[Part]
    sends: dict[int, list[Part]]
    receives: dict[int, list[Part]]
    rows: tuple[dict[int, list[int]], dict[int, list[int]]]
    sources: dict[str, Shard]
    destinations: dict[str, Shard]
    problems: list[Problem]

    @classmethod
    def of(
        cls,
        plan: Plan,
        channel: Channel,
        sources: Mapping[str, torch.Tensor | Shard],
        destinations: Mapping[str, torch.Tensor | Shard],
    ) -> _Sides:
        local, send_rows, receive_rows = rows_of(plan, channel.rank)
        out = _Side("source", channel.rank, sources)
        into = _Side("destination", channel.rank, destinations)
        copies = out.parts(plan, local)
        sends = {peer: out.parts(plan, rows) for peer, rows in send_rows.items()}
        into.parts(plan, local)
        receives = {peer: into.parts(plan, rows) for peer, rows in receive_rows.items()}
        strangers = (set(plan.columns.src) | set(plan.columns.dst)) - set(channel.ranks)
        problems = [*out.problems, *into.problems, *_copy_problems(copies, out, into)]
        problems += [
            Problem(f"rank {rank}", "rank", f"is in the plan, but not among {channel.ranks}")
            for rank in sorted(strangers)
        ]
        rows = (send_rows, receive_rows)
        return cls(copies, sends, receives, rows, out.shards, into.shards, problems)

    def all_flat(self, device: str) -> bool:
        """Whether every Region that is sent or received lies in order on the channel's device."""
        return all(
            shards[part.key].box(part.region).flat(device) is not None
            for shards, by_peer in ((self.sources, self.sends), (self.destinations, self.receives))
            for parts in by_peer.values()
            for part in parts
            if part.nbytes
        )

    def dtype_balance(self) -> int:
        """The sum over this rank's sends less its receives; zero over all ranks (64 bits)."""
        total = 0
        for sign, shards, by_peer, rows_by_peer in (
            (1, self.sources, self.sends, self.rows[0]),
            (-1, self.destinations, self.receives, self.rows[1]),
        ):
            numbers = {key: _number_of(shard.data.dtype) for key, shard in shards.items()}
            for peer, parts in by_peer.items():
                for part, row in zip(parts, rows_by_peer[peer], strict=True):
                    total += sign * (2 * row + 1) * numbers[part.key]
        return total & _MASK

    def dtypes(self) -> dict[str, list[str]]:
        """For every key that crosses ranks here, its dtype as a source and as a destination."""
        found: dict[str, set[str]] = {}
        for name, shards, by_peer in (
            ("source", self.sources, self.sends),
            ("destination", self.destinations, self.receives),
        ):
            for key in {part.key for parts in by_peer.values() for part in parts}:
                text = f"{dtype_name(shards[key].data.dtype)} as a {name}"
                found.setdefault(key, set()).add(text)
        return {key: sorted(texts) for key, texts in sorted(found.items())}


class _Side:
    """Collects the parts and the problems of one side of a plan: sources or destinations."""

    def __init__(self, name: str, rank: int, values: Mapping[str, torch.Tensor | Shard]) -> None:
        self.name = name
        self.rank = rank
        self.values = values
        self.shards: dict[str, Shard] = {}
        self.problems: list[Problem] = []
        self._missing: set[str] = set()

    def parts(self, plan: Plan, rows: Sequence[int]) -> list[Part]:
        """One part per row, as far as this rank has what the row asks for."""
        found = []
        held: set[tuple[str, Region]] = set()
        for key, region in regions_of(plan, rows):
            shard = self.shards.get(key) or self._shard(key)
            if shard is None:
                continue
            if (key, region) not in held:
                held.add((key, region))
                self._check(key, shard, region)
            found.append(Part(key, region, region.numel * shard.data.element_size()))
        return found

    def _shard(self, key: str) -> Shard | None:
        if key in self._missing:
            return None
        try:
            shard = Shard.of(self.values[key], self.rank)
        except KeyError:
            self._refuse(key, "missing", f"no {self.name} of this name was given")
        except PlanError as error:
            self._refuse(key, "layout", str(error))
        else:
            self.shards[key] = shard
            return shard
        return None

    def _refuse(self, key: str, kind: str, text: str) -> None:
        self._missing.add(key)
        self.problems.append(Problem(f"rank {self.rank}, {key!r}", kind, text))

    def _check(self, key: str, shard: Shard, region: Region) -> None:
        ndim = shard.pieces[0].region.ndim if shard.pieces else region.ndim
        if ndim == region.ndim and shard.holds(region):
            return
        held = ", ".join(str(piece.region) for piece in shard.pieces[:4]) or "nothing"
        text = f"the {self.name} must hold {region}, but holds {held}"
        self.problems.append(Problem(f"rank {self.rank}, {key!r}", "region", text))


def _copy_problems(copies: list[Part], out: _Side, into: _Side) -> list[Problem]:
    """Where a rank's own source and destination differ in dtype."""
    problems = []
    for key in dict.fromkeys(part.key for part in copies):
        source, destination = out.shards.get(key), into.shards.get(key)
        if source is None or destination is None or source.data.dtype == destination.data.dtype:
            continue
        text = f"the source is {source.data.dtype}, the destination {destination.data.dtype}"
        problems.append(Problem(f"rank {out.rank}, {key!r}", "dtype", text))
    return problems


def _number_of(dtype: torch.dtype) -> int:
    digest = blake2b(dtype_name(dtype).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _describe(plan: Plan, options: Options) -> str:
    """What is shown where ranks hold different plans: per key how many transfers and which."""
    tables: dict[str, list[str]] = {}
    for transfer in plan:
        text = f"{transfer.src}>{transfer.dst} {transfer.region.start}-{transfer.region.stop}"
        tables.setdefault(transfer.key, []).append(text)
    shown = {
        key: f"{len(rows)} transfers ({', '.join(rows[:3])}{', ...' if len(rows) > 3 else ''}; "
        f"{blake2b(';'.join(rows).encode(), digest_size=4).hexdigest()})"
        for key, rows in tables.items()
    }
    return json.dumps({**shown, "options": str(options), "order of keys": list(plan.keys)[:64]})


def _dtype_dispute(sides: _Sides, channel: Channel, timeout_s: float | None) -> DisagreementError:
    """The error that names the keys whose two ends differ in dtype. Collective."""
    texts = gather_texts(json.dumps(sides.dtypes()), channel, timeout_s=timeout_s)
    tables: dict[int, dict[str, list[str]]] = {}
    for rank, text in zip(channel.ranks, texts, strict=True):
        tables[rank] = json.loads(text) if len(text) < MAX_TEXT_NBYTES else {}
    seen: dict[str, set[str]] = {}
    for table in tables.values():
        for key, found in table.items():
            seen.setdefault(key, set()).update(text.split(" as ")[0] for text in found)
    disputed = [key for key, names in sorted(seen.items()) if len(names) > 1][:4]
    values = {
        rank: ", ".join(
            f"{key!r} is {' and '.join(table[key])}" for key in disputed if key in table
        )
        or "no part in it"
        for rank, table in tables.items()
    }
    return DisagreementError("dtypes", values, "source and destination must have one dtype")
