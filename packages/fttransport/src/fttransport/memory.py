"""Memory: the bytes of tensors as buffers, and tensors over bytes."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Final, cast

import numpy as np
import torch
from numpy.typing import NDArray
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


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """Of each of some tensors the address of its first element and the bytes that it spans.

    `contiguous` tells of each whether it is row-major without gaps, `devices` and `dtypes` what
    they say.
    """

    start: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    contiguous: list[bool]
    devices: list[torch.device]
    dtypes: list[torch.dtype]

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Spans:
        """The spans of strided tensors."""
        start = np.fromiter(map(Tensor.data_ptr, tensors), np.int64, len(tensors))
        nbytes = np.fromiter(map(attrgetter("nbytes"), tensors), np.int64, len(tensors))
        contiguous = list(map(Tensor.is_contiguous, tensors))
        if not all(contiguous):
            for index, is_contiguous in enumerate(contiguous):
                if not is_contiguous:
                    begin, end = used_span(tensors[index])
                    nbytes[index] = end - begin
        devices = [tensor.device for tensor in tensors]
        return cls(start, nbytes, contiguous, devices, [tensor.dtype for tensor in tensors])

    def overlapping(self) -> tuple[list[int], list[list[int]]]:
        """Which tensors share no byte with another, and the groups of those that may.

        Tensors without bytes are in neither. Both are ordered by address.
        """
        alone: list[int] = []
        groups: list[list[int]] = []
        for where in self._by_device():
            order = where[np.argsort(self.start[where], kind="stable")]
            order = order[self.nbytes[order] > 0]
            reach = np.maximum.accumulate(self.start[order] + self.nbytes[order])
            first = np.flatnonzero(np.r_[True, self.start[order[1:]] >= reach[:-1]])
            sizes = np.diff(np.r_[first, len(order)])
            alone += order[first[sizes == 1]].tolist()
            for begin, size in zip(first[sizes > 1], sizes[sizes > 1], strict=True):
                groups.append(order[begin : begin + size].tolist())
        return alone, groups

    def _by_device(self) -> Iterator[NDArray[np.int64]]:
        kinds = dict.fromkeys(self.devices)
        for device in kinds:
            if len(kinds) == 1:
                yield np.arange(len(self.devices))
            else:
                yield np.array([i for i, one in enumerate(self.devices) if one == device])


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


def touch(block: Tensor, start: int, stop: int) -> None:
    """Have the system give pages to bytes `start` to `stop` of new CPU memory; nothing changes.

    The first touch of memory takes about as long as a socket's bytes do. A hint, in vain where
    the system does not know it.
    """
    begin = -(-(block.data_ptr() + start) // mmap.PAGESIZE) * mmap.PAGESIZE
    length = block.data_ptr() + stop - begin
    if _madvise is not None and length > 0:
        _madvise(begin, length, _MADV_POPULATE_WRITE)


def _madvise_of_libc() -> Callable[[int, int, int], int] | None:
    if sys.platform != "linux":
        return None
    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int)
    return kind(("madvise", ctypes.CDLL(None)))


_madvise: Final = _madvise_of_libc()
_MADV_POPULATE_WRITE: Final = 23


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
