"""Packing: the flat buffers in which shards go to their owners, and results come back.

Everything is counted in elements, and flat. Nothing is sent from a rank to itself. Buffers hold
the parts of their tensors in index order, without gaps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Self

import torch

from distcore.v1 import PlanError, Problem
from ownerplan.layout import GlobalLayout, Holders
from ownerplan.owner_layout import GroupOwnerLayout
from ownerplan.ranges import Range, intersect_ranges


@dataclass(frozen=True)
class OwnerGatherPlan:
    """What one rank sends to owners, and what it receives as an owner.

    - `rank_ranges`: global rank -> what it holds of the buffer, in buffer order.
    - `this_rank`: the global rank that this plan is for.
    - `send_buffers`: owner -> one flat tensor with this rank's shards of that owner's tensors.
      Only owners that get something appear.
    - `recv_sizes`: source rank -> elements that this rank receives. Only sources that send appear.
    - `own_shards`: owned tensor -> this rank's flat shard of it, which does not travel; it is a
      view where the shard is contiguous, and empty where this rank holds none of the tensor.
    - `recv_offsets`: (tensor, source rank) -> where that part starts in the received buffer. Only
      parts that are not empty appear.
    """

    layout: GlobalLayout
    rank_ranges: dict[int, Range]
    this_rank: int
    send_buffers: dict[int, torch.Tensor]
    recv_sizes: dict[int, int]
    own_shards: dict[int, torch.Tensor]
    recv_offsets: dict[tuple[int, int], int]

    @classmethod
    def pack(cls, owner_layout: GroupOwnerLayout, local_shards: Mapping[int, torch.Tensor]) -> Self:
        """Copy this rank's shards into one buffer per owner.

        `local_shards` has, for every participating tensor that this rank holds some of, the
        shard, in any shape and any memory order; more is allowed. All have one dtype and device.

        Raises:
            KeyError: a tensor that this rank holds some of is missing; it names the index.
            PlanError: a shard has another number of elements than the rank holds; shards of
                different dtypes or devices; a process that is not in the mesh.
        """
        layout, ranges = owner_layout.layout, owner_layout.layout.get_rank_ranges(owner_layout.mesh)
        this_rank = _check_rank(owner_layout.mesh.get_rank(), ranges)
        like = _check_alike("shard", local_shards)
        holders = Holders(ranges)
        sends = _Buffers()
        receives = _Places()
        own: dict[int, torch.Tensor] = {}
        for index, owner in sorted(owner_layout.tensor_to_owner.items()):
            run = layout.get_tensor_range(index)
            held = intersect_ranges(run, ranges[this_rank]).numel
            if held or index in local_shards:
                shard = _flat("shard", index, local_shards, held)
            else:
                shard = torch.empty(0) if like is None else like.new_empty(0)
            if owner == this_rank:
                own[index] = shard
                for rank, part in holders.of(run):
                    if rank != this_rank:
                        receives.add(index, rank, part.numel)
            elif held:
                sends.add(owner, shard)
        return cls(
            layout=layout,
            rank_ranges=ranges,
            this_rank=this_rank,
            send_buffers=sends.join(),
            recv_sizes=receives.sizes,
            own_shards=own,
            recv_offsets=receives.offsets,
        )

    def reconstruct_full(
        self,
        param_index: int,
        recv_buffers: Mapping[int, torch.Tensor],
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Put an owned tensor together from its shards, in buffer order; the result is flat.

        Where this rank holds the whole tensor the result is the own shard itself, so writing to it
        writes to the memory that was packed. With `out`, a contiguous tensor with as many elements
        and never part of the packed memory, the result is always written there; `out` is returned.

        Raises:
            KeyError: the tensor is not owned by this rank, or nothing came from a source.
            PlanError: a received buffer or `out` has the wrong number of elements.
        """
        if param_index not in self.own_shards:
            raise KeyError(f"tensor {param_index} is not owned by rank {self.this_rank}")
        parts = list(self._parts(param_index, recv_buffers))
        if out is not None:
            numel = prod(self.layout.tensor_shapes[param_index])
            if out.numel() != numel or not out.is_contiguous():
                text = f"out must be contiguous and have {numel} elements, not {out.numel()}"
                raise PlanError(Problem(f"tensor {param_index}", "numel", text))
            torch.cat(parts or [out.new_empty(0)], out=out.view(-1))
            return out
        own = self.own_shards[param_index]
        if not parts or (len(parts) == 1 and parts[0] is own):
            return own
        return torch.cat(parts)

    def _parts(
        self, index: int, recv_buffers: Mapping[int, torch.Tensor]
    ) -> Iterator[torch.Tensor]:
        run = self.layout.get_tensor_range(index)
        for rank, held in self.rank_ranges.items():
            numel = intersect_ranges(run, held).numel
            if numel and rank == self.this_rank:
                yield self.own_shards[index]
            elif numel:
                buffer = _received(recv_buffers, rank, self.recv_sizes[rank])
                yield buffer.narrow(0, self.recv_offsets[index, rank], numel)


