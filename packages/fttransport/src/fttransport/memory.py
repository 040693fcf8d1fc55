"""Memory: the bytes of tensors as buffers, and tensors over bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

if TYPE_CHECKING:
    from typing_extensions import Buffer


def used_span(tensor: Tensor) -> tuple[int, int]:
    """The first byte of its storage that a tensor uses, and the byte after the last one."""
    if not tensor.numel():
        return (0, 0)
    itemsize = tensor.element_size()
    if tensor.is_contiguous():
        begin = int(tensor.storage_offset()) * itemsize
        return begin, begin + tensor.numel() * itemsize
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset()) * itemsize
    return start, start + (int(last) + 1) * itemsize


def storage_bytes(tensor: Tensor, start: int, stop: int) -> Tensor:
    """Bytes `start` to `stop` of a tensor's storage, as a flat uint8 tensor that shares them."""
    raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return raw.set_(tensor.untyped_storage(), start, (stop - start,), (1,))


def view_bytes(
    block: Tensor, offset: int, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]
) -> Tensor:
    """A tensor whose first element lies `offset` bytes into `block`, sharing its memory.

    `offset` is a multiple of the element size, and `block` begins its own storage.
    """
    made = torch.empty(0, dtype=dtype, device=block.device)
    at = offset // made.element_size()
    return made.set_(block.untyped_storage(), at, tuple(shape), tuple(stride))


def buffer_of(block: Tensor) -> memoryview:
    """A flat CPU uint8 tensor as a writable buffer that keeps the tensor's memory alive."""
    return memoryview(cast("Buffer", block.numpy()))


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether every element has a place of its own and there is no gap between them."""
    dims = sorted((s, n) for n, s in zip(shape, stride, strict=True) if n > 1)
    expected = 1
    for step, n in dims:
        if step != expected:
            return False
        expected *= n
    return True


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a row-major tensor, in elements."""
    if len(shape) == 1:
        return (1,)
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(1, n)
    return tuple(reversed(strides))
