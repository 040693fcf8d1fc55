"""Owner exchange: shards travel to their owners and results travel back, for many groups at once.

The way there is one Plan, and the way back is its inverse. Groups share the messages between two
ranks, so many small groups take no more of them than one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from functools import cached_property
from typing import Literal

import torch

from distcore.v1 import Piece, Plan, PlanError, Problem, Region, Transfer
from distcore.v1.runtime import ExecuteReport, Group, Shard, channel_over, execute, run_together
from ownerplan.layout import Holders
from ownerplan.owner_layout import GroupOwnerLayout

Tensors = Sequence[Mapping[int, torch.Tensor]]
"""Per group, tensor index -> tensor."""

DEFAULT_STAGING_NBYTES = 64 << 20


class OwnerExchange:
    """The exchange of some groups, whose layouts are the same on every rank.

    `gather` and `scatter` are collective over all ranks of the process group, also those that
    send and receive nothing; their errors reach all ranks.
    """

    def __init__(self, owner_layouts: Sequence[GroupOwnerLayout]) -> None:
        """Take the layouts; local, and nothing is planned yet."""
        self._layouts = tuple(owner_layouts)

    @cached_property
    def plan(self) -> Plan:
        """The way to the owners; `plan.inverse()` is the way back.

        Keys are "group.tensor", and Regions count the elements of the flat tensor. What lies on its
        owner is a transfer from that rank to itself.
        """
        transfers = []
        for key, group, index in self._entries():
            for rank, (low, high) in self._parts(group, index):
                owner = self._layouts[group].tensor_to_owner[index]
                transfers.append(Transfer(key, rank, owner, Region((low,), (high,))))
        return Plan(transfers)

    def gather(
        self,
        local_shards: Tensors,
        full: Tensors,
        group: Group | None = None,
        *,
        max_staging_bytes: int = DEFAULT_STAGING_NBYTES,
        verify: Literal["xxh3"] | None = None,
        timeout: float | timedelta | None = None,
    ) -> ExecuteReport:
        """Bring every participating tensor together in the memory of its owner.

        `local_shards` has, per group, a shard of every participating tensor that this rank holds
        some of; `full` a tensor with room for each that it owns, which is written. Any shapes will
        do, but not strides that cannot be viewed flat; more entries are left alone.

        Raises what `distcore.v1.runtime.execute` raises, and PeerError on every rank where a
        tensor is missing or has a wrong number of elements on one.
        """
        with channel_over(group) as channel:
            sides = run_together(
                "owner gather",
                lambda: self._bind(channel.rank, local_shards, full),
                channel,
                timeout_s=_seconds(timeout),
            )
            return execute(
                self.plan,
                channel,
                *sides,
                max_staging_bytes=max_staging_bytes,
                verify=verify,
                timeout=timeout,
            )

    def scatter(
        self,
        full: Tensors,
        local_shards: Tensors,
        group: Group | None = None,
        *,
        max_staging_bytes: int = DEFAULT_STAGING_NBYTES,
        verify: Literal["xxh3"] | None = None,
        timeout: float | timedelta | None = None,
    ) -> ExecuteReport:
        """Bring every owner's result into the shards of all that hold some of it.

        As `gather`, the other way: `full` is read, and `local_shards` are written in place, those
        of the owner itself too.
        """
        with channel_over(group) as channel:
            shards, wholes = run_together(
                "owner scatter",
                lambda: self._bind(channel.rank, local_shards, full),
                channel,
                timeout_s=_seconds(timeout),
            )
            return execute(
                self.plan.inverse(),
                channel,
                wholes,
                shards,
                max_staging_bytes=max_staging_bytes,
                verify=verify,
                timeout=timeout,
            )

    def _entries(self) -> Iterator[tuple[str, int, int]]:
        """Key, group and index of every participating tensor."""
        for group, layout in enumerate(self._layouts):
            for index in sorted(layout.tensor_to_owner):
                yield f"{group}.{index}", group, index

    def _parts(self, group: int, index: int) -> Iterator[tuple[int, tuple[int, int]]]:
        """Who holds which elements of a tensor, in buffer order."""
        run = self._layouts[group].layout.get_tensor_range(index)
        for rank, part in self._holders[group].of(run):
            yield rank, (part.start - run.start, part.end - run.start)

    @cached_property
    def _holders(self) -> list[Holders]:
        return [Holders(one.layout.get_rank_ranges(one.mesh)) for one in self._layouts]

    def _bind(
        self, rank: int, local_shards: Tensors, full: Tensors
    ) -> tuple[dict[str, Shard], dict[str, Shard]]:
        """This rank's shards and whole tensors by key."""
        problems = [
            Problem(what, "length", f"{len(given)} groups are given, {len(self._layouts)} planned")
            for what, given in (("local_shards", local_shards), ("full", full))
            if len(given) != len(self._layouts)
        ]
        if problems:
            raise PlanError(problems)
        shards, wholes = {}, {}
        for key, group, index in self._entries():
            owner = self._layouts[group].tensor_to_owner[index]
            numel = self._layouts[group].layout.get_tensor_range(index).numel
            for holder, run in self._parts(group, index):
                if holder == rank:
                    shards[key] = _flat("shard", key, local_shards[group].get(index), run)
            if owner == rank and numel:
                wholes[key] = _flat("tensor", key, full[group].get(index), (0, numel))
        return shards, wholes


def _flat(what: str, key: str, tensor: torch.Tensor | None, run: tuple[int, int]) -> Shard:
    """The elements `run` of a flat tensor, where they are."""
    low, high = run
    if tensor is None:
        raise PlanError(Problem(key, "missing", f"its {what} of {high - low} elements is missing"))
    if tensor.numel() != high - low:
        text = f"its {what} of shape {tuple(tensor.shape)} must have {high - low} elements"
        raise PlanError(Problem(key, "numel", text))
    try:
        flat = tensor.detach().view(-1)
    except RuntimeError as error:
        text = f"its {what} with strides {tensor.stride()} cannot be viewed flat"
        raise PlanError(Problem(key, "strides", text)) from error
    return Shard(flat, (Piece(Region((low,), (high,)), (0,)),))


def _seconds(timeout: float | timedelta | None) -> float | None:
    return timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
