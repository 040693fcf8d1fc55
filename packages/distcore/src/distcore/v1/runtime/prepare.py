"""Prepare: check a rank's tensors against a plan, and agree with all ranks that it can begin.

Ranks see only their own tensors, so a dtype that differs between the two ends of a transfer
shows on neither of them. Each rank therefore sums a number per transfer and dtype, with a plus
where it sends and a minus where it receives: if every pair agrees, all sums together are zero.

Where little is to be moved, a rank can give everything its place in memory before it knows how the
tensors of its peers lie. If all ranks can, one exchange says that they have done both.

Nor can one rank alone always tell how the DTensors that it was given are to be read (see
`distcore.v1.runtime.layouts`). Where some rank cannot, all of them find out together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Literal, TypeAlias

import torch

from distcore.v1.channel import Channel
from distcore.v1.errors import PlanError, Problem
from distcore.v1.header import Call, Header, digest16
from distcore.v1.layout import Layout
from distcore.v1.plan import Plan
from distcore.v1.runtime.agree import fail_together, meet
from distcore.v1.runtime.deadline import Deadline
from distcore.v1.runtime.digests import DIGEST_NBYTES
from distcore.v1.runtime.disputes import describe_plan, dtype_dispute
from distcore.v1.runtime.layouts import common_readings, is_dtensor, mask_of, readings_of, settled
from distcore.v1.runtime.shard import Box, Shard
from distcore.v1.runtime.sides import Sides
from distcore.v1.runtime.staging import Binding, Lane, Slot
from distcore.v1.schedule import Batch, Terms, fit_one_batch, plan_rounds

Verify: TypeAlias = Literal["xxh3"]
Values: TypeAlias = Mapping[str, torch.Tensor | Shard]
MIN_STAGING_NBYTES: Final = 1 << 16
LABEL: Final = "execute"
_CONTIGUOUS: Final = 1
_UNSETTLED: Final = 2
_BOUND: Final = 4
SLOTS: Final = 2
_MASK: Final = (1 << 64) - 1


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
    options: Options


@dataclass(frozen=True, slots=True)
class Bound:
    """What this rank has to do, and the staging memory for it, one slot per round in flight."""

    prepared: Prepared
    slots: tuple[Slot, ...]

    @classmethod
    def of(cls, sides: Sides, channel: Channel, options: Options, terms: Terms) -> Bound:
        """Give everything its place in memory. Local."""
        prepared = bind(sides, channel, options, terms)
        count = min(SLOTS, len(prepared.rounds))
        return cls(
            prepared, tuple(Slot.of(prepared.slot_nbytes, channel.device) for _ in range(count))
        )


@dataclass(frozen=True, slots=True)
class Ready:
    """A rank that may begin: its sides of the plan, and what it knows about its peers.

    `bound` is what it has bound to memory where all ranks have done so already, else None.
    """

    sides: Sides
    terms: Terms
    bound: Bound | None


def prepare(
    plan: Plan,
    channel: Channel,
    sources: Values,
    destinations: Values,
    *,
    options: Options,
    deadline: Deadline,
    failure: BaseException | None = None,
) -> Ready:
    """Check and agree. Collective; raises on every rank before anything has moved.

    With a `failure` this rank only tells it to the others.
    """
    values = (sources, destinations)
    sides = partial(_sides, plan, channel, values, options, failure)
    met = _meet(plan, channel, sides, options=options, deadline=deadline)
    if any(peer.flags & _UNSETTLED for peer in met.headers):
        layouts = _settle(plan, channel, values, deadline)
        sides = partial(sides, layouts=layouts)
        met = _meet(plan, channel, sides, options=options, deadline=deadline)
    if sum(peer.extra for peer in met.headers) & _MASK:
        dtypes = met.sides.dtypes(plan)
        raise dtype_dispute(plan, dtypes, channel, timeout_s=deadline.left_s())
    contiguous = {
        rank: bool(peer.flags & met.header.flags & _CONTIGUOUS)
        for rank, peer in zip(channel.ranks, met.headers, strict=True)
    }
    terms = _terms(channel, options, contiguous.__getitem__)
    are_bound = all(peer.flags & _BOUND for peer in met.headers)
    return Ready(met.sides, terms, met.bound if are_bound else None)


def bind(sides: Sides, channel: Channel, options: Options, terms: Terms) -> Prepared:
    """Give every part of every round its place in memory. Local."""
    sources, destinations = sides.sources.binding, sides.destinations.binding
    copies = tuple(
        (sources.box_of(part), destinations.box_of(part), part.nbytes)
        for part in sides.copies
        if part.nbytes
    )
    rounds, needed = [], (0, 0)
    for step in plan_rounds(
        sides.sends, sides.receives, channel.index, channel.ranks, terms, phases=sides.phases
    ):
        sends, outgoing = _lanes(sources, step.sends, terms.digest_nbytes)
        receives, incoming = _lanes(destinations, step.receives, terms.digest_nbytes)
        needed = (max(needed[0], outgoing), max(needed[1], incoming))
        rounds.append(BoundRound(sends, receives))
    return Prepared(copies, tuple(rounds), needed, options)


def _lanes(
    binding: Binding, batches: tuple[Batch, ...], digest_nbytes: int
) -> tuple[tuple[Lane, ...], int]:
    lanes, offset = [], 0
    for batch in batches:
        lane, offset = binding.lane(batch, offset, digest_nbytes)
        lanes.append(lane)
    return tuple(lanes), offset


@dataclass(frozen=True, slots=True)
class _Met:
    """What this rank has found and shown, and the headers of all ranks."""

    sides: Sides
    bound: Bound | None
    header: Header
    headers: tuple[Header, ...]


def _meet(
    plan: Plan,
    channel: Channel,
    make_sides: Callable[[], Sides],
    *,
    options: Options,
    deadline: Deadline,
) -> _Met:
    """Show what this rank has found; returns if no rank has found a problem."""
    header = Header(Call.PREPARE, failed=False, label=digest16(LABEL))
    try:
        sides = make_sides()
        unsettled = sides.is_unsettled
        bound = None if unsettled else _bound_early(sides, channel, options)
        header = replace(
            header,
            value=digest16(f"{plan.digest} {options}"),
            extra=0 if unsettled else sides.dtype_balance(),
            flags=(_CONTIGUOUS if sides.is_contiguous else 0)
            | (_UNSETTLED if unsettled else 0)
            | (_BOUND if bound is not None else 0),
        )
    except BaseException as error:  # noqa: BLE001 - told to the peers and raised again
        fail_together(LABEL, header, error, channel, timeout_s=deadline.left_s())
    text = partial(describe_plan, plan, str(options))
    headers = meet(LABEL, header, text, channel, timeout_s=deadline.left_s())
    return _Met(sides, bound, header, headers)


def _sides(
    plan: Plan,
    channel: Channel,
    values: tuple[Values, Values],
    options: Options,
    failure: BaseException | None,
    *,
    layouts: tuple[Mapping[str, Layout], Mapping[str, Layout]] = ({}, {}),
) -> Sides:
    """This rank's sides of the plan; raises its `failure`, or PlanError for all that is wrong."""
    if failure is not None:
        raise failure
    sides = Sides.of(plan, channel, values, layouts)
    problems = [*options.problems(), *sides.problems]
    if problems:
        raise PlanError(problems)
    return sides


