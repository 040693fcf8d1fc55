"""Inventory: what all ranks have, settled together; the plan for it, and this rank's ends of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from distcore.v1 import (
    Channel,
    Layout,
    Plan,
    PlanError,
    Problem,
    describe_layout,
    itemsize,
    layout_from,
)
from distcore.v1.runtime import run_together
from reshard.deadlines import Countdown
from reshard.ends import Ends
from reshard.hooks import Hook
from reshard.options import Options
from reshard.partial import Slab, gather_plan, owner_layout, slabs_of
from reshard.placed import Own, own_of, with_reading
from reshard.plan import ReshardPlan, plan_reshard
from reshard.plan_cache import PlanCache
from reshard.records import encode, exchange
from reshard.roster import Roster, merge, wire_dtype
from reshard.stats import sizes_of
from reshard.tree import flatten

Cast: TypeAlias = Literal["error", "convert"]
Nodes: TypeAlias = "Mapping[int, int] | Sequence[int] | None"
Terms: TypeAlias = "tuple[Options, Nodes, Cast | Mapping[str, Cast], int]"
Owns: TypeAlias = "tuple[dict[str, Own], dict[str, Own]]"


@dataclass(frozen=True, slots=True)
class Inventory:
    """The plan, the same on all ranks, and this rank's tensors bound to it.

    `summands` is the plan by which the summands of partial sources are exchanged first.
    `total_nbytes` is what this rank sends and receives in one run.
    """

    plan: ReshardPlan
    summands: Plan
    ends: Ends
    has_values: bool
    total_nbytes: int

    def fill(self) -> None:
        """Bring the buffers of the sources up to date. Local."""
        for act in self.ends.before:
            act()

    def reduce(self) -> None:
        """Put the summands that have arrived together. Local."""
        for reduction in self.ends.reductions.values():
            reduction.reduce()

    def deliver(self) -> None:
        """Hand on what has arrived in buffers to the destinations. Local."""
        for act in self.ends.after:
            act()


def take_inventory(
    src: object,
    dst: object,
    channel: Channel,
    *,
    terms: Terms,
    hooks: Mapping[str, Hook],
    cache: PlanCache | None,
    countdown: Countdown,
) -> Inventory:
    """Describe, settle and bind, as the head of `reshard.resharder` says. Collective."""
    rank = channel.rank

    def describe() -> tuple[Owns, bytes]:
        own = _read(src, "source", rank), _read(dst, "destination", rank)
        return own, encode(*own, _told(terms))

    own, record = run_together("reshard: describe", describe, channel, timeout_s=countdown.left_s())
    records = exchange(record, channel, timeout_s=countdown.left_s())

    def settle() -> Inventory:
        options, nodes, cast, _ = terms
        casts = {key: value == "convert" for key, value in _casts(cast).items()}
        roster = merge(records, channel.ranks, casts=casts)
        settled = _settled(own, roster, rank)
        plan, slabs = _planned(roster, options, nodes, cache)
        if not roster.has_values:
            return Inventory(plan, Plan(), Ends(rank), has_values=False, total_nbytes=0)
        ends = Ends.of(plan, settled, slabs=slabs, hooks=hooks, rank=rank)
        summands = gather_plan(slabs)
        total = _total_nbytes(plan, summands, roster, rank)
        return Inventory(plan, summands, ends, has_values=True, total_nbytes=total)

    return run_together("reshard: plan", settle, channel, timeout_s=countdown.left_s())


def _read(tree: object, name: str, rank: int) -> dict[str, Own]:
    """What this rank has of one side; PlanError lists everything that is wrong with it."""
    found = {}
    problems: list[Problem] = []
    for key, value in flatten(tree, name).items():
        try:
            own = own_of(value, rank)
        except PlanError as error:
            problems += [Problem(key, one.kind, f"{name} {one}") for one in error.problems]
            continue
        except Exception as error:
            # A reference's own code may raise anything; the peers are told for which key.
            text = f"{name}: reading it raised {type(error).__name__}: {error}"
            raise PlanError([*problems, Problem(key, "value", text)]) from error
        if own is not None:
            found[key] = own
    if problems:
        raise PlanError(problems)
    return found


def _casts(cast: Cast | Mapping[str, Cast]) -> dict[str, Cast]:
    casts = dict(cast) if isinstance(cast, Mapping) else {"*": cast}
    problems = [
        Problem(key, "cast", f"expected 'error' or 'convert', got {value!r}")
        for key, value in casts.items()
        if value not in ("error", "convert")
    ]
    if problems:
        raise PlanError(problems)
    return casts


def _told(terms: Terms) -> str:
    """The options as the ranks compare them."""
    options, nodes, cast, max_staging_bytes = terms
    places = sorted(dict(nodes if isinstance(nodes, Mapping) else enumerate(nodes or ())).items())
    casts = sorted(_casts(cast).items())
    return f"{options}, nodes {places}, cast {casts}, max_staging_bytes {max_staging_bytes}"


def _settled(own: Owns, roster: Roster, rank: int) -> Owns:
    """This rank's tensors with the layouts that all ranks together have found."""
    problems: list[Problem] = []
    found: Owns = ({}, {})
    for owns, side, made in zip(own, (roster.src, roster.dst), found, strict=True):
        for key, one in owns.items():
            try:
                made[key] = with_reading(one, side.layouts[key], rank)
            except PlanError as error:
                problems += [Problem(key, p.kind, p.text) for p in error.problems]
    if problems:
        raise PlanError(problems)
    return found


def _planned(
    roster: Roster, options: Options, nodes: Nodes, cache: PlanCache | None
) -> tuple[ReshardPlan, dict[str, dict[int, Slab]]]:
    """The plan in the dtypes of the wire, and who reduces what of the partial sources."""
    src, dst = dict(roster.src.layouts), dict(roster.dst.layouts)
    slabs = {key: slabs_of(src[key], axes) for key, (axes, _) in sorted(roster.src.partial.items())}
    for key, layout in roster.src.layouts.items():
        dtype = wire_dtype(layout.dtype, dst[key].dtype)
        src[key] = (
            owner_layout(layout, slabs[key], dtype) if key in slabs else _with_dtype(layout, dtype)
        )
        dst[key] = _with_dtype(dst[key], dtype)
    plan = plan_reshard(src, dst, nodes=nodes, options=options, aliases=roster.aliases, cache=cache)
    return plan, slabs


def _with_dtype(layout: Layout, dtype: str) -> Layout:
    if layout.dtype == dtype:
        return layout
    return layout_from({**describe_layout(layout), "dtype": dtype})


def _total_nbytes(plan: ReshardPlan, summands: Plan, roster: Roster, rank: int) -> int:
    """What `rank` sends and receives in one run, reductions included."""
    sizes = {key: itemsize(layout.dtype) for key, layout in plan.src.items()}
    before = {
        key: itemsize(roster.src.layouts[key.rpartition("\n")[0]].dtype) for key in summands.keys
    }
    total = 0
    for stage, by_key in ((summands, before), *((stage, sizes) for stage in plan.stages)):
        src, dst, nbytes = sizes_of(stage, by_key)
        total += int(nbytes[(src != dst) & ((src == rank) | (dst == rank))].sum())
    return total
