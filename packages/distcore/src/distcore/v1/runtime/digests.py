"""Digests: what a sender vouches for, part by part, and the receiver checks."""

from __future__ import annotations

import torch
import xxhash

from distcore.v1.errors import PeerError
from distcore.v1.runtime.staging import Binding
from distcore.v1.schedule import Batch

DIGEST_NBYTES = 8


def digest_parts(batch: Batch, binding: Binding) -> torch.Tensor:
    """The xxh3 digests of the parts of a batch as this rank holds them, 8 bytes each (CPU)."""
    digests = bytearray()
    for part in batch.parts:
        box = binding.box_of(part)
        flat = box.flat("cpu")
        if flat is None:
            flat = torch.empty(part.nbytes, dtype=torch.uint8)
            box.read_into(flat)
        digests += xxhash.xxh3_64_digest(memoryview(flat.numpy()))
    return torch.frombuffer(digests, dtype=torch.uint8) if digests else torch.empty(0).byte()


def check_parts(batch: Batch, binding: Binding, sent: torch.Tensor) -> None:
    """Raise PeerError naming the first part that did not arrive as `batch.peer` sent it."""
    found = digest_parts(batch, binding)
    if torch.equal(found, sent.cpu()):
        return
    differing = (found != sent.cpu()).view(-1, DIGEST_NBYTES).any(dim=1).nonzero().flatten()
    part = batch.parts[int(differing[0])]
    text = f"{part.key!r} {part.region}: the bytes that arrived are not those that were sent"
    raise PeerError("verify", {batch.peer: text})
