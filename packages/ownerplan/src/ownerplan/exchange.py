"""Exchange: the memory through which matrices travel, and the two ways through it.

A rank's parts of a matrix are its *wires*: contiguous copies in the dtype that travels. The owner
has the *whole*. The way there goes from the wires of all holders to the whole, the way back from
the whole to the wires, through the same memory. Buckets share a few slots of it in turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch

from distcore.v1 import Channel, Piece, Plan, Region
from distcore.v1.runtime import ExecuteReport, Executor, Shard
from ownerplan.matrix_view import Matrix
from ownerplan.routes import LocalBox, Route, plan_gather, plan_scatter

Shards: TypeAlias = Mapping[str, Shard]

WIRE_DTYPE: Final = torch.bfloat16
"""Newton-Schulz begins with a cast to this dtype, so casting before the way changes nothing."""

_ALIGNMENT: Final = 32  # elements: what is copied fast begins at a multiple of 64 bytes
_MIN_STAGING_NBYTES: Final = 1 << 16
_STAGING_SHARE: Final = 4  # all staging together takes at most a quarter of the slots' budget


@dataclass(frozen=True, slots=True)
class Task:
    """One matrix to be stepped: whose it is, how it travels, and what this rank holds of it."""

    member: int
    matrix: Matrix
    route: Route
    local: LocalBox | None

    @property
    def key(self) -> str:
        """The name of the matrix in the plans."""
        return self.route.key

    @property
    def wire_region(self) -> Region | None:
        """The box of this rank's local tensor that is part of the matrix, if any is."""
        return None if self.local is None else self.local.box

    def whole_region(self, rank: int) -> Region | None:
        """The matrix where `rank` owns it, else nothing."""
        return self.route.region if self.route.owner == rank else None


@dataclass(frozen=True, slots=True)
class Bucket:
    """Matrices that travel together, bound to the memory of one slot.

    `wires` has a tensor for each matrix that this rank holds some of, `wholes` one for each that
    it owns, both in the shape of the parameter's box.
    """

    tasks: tuple[Task, ...]
    slot: int
    wires: dict[str, torch.Tensor]
    wholes: dict[str, torch.Tensor]
    there: Executor
    back: Executor

    def gather(self, failure: BaseException | None, timeout_s: float | None) -> ExecuteReport:
        """Bring the wires to their owners. Collective."""
        return self.there.run(failure=failure, timeout_s=timeout_s)

    def scatter(self, failure: BaseException | None, timeout_s: float | None) -> ExecuteReport:
        """Bring the wholes back to the wires. Collective."""
        return self.back.run(failure=failure, timeout_s=timeout_s)


@dataclass(frozen=True, slots=True)
class ExchangeOptions:
    """How much memory exchanges may take: so many slots, each of so many bytes on any rank."""

    bucket_bytes: int
    slots: int
    timeout_s: float | None = None

    def staging_nbytes(self, buckets: int) -> int:
        """What one executor may stage where two per bucket share it."""
        budget = self.bucket_bytes * self.slots // _STAGING_SHARE
        return max(_MIN_STAGING_NBYTES, budget // max(1, 2 * buckets))


class Exchange:
    """All buckets of a team, their executors prepared once. Making one is collective."""

    def __init__(
        self,
        buckets: Sequence[Sequence[Task]],
        channel: Channel,
        device: torch.device,
        options: ExchangeOptions,
    ) -> None:
        needed = [0] * options.slots
        for at, tasks in enumerate(buckets):
            slot = at % options.slots
            needed[slot] = max(needed[slot], _numel(tasks, channel.rank))
        self._slots = [torch.zeros(numel, dtype=WIRE_DTYPE, device=device) for numel in needed]
        self._channel = channel
        self._timeout_s = options.timeout_s
        self._staging_nbytes = options.staging_nbytes(len(buckets))
        self.buckets = tuple(
            self._bind(tuple(tasks), at % options.slots) for at, tasks in enumerate(buckets)
        )

    @property
    def slots_nbytes(self) -> int:
        """The memory of the slots, staging not counted."""
        return sum(slot.nbytes for slot in self._slots)

    def close(self) -> None:
        """Free the staging memory. Local."""
        for bucket in self.buckets:
            bucket.there.close()
            bucket.back.close()

    def _bind(self, tasks: tuple[Task, ...], slot: int) -> Bucket:
        rank, rest = self._channel.rank, self._slots[slot]
        wires: dict[str, torch.Tensor] = {}
        wholes: dict[str, torch.Tensor] = {}
        for task in tasks:
            for held, region in ((wires, task.wire_region), (wholes, task.whole_region(rank))):
                if region is not None:
                    held[task.key] = rest[: region.numel].view(region.shape)
                    rest = rest[_aligned(region.numel) :]
        parts = {
            task.key: Shard(wires[task.key], task.local.pieces)
            for task in tasks
            if task.local is not None
        }
        whole = {
            task.key: Shard(wholes[task.key], (_whole_piece(task.route.region),))
            for task in tasks
            if task.key in wholes
        }
        routes = [task.route for task in tasks]
        there = self._executor(plan_gather(routes), parts, whole)
        back = self._executor(plan_scatter(routes), whole, parts)
        return Bucket(tasks, slot, wires, wholes, there=there, back=back)

    def _executor(self, plan: Plan, sources: Shards, destinations: Shards) -> Executor:
        return Executor(
            plan,
            self._channel,
            sources,
            destinations,
            max_staging_bytes=self._staging_nbytes,
            timeout_s=self._timeout_s,
        )


def slot_nbytes(task: Task, rank: int) -> int:
    """What a matrix takes of a slot on a rank: its wires there, and the whole at its owner."""
    numel = _aligned(task.route.held_by(rank))
    if task.route.owner == rank:
        numel += _aligned(task.route.region.numel)
    return numel * WIRE_DTYPE.itemsize


def _aligned(numel: int) -> int:
    return -(-numel // _ALIGNMENT) * _ALIGNMENT


def _numel(tasks: Sequence[Task], rank: int) -> int:
    return sum(slot_nbytes(task, rank) for task in tasks) // WIRE_DTYPE.itemsize


def _whole_piece(region: Region) -> Piece:
    return Piece(region, (0,) * region.ndim)
