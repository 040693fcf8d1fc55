"""Staging: the flat buffers in which a round is packed, and the copies that fill and empty them.

A lane is one batch of one round on this rank. Where a part's bytes lie in order on the channel's
device, the lane hands out its memory as it is; everything else has a place in the staging buffer
of the round's slot.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from distcore.v1.channel import Message
from distcore.v1.packing import ALIGNMENT, Packing
from distcore.v1.region import Region
from distcore.v1.runtime.shard import Box, Shard
from distcore.v1.schedule import Batch, Part


@dataclass(frozen=True, slots=True)
class Staged:
    """A part that is copied through staging: its Box and where it lies in the slot."""

    box: Box
    place: slice


@dataclass(frozen=True, slots=True)
class Lane:
    """One batch, bound to memory: what the channel gets, and what is copied before or after.

    `direct[i]` is the memory of buffer i, or None where buffer i is `places[i]` of the slot.
    """

    batch: Batch
    direct: tuple[torch.Tensor | None, ...]
    places: tuple[slice, ...]
    staged: tuple[Staged, ...]
    nbytes: int

    def message(self, slot: torch.Tensor) -> Message:
        """The message of this lane; staged buffers lie in `slot`."""
        buffers = tuple(
            slot[place] if memory is None else memory
            for memory, place in zip(self.direct, self.places, strict=True)
        )
        return Message(self.batch.peer, buffers)

    def pack(self, slot: torch.Tensor) -> None:
        """Copy every staged part into the slot."""
        for part in self.staged:
            part.box.read_into(slot[part.place])

    def unpack(self, slot: torch.Tensor) -> None:
        """Copy every staged part out of the slot."""
        for part in self.staged:
            part.box.write_from(slot[part.place])


@dataclass(frozen=True, slots=True)
class Binding:
    """The Shards of one side (sources or destinations) and the device of the channel."""

    shards: Mapping[str, Shard]
    device: str
    _boxes: dict[tuple[str, Region], Box] = field(default_factory=dict, repr=False)

    def box_of(self, part: Part) -> Box:
        """Where a part lies on this rank."""
        place = (part.key, part.region)
        box = self._boxes.get(place)
        if box is None:
            box = self._boxes[place] = self.shards[part.key].box(part.region)
        return box

    def lane(self, batch: Batch, offset: int) -> tuple[Lane, int]:
        """Bind a batch to memory; staged parts lie in the slot from `offset`. Returns the end."""
        direct: list[torch.Tensor | None] = []
        places: list[slice] = []
        staged: list[Staged] = []
        for run in batch.buffers:
            boxes = [self.box_of(batch.parts[at]) for at in run]
            memory = boxes[0].flat(self.device) if len(boxes) == 1 else None
            direct.append(memory)
            if memory is not None:
                places.append(slice(0, 0))
                continue
            packing = Packing.of(batch.parts[at].nbytes for at in run)
            places.append(slice(offset, offset + packing.nbytes))
            staged += [
                Staged(box, slice(offset + low, offset + low + size))
                for box, low, size in zip(boxes, packing.offsets, packing.sizes, strict=True)
            ]
            offset += -(-packing.nbytes // ALIGNMENT) * ALIGNMENT
        nbytes = sum(part.nbytes for part in batch.parts)
        return Lane(batch, tuple(direct), tuple(places), tuple(staged), nbytes), offset


@dataclass(frozen=True, slots=True)
class Slot:
    """The staging memory of one of two rounds in flight: one buffer to send, one to receive."""

    outgoing: torch.Tensor
    incoming: torch.Tensor

    @classmethod
    def of(cls, sizes: tuple[int, int], device: str) -> Slot:
        """Allocate a slot that stages up to `sizes` bytes to send and to receive."""
        outgoing, incoming = (torch.empty(n, dtype=torch.uint8, device=device) for n in sizes)
        return cls(outgoing, incoming)

    @property
    def nbytes(self) -> int:
        """The bytes of both buffers."""
        return self.outgoing.numel() + self.incoming.numel()
