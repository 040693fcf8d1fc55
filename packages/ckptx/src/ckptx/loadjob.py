"""LoadJob: what one rank has to do in a load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch

from ckptx.checkpoint import Checkpoint, Source, open_checkpoint
from ckptx.consensus import agree_on_layouts
from ckptx.destination import layouts_here, shard_of, unfilled
from ckptx.errors import CheckpointPlanError
from ckptx.leaves import Leaves, StateDict, leaves_of
from ckptx.plan import MAX_STAGED_NBYTES, LoadPlan, check, plan_load
from ckptx.ways import Ways
from distcore.v1 import Channel, Layout, Problem, itemsize
from distcore.v1.runtime import Shard, torch_dtype

Mode: TypeAlias = Literal["auto", "exchange", "direct"]
Cast: TypeAlias = Literal["never", "allow"]

_NEAR = 1.05


@dataclass(frozen=True, slots=True)
class Batch:
    """Keys that are loaded together; `is_cast` where they go through memory of another dtype.

    `plan` is the group's, or where each rank reads for itself, this rank's alone.
    """

    keys: tuple[str, ...]
    plan: LoadPlan
    is_cast: bool


@dataclass(slots=True)
class LoadJob:
    """What one rank has to do: checked on that rank alone, then planned with the others.

    `wanted` are the values to be replaced. `batches` are carried out one after the other.
    """

    checkpoint: Checkpoint
    leaves: Leaves
    tensors: Mapping[str, torch.Tensor]
    layouts: dict[str, Layout]
    given: Mapping[str, Layout]
    wanted: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    is_direct: bool = False
    batches: list[Batch] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        state_dict: StateDict,
        path: Source,
        channel: Channel,
        *,
        strict: bool,
        cast: Cast,
        given: Mapping[str, Layout],
    ) -> LoadJob:
        """Open and describe; raises CheckpointPlanError with everything that does not fit."""
        checkpoint = open_checkpoint(path)
        leaves = leaves_of(state_dict)
        problems = unfilled(leaves.tensors)
        if problems:
            raise CheckpointPlanError(problems)
        layouts = layouts_here(leaves.tensors, given, channel.rank, channel.ranks)
        keys = [*leaves.tensors, *leaves.values]
        missing = tuple(key for key in keys if key not in checkpoint)
        unexpected = tuple(key for key in checkpoint if key not in leaves.paths)
        problems = list(_misfits(leaves, layouts, checkpoint, cast))
        if strict:
            text = f"not in the checkpoint {checkpoint.name}"
            problems += [Problem(key, "missing", text) for key in missing]
            text = f"in the checkpoint {checkpoint.name}, but not in the state dict"
            problems += [Problem(key, "unexpected", text) for key in unexpected]
        if problems:
            raise CheckpointPlanError(sorted(problems, key=lambda problem: problem.where))
        found = [key for key in leaves.tensors if key in checkpoint.tensors]
        return cls(
            checkpoint=checkpoint,
            leaves=leaves,
            tensors={key: leaves.tensors[key] for key in found},
            layouts={key: layouts[key] for key in found},
            given={key: given[key] for key in found if key in given},
            wanted=tuple(key for key in leaves.values if key in checkpoint.objects),
            missing=missing,
            unexpected=unexpected,
        )

    def plan(self, ways: Ways, mode: Mode) -> None:
        """Agree with the other ranks, and plan. Collective; proves that everything is stored."""
        terms: dict[str, str | int] = {f"value {key}": "" for key in self.wanted}
        terms["<files>"] = self.checkpoint.digest
        terms["<max_staging_bytes>"] = ways.max_staging_bytes
        terms["<mode>"] = mode
        terms["<verify>"] = f"{ways.verify} {self.checkpoint.integrity is not None}"
        self.layouts = agree_on_layouts(
            terms,
            self.layouts,
            self.tensors,
            ways.channel,
            given=self.given,
            timeout_s=ways.timeout_s,
        )
        ways.together("plan the load", lambda: self._planned(ways, mode))

    def _planned(self, ways: Ways, mode: Mode) -> None:
        staged = min(ways.max_staging_bytes // 2, MAX_STAGED_NBYTES)
        ranks = ways.channel.ranks
        stored = self.checkpoint.tensors
        groups = list(self._groups(ways))
        plans = [plan_load(need, stored, ranks, max_staged=staged) for _, need in groups]
        self.is_direct = mode == "direct" or (mode == "auto" and _reads_little_twice(plans))
        if self.is_direct:
            alone = (ways.channel.rank,)
            own = [plan_load(need, stored, alone, max_staged=staged) for _, need in groups]
            plans = [_alone(plan, group) for plan, group in zip(own, plans, strict=True)]
        self.batches = [
            Batch(tuple(need), plan, is_cast)
            for (is_cast, need), plan in zip(groups, plans, strict=True)
        ]

    def _groups(self, ways: Ways) -> Iterator[tuple[bool, dict[str, Layout]]]:
        """Keys that may be loaded together, with the layouts as they are stored."""
        plain: dict[str, Layout] = {}
        cast: dict[str, Layout] = {}
        for key, layout in self.layouts.items():
            stored = self.checkpoint.tensors[key].dtype
            if stored == layout.dtype:
                plain[key] = layout
            else:
                pieces = {rank: layout.pieces(rank) for rank in layout.ranks}
                cast[key] = Layout(shape=layout.shape, dtype=stored, pieces=pieces)
        yield False, plain
        batch: dict[str, Layout] = {}
        nbytes = 0
        for key, layout in cast.items():
            # All ranks make the same batches: by the largest part that one of them holds.
            most = max((_held(layout, rank) for rank in ways.channel.ranks), default=0)
            if batch and nbytes + most > ways.max_staging_bytes:
                yield True, batch
                batch, nbytes = {}, 0
            batch[key] = layout
            nbytes += most
        if batch:
            yield True, batch

    def places(self, batch: Batch, rank: int) -> dict[str, Shard]:
        """Where the tensors of a batch go: the caller's memory, or new memory to be cast from."""
        found = {}
        for key in batch.keys:
            own = shard_of(self.tensors[key], self.layouts[key], rank, given=key in self.given)
            if batch.is_cast:
                dtype = torch_dtype(self.checkpoint.tensors[key].dtype)
                memory = torch.empty(own.data.shape, dtype=dtype, device=own.data.device)
                own = Shard(memory, own.pieces)
            found[key] = own
        return found

    def cast(self, batch: Batch, places: Mapping[str, Shard], rank: int) -> None:
        """Take what was loaded into memory of another dtype to the caller's."""
        for key in batch.keys:
            own = shard_of(self.tensors[key], self.layouts[key], rank, given=key in self.given)
            own.data.copy_(places[key].data)


