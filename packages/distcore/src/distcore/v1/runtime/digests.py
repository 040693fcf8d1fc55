"""Digests: what a sender vouches for, part by part, and the receiver checks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import torch
import xxhash

from distcore.v1.errors import PeerError
from distcore.v1.runtime.staging import Lane

DIGEST_NBYTES: Final = 8
# What is taken off another device at once.
_CHUNK_NBYTES: Final = 1 << 22


def digests_of(memories: Iterable[torch.Tensor]) -> bytes:
    """The xxh3 digests of flat uint8 tensors, `DIGEST_NBYTES` each."""
    found = []
    for memory in memories:
        state = xxhash.xxh3_64()
        for chunk in memory.split(_CHUNK_NBYTES) if not memory.is_cpu else (memory,):
            state.update(chunk.cpu().numpy().data)
        found.append(state.digest())
    return b"".join(found)


def vouch(lane: Lane, slot: torch.Tensor) -> None:
    """Write the digests of the parts of a packed lane into their place in the slot."""
    digests = bytearray(digests_of(lane.memories(slot)))
    slot[lane.digests].copy_(torch.frombuffer(digests, dtype=torch.uint8))


def check(lane: Lane, slot: torch.Tensor) -> None:
    """Raise PeerError naming the first part that is not in place as the peer has sent it.

    Reads the destinations back through the slot, from which they were filled.
    """
    sent = slot[lane.digests].cpu().numpy().tobytes()
    lane.pack(slot)
    found = digests_of(lane.memories(slot))
    if found == sent:
        return
    for at, part in enumerate(lane.batch.parts):
        place = slice(at * DIGEST_NBYTES, (at + 1) * DIGEST_NBYTES)
        if found[place] != sent[place]:
            text = (
                f"{part.key!r} {part.region}: the bytes that arrived are not those that were sent"
            )
            raise PeerError("verify", {lane.batch.peer: text})
