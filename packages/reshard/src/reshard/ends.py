"""Ends: one rank's tensors as the plan sees them, and what is done to them around each run.

Most tensors are sent and received where they lie. A buffer stands between where a tensor is
converted, has a hook, is reduced, or shares memory with a destination that would overwrite it.
All buffers are made once, here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from distcore.v1 import Layout, PlanError, Problem
from distcore.v1.runtime import Shard, torch_dtype
from reshard.hooks import After, Before, Hook
from reshard.memory import is_same, shared
from reshard.partial import Reduction, Slab, summand_key
from reshard.placed import Own
from reshard.plan import ReshardPlan


@dataclass(slots=True)
class Ends:
    """What one rank sends from and receives into.

    `summands` and `reductions` are for partial sources: the first are sent, the second receive.
    `before` and `after` are what is done around each run, in order.
    """

    rank: int
    sources: dict[str, Shard] = field(default_factory=dict)
    destinations: dict[str, Shard] = field(default_factory=dict)
    summands: dict[str, Shard] = field(default_factory=dict)
    reductions: dict[str, Reduction] = field(default_factory=dict)
    before: list[Callable[[], None]] = field(default_factory=list)
    after: list[Callable[[], None]] = field(default_factory=list)
    kept_nbytes: int = 0

    @classmethod
    def of(
        cls,
        plan: ReshardPlan,
        own: tuple[Mapping[str, Own], Mapping[str, Own]],
        *,
        slabs: Mapping[str, Mapping[int, Slab]],
        hooks: Mapping[str, Hook],
        rank: int,
    ) -> Ends:
        """Bind the tensors of `rank` to a plan; PlanError lists what cannot be bound."""
        ends = cls(rank)
        src = {key: one for key, one in own[0].items() if key not in plan.aliases}
        dst = {key: one for key, one in own[1].items() if key not in plan.aliases}
        problems = [
            Problem(key, "hook", "no tensor of this name is moved")
            for key in sorted(hooks.keys() - (plan.src.keys() - plan.aliases.keys()))
        ]
        problems += list(_clashes(dst))
        if problems:
            raise PlanError(problems)
        endangered = set(_endangered(plan, src, dst, rank))
        for key, one in src.items():
            hook = hooks.get(key, Hook())
            if key in slabs:
                ends._reduce(key, one, slabs[key], plan.src[key], hook.before)
            else:
                ends._send(key, one, plan.src[key], hook.before, apart=key in endangered)
        for key, one in dst.items():
            ends._receive(key, one, plan.dst[key], hooks.get(key, Hook()).after)
        return ends

    def _send(
        self, key: str, own: Own, layout: Layout, before: Before | None, *, apart: bool
    ) -> None:
        data = own.data
        if before is not None or apart or layout.dtype != own.dtype:
            data = self._buffer(data, layout.dtype)
            self.before.append(_filler(data, own.data, before, key))
        self.sources[key] = Shard(data, layout.pieces(self.rank))

    def _receive(self, key: str, own: Own, layout: Layout, after: After | None) -> None:
        data = own.data
        if after is not None or layout.dtype != own.dtype:
            data = self._buffer(data, layout.dtype)
            self.after.append(_writer(own.data, data, after))
        self.destinations[key] = Shard(data, layout.pieces(self.rank))

    def _reduce(
        self,
        key: str,
        own: Own,
        slabs: Mapping[int, Slab],
        layout: Layout,
        before: Before | None,
    ) -> None:
        data = own.data
        if before is not None:
            data = self._buffer(data, own.dtype)
            self.before.append(_filler(data, own.data, before, key))
        if own.layout is not None:
            pieces = own.layout.pieces(self.rank)
            self.summands[summand_key(key, self.rank)] = Shard(data, pieces)
        slab = slabs.get(self.rank)
        if slab is not None:
            reduction = Reduction.of(slab, data, own.op, layout.dtype, self.rank)
            self.reductions[key] = reduction
            self.kept_nbytes += reduction.nbytes
            self.sources[key] = Shard(reduction.result, slab.pieces)
        elif self.rank in layout.ranks:  # a tensor without elements
            self.sources[key] = Shard(
                data.new_empty((0,) * len(layout.shape), dtype=torch_dtype(layout.dtype)),
                layout.pieces(self.rank),
            )

    def _buffer(self, like: torch.Tensor, dtype: str) -> torch.Tensor:
        made = torch.empty(like.shape, dtype=torch_dtype(dtype), device=like.device)
        self.kept_nbytes += made.numel() * made.element_size()
        return made


def _filler(
    buffer: torch.Tensor, local: torch.Tensor, before: Before | None, key: str
) -> Callable[[], None]:
    def fill() -> None:
        with torch.no_grad():
            sent = local if before is None else before(local)
            if sent.shape != buffer.shape:
                text = f"expected shape {tuple(buffer.shape)}, got {tuple(sent.shape)}"
                raise PlanError(Problem(key, "hook", text))
            buffer.copy_(sent)

    return fill


def _writer(local: torch.Tensor, buffer: torch.Tensor, after: After | None) -> Callable[[], None]:
    def write() -> None:
        with torch.no_grad():
            if after is None:
                local.copy_(buffer)
            else:
                after(buffer, local)

    return write


def _clashes(dst: Mapping[str, Own]) -> Iterator[Problem]:
    """Destinations that share memory without being tied: which of them should be left?"""
    data = {key: own.data for key, own in dst.items()}
    for one, other in shared(data, data):
        if one < other:
            text = f"this destination and {other!r} share memory, but are not the same tensor"
            yield Problem(one, "alias", text)


def _endangered(
    plan: ReshardPlan, src: Mapping[str, Own], dst: Mapping[str, Own], rank: int
) -> Iterator[str]:
    """The sources that share memory with a destination that would be written over them."""
    pairs = shared(
        {key: own.data for key, own in src.items()}, {key: own.data for key, own in dst.items()}
    )
    for one, other in pairs:
        stays = (
            one == other
            and is_same(src[one].data, dst[other].data)
            and plan.src[one].pieces(rank) == plan.dst[one].pieces(rank)
        )
        if not stays:
            yield one
