"""Staging: the flat buffers in which a round is packed, and the copies that fill and empty them.

A lane is one batch of one round on this rank. Where a part's bytes lie in order on the channel's
device, the lane hands out its memory as it is; everything else has a place in the staging buffer
of the round's slot, and so have the digests.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from distcore.v1.channel import Message
from distcore.v1.runtime.scratch_memory import scratch
from distcore.v1.runtime.shard import Box, Shard
from distcore.v1.schedule import Batch, Part, aligned

Place: TypeAlias = tuple[str, tuple[int, ...], tuple[int, ...]]
"""A key, and the start and the stop of a Region: quicker to look up than a Region."""


@dataclass(frozen=True, slots=True)
class Staged:
    """The parts of one staged buffer, one behind the other, and its place in the slot."""

    boxes: tuple[Box, ...]
    sizes: tuple[int, ...]
    place: slice

    def chunks(self, slot: torch.Tensor) -> Iterator[torch.Tensor]:
        """The memory of each part in the slot."""
        padded = [*map(aligned, self.sizes[:-1]), self.sizes[-1]]
        for chunk, size in zip(slot[self.place].split_with_sizes(padded), self.sizes, strict=True):
            yield chunk if chunk.numel() == size else chunk[:size]

    def pack(self, slot: torch.Tensor, device: str) -> None:
        """Copy every part into the slot."""
        targets, sources = [], []
        for chunk, box in zip(self.chunks(slot), self.boxes, strict=True):
            flat = box.flat(device)
            if flat is None:
                box.read_into(chunk)
            else:
                targets.append(chunk)
                sources.append(flat)
        _copy_each(targets, sources)

    def unpack(self, slot: torch.Tensor, device: str) -> None:
        """Copy every part out of the slot."""
        targets, sources = [], []
        for chunk, box in zip(self.chunks(slot), self.boxes, strict=True):
            flat = box.flat(device)
            if flat is None:
                box.write_from(chunk)
            else:
                targets.append(flat)
                sources.append(chunk)
        _copy_each(targets, sources)


@dataclass(frozen=True, slots=True)
class Lane:
    """One batch, bound to memory: what the channel gets, and what is copied before or after.

    `buffers[i]` is the memory of buffer i of the batch, or what is staged for it. `digests` is
    the place of the parts' digests in the slot, empty where none are sent.
    """

    batch: Batch
    buffers: tuple[torch.Tensor | Staged, ...]
    digests: slice
    nbytes: int
    device: str

    def message(self, slot: torch.Tensor) -> Message:
        """The message of this lane; staged buffers lie in `slot`."""
        buffers = [
            slot[buffer.place] if isinstance(buffer, Staged) else buffer for buffer in self.buffers
        ]
        if self.digests.start < self.digests.stop:
            buffers.append(slot[self.digests])
        return Message(self.batch.peer, tuple(buffers))

    def pack(self, slot: torch.Tensor) -> None:
        """Copy every staged part into the slot."""
        for buffer in self.buffers:
            if isinstance(buffer, Staged):
                buffer.pack(slot, self.device)

    def unpack(self, slot: torch.Tensor) -> None:
        """Copy every staged part out of the slot."""
        for buffer in self.buffers:
            if isinstance(buffer, Staged):
                buffer.unpack(slot, self.device)

    def memories(self, slot: torch.Tensor) -> Iterator[torch.Tensor]:
        """The bytes of every part of the batch, in order: its own memory, or its staging."""
        for buffer in self.buffers:
            if isinstance(buffer, Staged):
                yield from buffer.chunks(slot)
            else:
                yield buffer


@dataclass(frozen=True, slots=True)
class Binding:
    """The Shards of one side (sources or destinations) and the device of the channel."""

    shards: Mapping[str, Shard]
    device: str
    _boxes: dict[Place, Box] = field(default_factory=dict, repr=False)

    def keep(self, place: Place, box: Box) -> None:
        """Take note of where a part lies, so that it need not be looked for again."""
        self._boxes[place] = box

    def box_of(self, part: Part) -> Box:
        """Where a part lies on this rank."""
        key, region, _ = part
        box = self._boxes.get((key, region.start, region.stop))
        return self.shards[key].box(region) if box is None else box

    def lane(self, batch: Batch, offset: int, digest_nbytes: int = 0) -> tuple[Lane, int]:
        """Bind a batch to memory; what is staged lies in the slot from `offset`.

        Returns the lane and the end of what is staged, a multiple of the alignment.
        """
        buffers: list[torch.Tensor | Staged] = []
        for run in batch.buffers:
            parts = batch.parts[run.start : run.stop]
            boxes = tuple(map(self.box_of, parts))
            memory = boxes[0].flat(self.device) if len(boxes) == 1 else None
            if memory is not None:
                buffers.append(memory)
                continue
            sizes = tuple(part.nbytes for part in parts)
            end = offset + sum(map(aligned, sizes[:-1])) + sizes[-1]
            buffers.append(Staged(boxes, sizes, slice(offset, end)))
            offset = aligned(end)
        digests = slice(offset, offset + digest_nbytes * len(batch.parts))
        nbytes = sum(part.nbytes for part in batch.parts)
        return Lane(batch, tuple(buffers), digests, nbytes, self.device), aligned(digests.stop)


@dataclass(frozen=True, slots=True)
class Slot:
    """The staging memory of one of two rounds in flight: one buffer to send, one to receive."""

    outgoing: torch.Tensor
    incoming: torch.Tensor

    @classmethod
    def of(cls, sizes: tuple[int, int], device: str) -> Slot:
        """Allocate a slot that stages up to `sizes` bytes to send and to receive."""
        outgoing, incoming = (scratch(nbytes, device) for nbytes in sizes)
        return cls(outgoing, incoming)

    @property
    def nbytes(self) -> int:
        """The bytes of both buffers."""
        return self.outgoing.numel() + self.incoming.numel()


def _copy_each(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """One call for many small copies: the time goes into the copies, not into making them."""
    if targets:
        torch._foreach_copy_(targets, sources)
