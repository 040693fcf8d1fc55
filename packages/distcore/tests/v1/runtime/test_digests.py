"""Digests: a sender vouches for every part, and a receiver names the one that is not right."""

from __future__ import annotations

import pytest
import torch
import xxhash

from distcore.v1 import Region
from distcore.v1.errors import PeerError
from distcore.v1.runtime import Shard
from distcore.v1.runtime.digests import DIGEST_NBYTES, check, digests_of, vouch
from distcore.v1.runtime.staging import Binding, Lane
from distcore.v1.schedule import Batch, Part

SHAPE = (3, 5)


def lane_and_slot() -> tuple[Lane, torch.Tensor, dict[str, torch.Tensor]]:
    """A part in its own memory, two packed ones and one that is staged since it is turned."""
    tensors = {key: torch.arange(15.0).view(SHAPE) + n for n, key in enumerate("abcd")}
    tensors["d"] = tensors["d"].view(5, 3).t()
    parts = tuple(Part(key, Region.of_shape(SHAPE), 60) for key in tensors)
    batch = Batch(2, parts, (range(1), range(1, 3), range(3, 4)))
    shards = {key: Shard.of(tensor, 0) for key, tensor in tensors.items()}
    lane, end = Binding(shards, "cpu").lane(batch, 0, DIGEST_NBYTES)
    return lane, torch.zeros(end, dtype=torch.uint8), tensors


def test_a_digest_is_the_xxh3_of_the_bytes() -> None:
    memories = [torch.arange(n, dtype=torch.uint8) for n in (1, 200)]
    expected = [xxhash.xxh3_64_digest(bytes(range(n))) for n in (1, 200)]
    assert digests_of(memories) == b"".join(expected)
    assert xxhash.xxh3_64_digest(b"").hex() == "2d06800538d394c2"


def test_what_is_in_place_is_right() -> None:
    lane, slot, _ = lane_and_slot()
    lane.pack(slot)
    vouch(lane, slot)
    digests = lane.message(slot).buffers[-1].clone()
    assert digests.unique().numel() > 16
    lane.unpack(slot)
    check(lane, slot)
    assert torch.equal(lane.message(slot).buffers[-1], digests)


@pytest.mark.parametrize("key", "abcd")
def test_a_part_that_is_not_right_is_named(key: str) -> None:
    lane, slot, tensors = lane_and_slot()
    lane.pack(slot)
    vouch(lane, slot)
    tensors[key][2, 4] += 1
    with pytest.raises(PeerError) as caught:
        check(lane, slot)
    assert caught.value.label == "verify"
    assert list(caught.value.failures) == [2]
    assert caught.value.failures[2].startswith(f"{key!r} Region(start=(0, 0), stop=(3, 5)): ")


def test_of_several_wrong_parts_the_first_is_named() -> None:
    lane, slot, tensors = lane_and_slot()
    lane.pack(slot)
    vouch(lane, slot)
    for tensor in (tensors["d"], tensors["b"]):
        tensor[0, 0] -= 1
    with pytest.raises(PeerError, match="'b'"):
        check(lane, slot)