@dataclass(frozen=True)
class OwnerScatterPlan:
    """What one rank sends of its results, and what it receives of the others'.

    - `local_range`: what this rank holds of the buffer.
    - `send_buffers`: rank -> one flat tensor with its parts of the results of this owner. Only
      ranks that get something appear.
    - `recv_sizes`: owner -> elements that this rank receives. Only owners that send appear.
    - `recv_offsets`: (tensor, owner) -> where this rank's part starts in the received buffer. Only
      parts that are not empty appear.
    """

    layout: GlobalLayout
    local_range: Range
    send_buffers: dict[int, torch.Tensor]
    recv_sizes: dict[int, int]
    recv_offsets: dict[tuple[int, int], int]

    @classmethod
    def pack(cls, owner_layout: GroupOwnerLayout, full_results: Mapping[int, torch.Tensor]) -> Self:
        """Copy the parts of this owner's results into one buffer per rank that holds some.

        `full_results` has the full result of every tensor that this rank owns, in any shape; of
        those without elements none is needed, and results of other owners are left alone.

        Raises:
            KeyError: the result of an owned tensor is missing; it names the index.
            PlanError: a result has another number of elements than the tensor; results of
                different dtypes or devices; a process that is not in the mesh.
        """
        layout, ranges = owner_layout.layout, owner_layout.layout.get_rank_ranges(owner_layout.mesh)
        this_rank = _check_rank(owner_layout.mesh.get_rank(), ranges)
        owners = sorted(owner_layout.tensor_to_owner.items())
        owned = {index for index, owner in owners if owner == this_rank}
        _check_alike("result", {at: full_results[at] for at in full_results if at in owned})
        holders = Holders(ranges)
        sends = _Buffers()
        receives = _Places()
        for index, owner in owners:
            run = layout.get_tensor_range(index)
            if owner == this_rank and run.numel:
                full = _flat("result", index, full_results, run.numel)
                for rank, part in holders.of(run):
                    if rank != this_rank:
                        sends.add(rank, full.narrow(0, part.start - run.start, part.numel))
            elif held := intersect_ranges(run, ranges[this_rank]).numel:
                receives.add(index, owner, held)
        return cls(
            layout=layout,
            local_range=ranges[this_rank],
            send_buffers=sends.join(),
            recv_sizes=receives.sizes,
            recv_offsets=receives.offsets,
        )

    def unpack(self, recv_buffers: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """This rank's flat shards of the results of others: tensor index -> view of a buffer.

        Only tensors that this rank holds some of and does not own appear; `own_result` has the
        rest. KeyError where nothing came from an owner, ValueError for a buffer of a wrong size.
        """
        return {
            index: _received(recv_buffers, owner, self.recv_sizes[owner]).narrow(
                0, start, self._held(index).numel
            )
            for (index, owner), start in self.recv_offsets.items()
        }

    def own_result(self, param_index: int, full_result: torch.Tensor) -> torch.Tensor:
        """This rank's flat shard of a full result that it has itself: a view where possible."""
        run, held = self.layout.get_tensor_range(param_index), self._held(param_index)
        full = _flat("result", param_index, {param_index: full_result}, run.numel)
        return full.narrow(0, held.start - run.start if held.numel else 0, held.numel)

    def _held(self, index: int) -> Range:
        return intersect_ranges(self.layout.get_tensor_range(index), self.local_range)


class _Buffers:
    """Flat tensors on their way, by rank."""

    def __init__(self) -> None:
        self._parts: dict[int, list[torch.Tensor]] = {}

    def add(self, rank: int, part: torch.Tensor) -> None:
        self._parts.setdefault(rank, []).append(part)

    def join(self) -> dict[int, torch.Tensor]:
        return {rank: torch.cat(parts) for rank, parts in self._parts.items()}


class _Places:
    """Where parts lie in the buffers that come in."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self.offsets: dict[tuple[int, int], int] = {}

    def add(self, index: int, rank: int, numel: int) -> None:
        self.offsets[index, rank] = self.sizes.get(rank, 0)
        self.sizes[rank] = self.offsets[index, rank] + numel


def _check_rank(rank: int, ranges: Iterable[int]) -> int:
    if rank not in ranges:
        text = f"this process is not in the mesh of the ranks {sorted(ranges)}"
        raise PlanError(Problem(f"rank {rank}", "rank", text))
    return rank


def _check_alike(what: str, tensors: Mapping[int, torch.Tensor]) -> torch.Tensor | None:
    """The first tensor, after a check that all have its dtype and device."""
    first: torch.Tensor | None = None
    for index, tensor in tensors.items():
        first = tensor if first is None else first
        if (tensor.dtype, tensor.device) != (first.dtype, first.device):
            text = (
                f"its {what} is {tensor.dtype} on {tensor.device}, the first one is "
                f"{first.dtype} on {first.device}"
            )
            raise PlanError(Problem(f"tensor {index}", "dtype", text))
    return first


def _flat(what: str, index: int, tensors: Mapping[int, torch.Tensor], numel: int) -> torch.Tensor:
    if index not in tensors:
        raise KeyError(f"tensor {index} has {numel} elements here, but its {what} is missing")
    tensor = tensors[index]
    if tensor.numel() != numel:
        text = f"its {what} of shape {tuple(tensor.shape)} must have {numel} elements"
        raise PlanError(Problem(f"tensor {index}", "numel", text))
    return tensor.detach().reshape(-1)


def _received(buffers: Mapping[int, torch.Tensor], rank: int, numel: int) -> torch.Tensor:
    if rank not in buffers:
        raise KeyError(f"no buffer came from rank {rank}; {numel} elements were expected")
    buffer = buffers[rank].reshape(-1)
    if buffer.numel() != numel:
        text = f"its buffer has {buffer.numel()} elements, not {numel}"
        raise PlanError(Problem(f"rank {rank}", "numel", text))
    return buffer
