"""Packs: small shards that go the same way, side by side in one flat tensor.

What an exchange costs per shard, it costs per pack then. A pack is memory beside the shards, so as
many go into packs as the budget allows; all ranks decide alike, from the plan alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from itertools import groupby
from typing import Final

import torch

from ckptx.part import Crossing
from ckptx.sharded import ShardId
from distcore.v1 import Region
from distcore.v1.runtime import Shard, scratch

SMALL_NBYTES: Final = 1 << 16
MIN_SHARDS: Final = 64
"""Below this number it is not worth it, and messages that name shards are the better."""


@dataclass(frozen=True, slots=True)
class Pack:
    """Shards with one loader and the same receivers; the larger their elements, the earlier.

    In this order each lies aligned, no byte is lost between them, and those of one dtype are
    split off in one call. `key` tells packs apart that differ in anything but the values.
    """

    key: str
    moves: tuple[Crossing, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, moves: Iterable[Crossing]) -> Pack:
        """The pack of some shards."""
        ordered = tuple(sorted(moves, key=_place_in_pack))
        form = cache(lambda dtype, shape: f" {dtype} {shape}")
        texts = [m.name + form(m.metadata.dtype, m.metadata.local_shape) for m in ordered]
        digest = blake2b("\n".join(texts).encode(), digest_size=16).hexdigest()
        sizes = tuple(move.nbytes for move in ordered)
        return cls(f"{len(ordered)} shards {digest}", ordered, sizes)

    @property
    def nbytes(self) -> int:
        """The bytes of all shards together."""
        return sum(self.sizes)

    @torch.no_grad()
    def fill(self, tensors: Mapping[ShardId, torch.Tensor], device: str) -> torch.Tensor:
        """A new flat tensor with the bytes of its shards."""
        pack = scratch(self.nbytes, device)
        views, memories, rest = self._paired(pack, tensors, device)
        if views:
            torch._foreach_copy_(views, memories)
        for view, tensor in rest:
            Shard.of(tensor, 0).box(_whole(tensor)).read_into(view.view(torch.uint8))
        return pack

    @torch.no_grad()
    def empty_into(
        self, pack: torch.Tensor, tensors: Mapping[ShardId, torch.Tensor], device: str
    ) -> None:
        """Copy the bytes of a flat tensor into its shards."""
        views, memories, rest = self._paired(pack, tensors, device)
        if views:
            torch._foreach_copy_(memories, views)
        for view, tensor in rest:
            Shard.of(tensor, 0).box(_whole(tensor)).write_from(view.view(torch.uint8))

    def _paired(
        self, pack: torch.Tensor, tensors: Mapping[ShardId, torch.Tensor], device: str
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], list[tuple[torch.Tensor, torch.Tensor]]]:
        """Parts of the pack, and the memory of their shards, element by element.

        Those that do not lie in order on the device, or not as plain memory, come last: the part,
        and the shard itself.
        """
        views: list[torch.Tensor] = []
        memories: list[torch.Tensor] = []
        rest: list[tuple[torch.Tensor, torch.Tensor]] = []
        begin = 0
        for kind, moves in groupby(self.moves, key=lambda move: _carrier(move.metadata.dtype)):
            run = [tensors[move.shard_id] for move in moves]
            counts = [tensor.numel() for tensor in run]
            end = begin + sum(counts) * kind.itemsize
            for view, tensor in zip(pack[begin:end].view(kind).split(counts), run, strict=True):
                if _lies_in_order(tensor, device):
                    flat = tensor.view(-1)
                    views.append(view)
                    memories.append(flat if flat.dtype == kind else flat.view(kind))
                else:
                    rest.append((view, tensor))
            begin = end
        return views, memories, rest


def pack_small(
    crossing: Sequence[Crossing], apart: Iterable[str], budget_nbytes: int
) -> tuple[list[Pack], tuple[Crossing, ...]]:
    """Packs of the small shards, and the shards that go on their own.

    Those with a name in `apart` do, and those beyond the budget.
    """
    apart, held = set(apart), 0
    ways: dict[tuple[int, tuple[int, ...]], list[Crossing]] = {}
    rest = []
    for move in crossing:
        if 0 < move.nbytes <= min(SMALL_NBYTES, budget_nbytes - held) and move.name not in apart:
            ways.setdefault((move.main, move.others), []).append(move)
            held += move.nbytes
        else:
            rest.append(move)
    if len(crossing) - len(rest) < MIN_SHARDS:
        return [], tuple(crossing)
    return [Pack.of(moves) for moves in ways.values()], tuple(rest)


def _carrier(dtype: torch.dtype) -> torch.dtype:
    """The dtype as which elements are copied: torch cannot copy every kind of single bytes."""
    return torch.uint8 if dtype.itemsize == 1 else dtype


def _place_in_pack(move: Crossing) -> tuple[int, str]:
    dtype = _carrier(move.metadata.dtype)
    return -dtype.itemsize, str(dtype)


def _lies_in_order(tensor: torch.Tensor, device: str) -> bool:
    if not (tensor.is_cpu and device == "cpu"):
        return False
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _whole(tensor: torch.Tensor) -> Region:
    return Region.of_shape(tuple(tensor.shape))
