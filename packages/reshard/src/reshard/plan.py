"""Plan: the way of a whole state dict from its source layouts to its destination layouts.

`plan_reshard` is a pure function of layouts: every rank computes the same plan without asking
anybody, and it can be made, stored and simulated for thousands of ranks in one process.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import Any, Final

from distcore.v1 import (
    Layout,
    Pair,
    Plan,
    PlanError,
    Problem,
    itemsize,
    matchings,
    pairs_of,
)
from reshard.bounds import Bounds, Demand
from reshard.cells import CellMaker
from reshard.forms import FormReader, Forms
from reshard.moves import Moves
from reshard.options import Options
from reshard.plan_cache import PlanCache
from reshard.sources import FanOut, Job, choose_sources
from reshard.stats import Stats

FORMAT: Final = 1
KIND: Final = "reshard.plan"


@dataclass(frozen=True)
class ReshardPlan:
    """Who sends what to whom so that every rank of `dst` holds its Regions of every key.

    `stages` are executed one after the other: the first reads the sources, the second (if any)
    passes on what has arrived, so its sources are the destinations. `aliases` maps the key of a
    tied tensor to the key whose memory it shares; it has its layouts and is never moved itself.
    Immutable.
    """

    src: Mapping[str, Layout]
    dst: Mapping[str, Layout]
    stages: tuple[Plan, ...]
    nodes: Mapping[int, int] = field(default_factory=dict)
    options: Options = field(default_factory=Options)
    aliases: Mapping[str, str] = field(default_factory=dict)

    @property
    def keys(self) -> tuple[str, ...]:
        """The tensors' keys, ascending."""
        return tuple(self.src)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks of all layouts, ascending."""
        return tuple(sorted(_ranks_of(self.src.values()) | _ranks_of(self.dst.values())))

    @cached_property
    def digest(self) -> str:
        """32 hex digits, equal for plans of equally described layouts with equal transfers."""
        told = {**self._head(), "stages": [stage.digest for stage in self.stages]}
        text = json.dumps(told, separators=(",", ":"))
        return blake2b(text.encode(), digest_size=16).hexdigest()

    def stats(self) -> Stats:
        """What the plan moves: bytes in all and at the busiest ranks, messages, rounds, peers."""
        sizes = {key: itemsize(layout.dtype) for key, layout in self.src.items()}
        return Stats.of(self.stages, sizes)

    def rounds(self) -> tuple[tuple[Pair, ...], ...]:
        """Who sends to whom at the same time, as few rounds as can be: `stats().rounds` many.

        In each round a rank sends to at most one other, and receives from at most one; all that
        goes between two ranks in a stage goes in one round. The rounds of one stage come before
        those of the next. For those who carry a plan by other means, or draw it: the executor
        has up to eight of them under way at once.
        """
        return tuple(one for stage in self.stages for one in matchings(pairs_of(stage)))

    def bounds(self) -> Bounds:
        """What no plan can go below, from the layouts alone."""
        maker = CellMaker()
        demand = Demand()
        for key in self.keys:
            if key in self.aliases:
                continue
            size = itemsize(self.src[key].dtype)
            for cell in maker.cells_of(key, self.src[key], self.dst[key]):
                demand.add(cell.holders, cell.missing, cell.numel * size)
        return demand.bounds()

    def inverse(self) -> ReshardPlan:
        """The plan of the way back, made with the same nodes, options and aliases."""
        return plan_reshard(
            self.dst, self.src, nodes=self.nodes, options=self.options, aliases=self.aliases
        )

    def explain(self, key: str) -> str:
        """The transfers of one tensor, a line each."""
        if key not in self.src:
            raise PlanError(Problem(key, "missing", "no tensor of this name is in the plan"))
        lines = [f"{key}: {self.src[key]} -> {self.dst[key]}"]
        if key in self.aliases:
            lines.append(f"  shares the memory of {self.aliases[key]}")
        for number, stage in enumerate(self.stages, 1):
            lines += [
                f"  stage {number}: {t.src} -> {t.dst}  {t.region.start} to {t.region.stop}"
                for t in stage
                if t.key == key
            ]
        return "\n".join(lines)

    def plot(self, path: str) -> None:
        """Draw the traffic matrix (sender by receiver, bytes) into a picture file."""
        from reshard.plot import plot_traffic

        plot_traffic(self, path)

    def to_json(self) -> str:
        """The plan as JSON text (format 1); a form that many layouts share stands in it once."""
        stages = [json.loads(stage.to_json()) for stage in self.stages]
        return json.dumps({**self._head(), "stages": stages}, separators=(",", ":"))

    def _head(self) -> dict[str, object]:
        """Everything but the stages, as JSON data."""
        forms = Forms()
        tensors = {
            key: [
                list(layout.shape),
                layout.dtype,
                forms.number(layout),
                forms.number(self.dst[key]),
            ]
            for key, layout in self.src.items()
        }
        return {
            "kind": KIND,
            "format": FORMAT,
            "forms": forms.told(),
            "tensors": tensors,
            "nodes": sorted(self.nodes.items()),
            "options": asdict(self.options),
            "aliases": dict(self.aliases),
        }

    @classmethod
    def from_json(cls, text: str) -> ReshardPlan:
        """Read what `to_json` wrote; PlanError where the text is no plan of this format."""
        try:
            table = json.loads(text)
        except ValueError as error:
            raise PlanError(Problem("plan", "json", f"not JSON: {error}")) from None
        if not isinstance(table, dict) or table.get("kind") != KIND:
            raise PlanError(Problem("plan", "kind", f"not a {KIND} object"))
        if table.get("format") != FORMAT:
            found = table.get("format")
            raise PlanError(Problem("plan", "format", f"format {found!r}; this reads {FORMAT}"))
        try:
            return cls._of_table(table)
        except PlanError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            text = f"a part is missing or of the wrong type: {error!r}"
            raise PlanError(Problem("plan", "form", text)) from None

    @classmethod
    def _of_table(cls, table: dict[str, Any]) -> ReshardPlan:
        reader = FormReader(table["forms"])
        src, dst = {}, {}
        for key, (shape, dtype, source, destination) in table["tensors"].items():
            src[key] = reader.layout(shape, dtype, source)
            dst[key] = reader.layout(shape, dtype, destination)
        stages = tuple(Plan.from_json(json.dumps(stage)) for stage in table["stages"])
        strange = sorted({key for stage in stages for key in stage.keys} - src.keys())
        if strange:
            problems = [Problem(key, "missing", "is moved, but has no layout") for key in strange]
            raise PlanError(problems)
        return cls(
            src=src,
            dst=dst,
            stages=stages,
            nodes={int(rank): int(node) for rank, node in table["nodes"]},
            options=Options(**table["options"]),
            aliases={str(key): str(other) for key, other in table["aliases"].items()},
        )


def plan_reshard(
    src: Mapping[str, Layout],
    dst: Mapping[str, Layout],
    *,
    nodes: Mapping[int, int] | Sequence[int] | None = None,
    options: Options | None = None,
    aliases: Mapping[str, str] | None = None,
    cache: PlanCache | None = None,
) -> ReshardPlan:
    """Plan the way of every key from its source layout to its destination layout.

    `src` and `dst` have equal keys; the two layouts of a key have one global shape and one dtype.
    `nodes` says on which node each rank is (a mapping, or a list by rank). `aliases` maps keys of
    tied tensors, which share memory at the source and at the destination, to the key that is
    moved for them. A rank that holds an
    element already is never sent it; every other rank that needs it receives it exactly once.
    Deterministic: equal arguments give equal plans, whatever the order of the mappings. What
    `cache` has is not planned again; a plan that is made goes into it.

    Raises PlanError that lists every key that does not fit.

    >>> src = Layout.from_mesh(shape=(4,), dtype="int8", mesh=[0, 1], placements=["S(0)"])
    >>> dst = Layout.replicated(shape=(4,), dtype="int8", ranks=[1, 2])
    >>> plan = plan_reshard({"w": src}, {"w": dst})
    >>> plan.stats()["wire_bytes"], plan.bounds()["wire_bytes"]
    (6, 6)
    """
    options = Options() if options is None else options
    places = dict(nodes if isinstance(nodes, Mapping) else enumerate(nodes or ()))
    tied = dict(sorted((aliases or {}).items()))
    if cache is not None:
        found = cache.find(src, dst, nodes=places, options=options, aliases=tied)
        if found is not None:
            return found
    problems = _problems(src, dst) or _alias_problems(tied, src, dst)
    if problems:
        raise PlanError(problems)
    keys = tuple(sorted(src))
    src, dst = {key: src[key] for key in keys}, {key: dst[key] for key in keys}
    moved = tuple(key for key in keys if key not in tied)
    local, jobs = _jobs(moved, src, dst)
    stages = _cheapest(moved, local, jobs, places, options)
    plan = ReshardPlan(src, dst, stages, places, options, tied)
    return plan if cache is None else cache.keep(plan)


def _problems(src: Mapping[str, Layout], dst: Mapping[str, Layout]) -> list[Problem]:
    problems = [Problem(key, "missing", "has no destination") for key in sorted({*src} - {*dst})]
    problems += [Problem(key, "missing", "has no source") for key in sorted({*dst} - {*src})]
    for key in sorted({*src} & {*dst}):
        if src[key].shape != dst[key].shape:
            text = f"the source has shape {src[key].shape}, the destination {dst[key].shape}"
            problems.append(Problem(key, "shape", text))
        if src[key].dtype != dst[key].dtype:
            text = f"the source is {src[key].dtype}, the destination {dst[key].dtype}"
            problems.append(Problem(key, "dtype", text))
    return problems


def _alias_problems(
    aliases: Mapping[str, str], src: Mapping[str, Layout], dst: Mapping[str, Layout]
) -> list[Problem]:
    problems = []
    for key, other in aliases.items():
        if key not in src or other not in src:
            problems.append(Problem(key, "alias", f"it or {other!r} is not among the tensors"))
        elif other in aliases:
            problems.append(Problem(key, "alias", f"{other!r} is an alias itself"))
        elif src[key] != src[other] or dst[key] != dst[other]:
            problems.append(Problem(key, "alias", f"its layouts differ from those of {other!r}"))
    return problems


def _jobs(
    keys: Sequence[str], src: Mapping[str, Layout], dst: Mapping[str, Layout]
) -> tuple[Moves, list[Job]]:
    """What ranks have already, as copies to themselves; and what must come from others."""
    maker = CellMaker()
    local = Moves()
    jobs: list[Job] = []
    for number, key in enumerate(keys):
        size = itemsize(src[key].dtype)
        for cell in maker.cells_of(key, src[key], dst[key]):
            nbytes = cell.numel * size
            if cell.kept:
                local.add(number, cell.region, nbytes, cell.kept, cell.kept)
            if cell.missing:
                jobs.append(Job(number, cell.region, nbytes, cell.holders, cell.missing))
    return local, jobs


def _cheapest(
    keys: Sequence[str],
    local: Moves,
    jobs: list[Job],
    nodes: Mapping[int, int],
    options: Options,
) -> tuple[Plan, ...]:
    """The stages under the fan-out asked for, or under the one that costs least."""
    if options.fan_out != "auto":
        best = choose_sources(jobs, options, nodes=nodes, fan_out=options.fan_out)
    else:
        best = choose_sources(jobs, options, nodes=nodes, fan_out="direct")
        sent, received = best[0].busiest(nodes, options.node_cost)
        least = max(sent, received)
        others: list[FanOut] = ["stripe", "node"] if nodes else ["stripe"]
        # Nothing is quicker than what every receiver has to take in anyway.
        if sent <= received and not nodes:
            others = []
        if not any(len(job.receivers) > len(job.holders) for job in jobs):
            others = []
        for way in others:
            found = choose_sources(jobs, options, nodes=nodes, fan_out=way)
            cost = sum(max(moves.busiest(nodes, options.node_cost)) for moves in found)
            if cost < least:
                least, best = cost, found
    first, second = best
    stages = [Moves.joined(local, first).plan(keys)]
    if len(second):
        stages.append(second.plan(keys))
    return tuple(stages)


def _ranks_of(layouts: Iterable[Layout]) -> set[int]:
    return {rank for layout in layouts for rank in layout.ranks}
