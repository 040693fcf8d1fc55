"""Blocks: the bytes that a set of tensors uses, each byte once.

A block is a range of one storage. Tensors whose ranges overlap share a block, so tied tensors stay
tied; a view of a large storage brings along only the range that it uses; and a view with wide gaps
that shares nothing is packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fttransport.memory import contiguous_stride, is_dense, storage_bytes, used_span


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies: `offset` bytes into `block`, with strides in elements.

    A tensor without elements lies in no block: then `block` is -1.
    """

    block: int
    offset: int
    stride: tuple[int, ...]


def find_blocks(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Place]]:
    """The blocks of strided tensors as flat uint8 tensors, and the place of each tensor in them.

    The blocks share the tensors' memory, but for packed ones. They are in the order in which
    their first tensor was given.
    """
    places: list[Place | None] = [None] * len(tensors)
    spans: list[tuple[int, int, int, int]] = []
    for index, tensor in enumerate(tensors):
        start, stop = used_span(tensor)
        if start == stop:
            places[index] = Place(-1, 0, contiguous_stride(tensor.shape))
        else:
            storage = tensor.untyped_storage().data_ptr()
            spans.append((storage, start, stop, index))
    groups = sorted(_overlapping(spans), key=lambda group: min(index for *_, index in group))
    blocks: list[Tensor] = []
    for group in groups:
        block, found = _block_of(group, tensors)
        for index, (offset, stride) in found.items():
            places[index] = Place(len(blocks), offset, stride)
        blocks.append(block)
    return blocks, [place for place in places if place is not None]


def _overlapping(
    spans: list[tuple[int, int, int, int]],
) -> list[list[tuple[int, int, int]]]:
    groups: list[list[tuple[int, int, int]]] = []
    current = -1
    reach = 0
    for storage, start, stop, index in sorted(spans):
        if storage != current or start >= reach:
            groups.append([])
            current, reach = storage, stop
        groups[-1].append((start, stop, index))
        reach = max(reach, stop)
    return groups


def _block_of(
    group: list[tuple[int, int, int]], tensors: Sequence[Tensor]
) -> tuple[Tensor, dict[int, tuple[int, tuple[int, ...]]]]:
    """The block of a group of overlapping ranges; for each tensor its offset and strides."""
    first = tensors[group[0][2]]
    if len(group) == 1 and first.is_contiguous():
        begin, end, index = group[0]
        return storage_bytes(first, begin, end), {index: (0, tuple(first.stride()))}
    if len(group) == 1 and _is_sparse(first):
        packed = first.contiguous()
        flat = storage_bytes(packed, *used_span(packed))
        return flat, {group[0][2]: (0, contiguous_stride(first.shape))}
    # Views of several dtypes must each lie on a multiple of their element size.
    step = max(tensors[index].element_size() for _, _, index in group)
    start = group[0][0] - group[0][0] % step
    stop = max(stop for _, stop, _ in group)
    found = {index: (begin - start, tuple(tensors[index].stride())) for begin, _, index in group}
    return storage_bytes(first, start, stop), found


def _is_sparse(tensor: Tensor) -> bool:
    """Whether packing a view halves its bytes at least."""
    if is_dense(tensor.shape, tensor.stride()):
        return False
    start, stop = used_span(tensor)
    return 2 * tensor.numel() * tensor.element_size() <= stop - start


def on_host(blocks: Sequence[Tensor], *, copied: bool) -> list[Tensor]:
    """The blocks in CPU memory: those of a device copied, those of the CPU only where `copied`.

    Copies from a device go through pinned memory, and are complete on return.
    """
    staged: list[Tensor] = []
    devices: set[torch.device] = set()
    for block in blocks:
        if block.device.type == "cpu":
            staged.append(block.clone() if copied else block)
            continue
        host = torch.empty(block.shape, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        staged.append(host.copy_(block, non_blocking=True))
        devices.add(block.device)
    for device in devices:
        torch.accelerator.synchronize(device)
    return staged