def _bound_early(sides: Sides, channel: Channel, options: Options) -> Bound | None:
    """Bind as if no peer's tensors lay in order; None where it would matter that they do."""
    terms = _terms(channel, options, lambda peer: False)
    if not fit_one_batch(sides.sends, sides.receives, channel.size, terms):
        return None
    return Bound.of(sides, channel, options, terms)


def _terms(channel: Channel, options: Options, direct: Callable[[int], bool]) -> Terms:
    digest_nbytes = 0 if options.verify is None else DIGEST_NBYTES
    return Terms(options.max_staging_bytes, channel.scatters, direct, digest_nbytes)


def _settle(
    plan: Plan, channel: Channel, values: tuple[Values, Values], deadline: Deadline
) -> tuple[dict[str, Layout], dict[str, Layout]]:
    """The layouts of the DTensors of each side that can be read in two ways. Collective.

    Every rank shows, for each key of the plan and each side, which readings fit.
    """
    chosen = []
    for side in values:
        found = {key: _open_readings(side, key) for key in plan.keys}
        masks = [_mask_of(side, key, readings) for key, readings in found.items()]
        common = common_readings(masks, channel, timeout_s=deadline.left_s())
        chosen.append(settled(found, common))
    return chosen[0], chosen[1]


def _mask_of(side: Values, key: str, readings: tuple[Layout, ...]) -> int:
    value = side.get(key)
    return mask_of(readings, value) if readings and isinstance(value, torch.Tensor) else 0b11


def _open_readings(side: Values, key: str) -> tuple[Layout, ...]:
    """The two readings of a DTensor, or none where there is nothing to find out."""
    value = side.get(key)
    if not is_dtensor(value):
        return ()
    try:
        readings = readings_of(value)
    except PlanError:  # a tensor that the plan does not use on this rank is nobody's business
        return ()
    return readings if len(readings) > 1 else ()