def _held(layout: Layout, rank: int) -> int:
    pieces = layout.pieces(rank) if rank in layout.ranks else ()
    return sum(piece.region.numel for piece in pieces) * itemsize(layout.dtype)


def _misfits(
    leaves: Leaves, layouts: Mapping[str, Layout], checkpoint: Checkpoint, cast: Cast
) -> Iterator[Problem]:
    for key in leaves.tensors:
        if key in checkpoint.objects:
            yield Problem(key, "type", "a tensor in the state dict, a value in the checkpoint")
        elif key in checkpoint.tensors:
            for problem in check(key, layouts[key], checkpoint.tensors[key]):
                if problem.kind != "dtype" or cast != "allow":
                    yield problem
    for key in leaves.values:
        if key in checkpoint.tensors:
            yield Problem(key, "type", "a value in the state dict, a tensor in the checkpoint")


def _reads_little_twice(plans: list[LoadPlan]) -> bool:
    """Whether reading alone costs little: what ranks need adds up to hardly more than is stored."""
    needed = sum(sum(plan.needed.values()) for plan in plans)
    return needed <= _NEAR * sum(plan.lower_bound_read for plan in plans)


def _alone(own: LoadPlan, group: LoadPlan) -> LoadPlan:
    """A plan of one rank for itself, beside the bounds of the group."""
    return LoadPlan(
        reads=own.reads,
        exchange=own.exchange,
        rounds=own.rounds,
        needed=group.needed,
        lower_bound_received=dict.fromkeys(group.needed, 0),
        lower_bound_read=group.lower_bound_read,
        lower_bound_slowest=group.lower_bound_slowest,
    )
