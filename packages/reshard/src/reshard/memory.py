"""Memory: which tensors of a rank share bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Extent:
    """The bytes from the first to the last that a tensor may touch."""

    key: str
    low: int
    high: int
    tensor: torch.Tensor


def extents(tensors: Mapping[str, torch.Tensor]) -> list[Extent]:
    """The extents of all tensors that have memory, ascending."""
    found = []
    for key, tensor in tensors.items():
        if tensor.is_meta or tensor.numel() == 0:
            continue
        last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        low = tensor.data_ptr()
        found.append(Extent(key, low, low + (last + 1) * tensor.element_size(), tensor))
    return sorted(found, key=lambda extent: (extent.low, extent.high, extent.key))


def shared(
    ones: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, str]]:
    """Every pair of keys, of `ones` and of `others`, whose tensors have a byte in common."""
    right = extents(others)
    active: list[Extent] = []
    at = 0
    for one in extents(ones):
        while at < len(right) and right[at].low < one.high:
            active.append(right[at])
            at += 1
        active = [other for other in active if other.high > one.low]
        for other in active:
            if other.low < one.high and _share(one.tensor, other.tensor):
                yield one.key, other.key


def is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the two are the same elements of the same memory."""
    return (
        one.data_ptr() == other.data_ptr()
        and one.device == other.device
        and one.dtype == other.dtype
        and one.shape == other.shape
        and one.stride() == other.stride()
    )


def _share(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors with overlapping extents have a byte in common."""
    if one.device != other.device:
        return False
    if one.is_contiguous() and other.is_contiguous():
        return True
    size = one.element_size()
    base = min(one.data_ptr(), other.data_ptr())
    offsets = [tensor.data_ptr() - base for tensor in (one, other)]
    if other.element_size() != size or any(offset % size for offset in offsets):
        return True  # cannot be told apart element by element: better one copy too many
    marks = torch.zeros(
        max(
            offset // size
            + sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True))
            + 1
            for offset, t in zip(offsets, (one, other), strict=True)
        ),
        dtype=torch.bool,
    )
    views = [
        marks.as_strided(t.shape, t.stride(), offset // size)
        for offset, t in zip(offsets, (one, other), strict=True)
    ]
    views[0].fill_(True)
    return bool(views[1].any())
