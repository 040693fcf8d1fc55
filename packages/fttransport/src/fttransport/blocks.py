"""Blocks: the bytes that a set of tensors uses, each byte once.

A block is a range of one storage. Tensors whose ranges overlap share a block, so tied tensors stay
tied; a view of a large storage brings along only the range that it uses; and a view with wide gaps
that shares nothing is packed. Small tensors of one dtype that share nothing are copied into blocks
together, up to a bound: what a tensor costs beside its bytes is then next to nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fttransport.memory import Spans, is_dense, storage_bytes, used_span
from fttransport.table import Column

SMALL_NBYTES: Final = 64 << 10
"""Tensors below this are packed,"""
PACK_NBYTES: Final = 4 << 20
"""into blocks of at most this,"""
PACKED_NBYTES: Final = 32 << 20
"""until this has been copied."""

_PACKABLE: Final = {
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
}


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """Flat uint8 tensors, and where in them each of the tensors lies.

    Of each tensor `block` has the number of its block, -1 for one without elements, and `offset`
    the byte in it at which its first element lies. `strides` has those of the tensors that are
    not row-major there.
    """

    blocks: list[Tensor]
    block: Column
    offset: Column
    strides: Mapping[int, tuple[int, ...]]


def find_blocks(tensors: Sequence[Tensor], spans: Spans) -> Blocks:
    """The blocks of strided tensors, whose spans are given.

    The blocks share the tensors' memory, but for packed ones. They are in the order in which
    their first tensor was given, and do not depend on where in memory the tensors lie.
    """
    alone, shared = spans.overlapping()
    mixed = len(set(spans.devices)) > 1
    packs, rest = _packs(alone, spans)
    rest += [index for group in shared for index in group]
    groups: list[list[_Range] | list[int]] = [*_overlapping(rest, tensors), *packs]
    blocks: list[Tensor] = []
    block = np.full(len(tensors), -1, dtype=np.int64)
    offset = np.zeros(len(tensors), dtype=np.int64)
    strides: dict[int, tuple[int, ...]] = {}
    for group in sorted(groups, key=_first_of):
        if isinstance(group[0], int):
            block[group] = len(blocks)
            offset[group[1:]] = np.cumsum(spans.nbytes[group[:-1]])
            pack = [tensors[index] for index in group]
            blocks.append(_packed(pack, mixed=mixed))
            continue
        made, found = _block_of(group, tensors)
        for index, (begin, stride) in found.items():
            block[index], offset[index] = len(blocks), begin
            if stride is not None:
                strides[index] = stride
        blocks.append(made)
    return Blocks(blocks, block, offset, strides)


class _Range(NamedTuple):
    """The bytes of its storage that the tensor of a number uses."""

    start: int
    stop: int
    number: int


def _first_of(group: list[_Range] | list[int]) -> int:
    if isinstance(group[0], int):
        # The tensors of a pack are in order.
        return group[0]
    return min(one.number for one in group if isinstance(one, _Range))


def _packs(alone: list[int], spans: Spans) -> tuple[list[list[int]], list[int]]:
    """Which tensors are packed together, in order; and which are not packed."""
    dtypes = spans.dtypes
    kinds = dict.fromkeys(dtypes)
    left = np.zeros(len(dtypes), dtype=np.bool_)
    left[alone] = True
    small = left & np.array(spans.contiguous, dtype=np.bool_) & (spans.nbytes < SMALL_NBYTES)
    if not set(kinds) <= _PACKABLE:
        small &= np.array([dtype in _PACKABLE for dtype in dtypes], dtype=np.bool_)
    small &= np.cumsum(np.where(small, spans.nbytes, 0)) <= PACKED_NBYTES
    packs: list[list[int]] = []
    for dtype in kinds:
        alike = small
        if len(kinds) > 1:
            alike = small & np.array([one is dtype for one in dtypes], dtype=np.bool_)
        packs += _filled(np.flatnonzero(alike), spans)
    for pack in packs:
        left[pack] = False
    return packs, np.flatnonzero(left).tolist()


def _filled(indices: Column, spans: Spans) -> Iterator[list[int]]:
    """Packs of tensors, each filled as far as it goes; one tensor alone is none."""
    ends = np.cumsum(spans.nbytes[indices])
    begin = 0
    while begin < len(indices):
        before = ends[begin - 1] if begin else 0
        end = int(np.searchsorted(ends, before + PACK_NBYTES, side="right"))
        if end - begin > 1:
            yield indices[begin:end].tolist()
        begin = max(end, begin + 1)


def _packed(tensors: list[Tensor], *, mixed: bool) -> Tensor:
    """Contiguous tensors of one dtype, copied one after another; to the CPU if they are `mixed`."""
    if mixed:
        tensors = [tensor.cpu() for tensor in tensors]
    with torch.no_grad():
        flat = [tensor if tensor.ndim == 1 else tensor.view(-1) for tensor in tensors]
        return torch.cat(flat).view(torch.uint8)


def _overlapping(indices: list[int], tensors: Sequence[Tensor]) -> list[list[_Range]]:
    """The ranges of tensors, grouped by what overlaps in one storage."""
    ranges = sorted(
        (tensors[index].untyped_storage().data_ptr(), _Range(*used_span(tensors[index]), index))
        for index in indices
    )
    groups: list[list[_Range]] = []
    current = -1
    reach = 0
    for storage, one in ranges:
        if storage != current or one.start >= reach:
            groups.append([])
            current, reach = storage, one.stop
        groups[-1].append(one)
        reach = max(reach, one.stop)
    return groups


def _block_of(
    group: list[_Range], tensors: Sequence[Tensor]
) -> tuple[Tensor, dict[int, tuple[int, tuple[int, ...] | None]]]:
    """The block of a group of overlapping ranges; for each tensor its offset and strides.

    No strides for one that is row-major there.
    """
    first = tensors[group[0].number]
    if len(group) == 1 and first.is_contiguous():
        begin, end, index = group[0]
        return storage_bytes(first, begin, end), {index: (0, None)}
    if len(group) == 1 and _is_sparse(first):
        packed = first.contiguous()
        return storage_bytes(packed, *used_span(packed)), {group[0].number: (0, None)}
    # Views of several dtypes must each lie on a multiple of their element size.
    step = max(tensors[one.number].element_size() for one in group)
    start = group[0].start - group[0].start % step
    found: dict[int, tuple[int, tuple[int, ...] | None]] = {}
    for one in group:
        tensor = tensors[one.number]
        stride = None if tensor.is_contiguous() else tuple(tensor.stride())
        found[one.number] = one.start - start, stride
    return storage_bytes(first, start, max(one.stop for one in group)), found


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
