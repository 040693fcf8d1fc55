"""Packs: small shards that go the same way, side by side in one flat tensor.

What an exchange costs per shard, it costs per pack then. A pack is memory beside the shards, so as
many go into packs as the budget allows; all ranks decide alike, from the plan alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

import torch

from ckptx.part import Crossing
from ckptx.sharded import ShardId
from distcore.v1 import Region
from distcore.v1.runtime import Shard

SMALL_NBYTES: Final = 1 << 16
MIN_SHARDS: Final = 64
"""Below this number it is not worth it, and messages that name shards are the better."""


@dataclass(frozen=True, slots=True)
class Pack:
    """Shards with one loader and the same receivers; the larger their elements, the earlier.

    In this order each lies aligned, and no byte is lost between them. `key` tells packs apart
    that differ in anything but the values.
    """

    key: str
    moves: tuple[Crossing, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, moves: Iterable[Crossing]) -> Pack:
        """The pack of some shards."""
        ordered = tuple(sorted(moves, key=lambda move: -move.metadata.dtype.itemsize))
        texts = (f"{m.name} {m.metadata.dtype} {m.metadata.local_shape}" for m in ordered)
        digest = blake2b("\n".join(texts).encode(), digest_size=16).hexdigest()
        sizes = tuple(move.nbytes for move in ordered)
        return cls(f"{len(ordered)} shards {digest}", ordered, sizes)

    @property
    def nbytes(self) -> int:
        """The bytes of all shards together."""
        return sum(self.sizes)

    def fill(self, tensors: Mapping[ShardId, torch.Tensor], device: str) -> torch.Tensor:
        """A new flat tensor with the bytes of its shards."""
        pack = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
        views, memories = [], []
        for move, view in zip(self.moves, pack.split(self.sizes), strict=True):
            tensor = tensors[move.shard_id]
            memory = _memory(tensor, device)
            if memory is None:
                Shard.of(tensor, 0).box(Region.of_shape(tuple(tensor.shape))).read_into(view)
            else:
                views.append(view)
                memories.append(memory)
        if views:
            torch._foreach_copy_(views, memories)
        return pack

    def empty_into(
        self, pack: torch.Tensor, tensors: Mapping[ShardId, torch.Tensor], device: str
    ) -> None:
        """Copy the bytes of a flat tensor into its shards."""
        views, memories = [], []
        for move, view in zip(self.moves, pack.split(self.sizes), strict=True):
            tensor = tensors[move.shard_id]
            memory = _memory(tensor, device)
            if memory is None:
                Shard.of(tensor, 0).box(Region.of_shape(tuple(tensor.shape))).write_from(view)
            else:
                views.append(view)
                memories.append(memory)
        if views:
            torch._foreach_copy_(memories, views)


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


def _memory(tensor: torch.Tensor, device: str) -> torch.Tensor | None:
    """The bytes of a tensor where they lie in order, on the device and as plain memory."""
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    if not (tensor.is_cpu and device == "cpu"):
        return None
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
