"""Staging: what a lane hands to the channel, and what it copies before and after."""

from __future__ import annotations

import torch

from distcore.v1 import Piece, Region
from distcore.v1.runtime import Shard
from distcore.v1.runtime.staging import Binding, Lane, Slot
from distcore.v1.schedule import Batch, Part


def bound(
    tensors: dict[str, torch.Tensor], *buffers: list[str], offset: int = 0, digest_nbytes: int = 0
) -> tuple[Lane, int]:
    """A lane with these buffers, each a run of whole tensors."""
    shards = {key: Shard.of(tensor, 0) for key, tensor in tensors.items()}
    parts: list[Part] = []
    runs: list[range] = []
    for keys in buffers:
        runs.append(range(len(parts), len(parts) + len(keys)))
        for key in keys:
            region = Region.of_shape(tuple(tensors[key].shape))
            parts.append(Part(key, region, tensors[key].nbytes))
    batch = Batch(3, tuple(parts), tuple(runs))
    return Binding(shards, "cpu").lane(batch, offset, digest_nbytes)


def filled(nbytes: int, value: int = 0xEE) -> torch.Tensor:
    return torch.full((nbytes,), value, dtype=torch.uint8)


def test_a_contiguous_part_alone_is_its_own_buffer() -> None:
    tensor = torch.arange(5, dtype=torch.int16)
    lane, end = bound({"a": tensor}, ["a"])
    message = lane.message(filled(0))
    assert (end, lane.nbytes, message.peer) == (0, 10, 3)
    assert [buffer.data_ptr() for buffer in message.buffers] == [tensor.data_ptr()]
    assert message.buffers[0].numel() == 10


def test_packed_parts_are_aligned_and_the_last_ends_the_buffer() -> None:
    tensors = {"a": filled(5, 1), "b": filled(16, 2), "c": filled(3, 3)}
    lane, end = bound(tensors, ["a", "b", "c"], offset=32)
    assert (end, lane.nbytes) == (80, 24)
    slot = filled(80)
    lane.pack(slot)
    expected = [1] * 5 + [0xEE] * 11 + [2] * 16 + [3] * 3
    assert lane.message(slot).buffers[0].tolist() == expected
    assert slot.tolist() == [0xEE] * 32 + expected + [0xEE] * 13


def test_what_is_not_contiguous_is_staged_even_alone_with_its_exact_size() -> None:
    turned = torch.arange(6, dtype=torch.uint8).view(2, 3).t()
    lane, end = bound({"a": turned}, ["a"])
    slot = filled(end)
    lane.pack(slot)
    assert end == 16
    assert lane.message(slot).buffers[0].tolist() == [0, 3, 1, 4, 2, 5]


def test_unpacking_writes_flat_and_strided_parts_alike() -> None:
    tensors = {"flat": filled(4, 0), "turned": filled(6, 0).view(2, 3).t(), "alone": filled(2, 0)}
    lane, end = bound(tensors, ["flat", "turned"], ["alone"])
    slot = torch.arange(end, dtype=torch.uint8)
    lane.unpack(slot)
    assert tensors["flat"].tolist() == [0, 1, 2, 3]
    assert tensors["turned"].tolist() == [[16, 17], [18, 19], [20, 21]]
    assert tensors["alone"].tolist() == [0, 0]


def test_digests_lie_behind_the_parts_and_travel_last() -> None:
    tensors = {"a": filled(5, 1), "b": filled(7, 2), "c": filled(9, 3)}
    lane, end = bound(tensors, ["a", "b"], ["c"], digest_nbytes=8)
    slot = torch.arange(end, dtype=torch.uint8)
    buffers = lane.message(slot).buffers
    assert [buffer.numel() for buffer in buffers] == [23, 9, 24]
    assert buffers[2].tolist() == list(range(32, 56))
    assert end == 64


def test_the_memory_of_every_part_comes_in_order() -> None:
    tensors = {"a": filled(5, 1), "b": filled(7, 2), "c": filled(9, 3)}
    lane, end = bound(tensors, ["a"], ["b", "c"])
    slot = filled(end)
    lane.pack(slot)
    memories = [memory.tolist() for memory in lane.memories(slot)]
    assert memories == [[1] * 5, [2] * 7, [3] * 9]


def test_a_binding_finds_what_it_was_not_told() -> None:
    data = torch.arange(8)
    binding = Binding({"a": Shard(data, (Piece(Region((4,), (12,)), (0,)),))}, "cpu")
    part = Part("a", Region((6,), (8,)), 16)
    flat = binding.box_of(part).flat("cpu")
    assert flat is not None
    assert flat.view(torch.int64).tolist() == [2, 3]
    kept = Shard.of(torch.zeros(2).long(), 0).box(Region((0,), (2,)))
    binding.keep(("a", (6,), (8,)), kept)
    assert binding.box_of(part) is kept


def test_a_slot_has_a_buffer_for_each_direction() -> None:
    slot = Slot.of((32, 0), "cpu")
    assert (slot.outgoing.numel(), slot.incoming.numel(), slot.nbytes) == (32, 0, 32)
    assert slot.outgoing.dtype == torch.uint8
