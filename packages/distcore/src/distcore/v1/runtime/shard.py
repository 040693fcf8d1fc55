"""Shard: a rank's local tensor and where its Regions lie; Box: the bytes of one Region in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import torch

from distcore.v1.errors import PlanError, Problem
from distcore.v1.layout import Layout, Piece
from distcore.v1.region import Region
from distcore.v1.runtime.layouts import is_dtensor, layout_of, local_tensor

_CARRIERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Shard:
    """A local tensor, and the pieces of the global tensor that lie in it.

    The tensor is not copied: what is received is written into it, whatever its strides, also
    where it is a Parameter.
    """

    data: torch.Tensor
    pieces: tuple[Piece, ...]
    _bits: torch.Tensor = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if is_dtensor(self.data):
            raise PlanError(Problem("data", "type", "give the DTensor itself, not a Shard of it"))
        object.__setattr__(self, "pieces", tuple(self.pieces))
        object.__setattr__(self, "data", self.data.detach())
        object.__setattr__(self, "_bits", _bits_of(self.data))
        whole = Region.of_shape(tuple(self.data.shape))
        problems = [
            Problem("pieces", "bounds", f"{piece} lies outside the local shape {whole.stop}")
            for piece in self.pieces
            if piece.region.ndim != whole.ndim or not whole.contains(piece.local)
        ]
        if problems:
            raise PlanError(problems)

    @classmethod
    def of(cls, value: torch.Tensor | Shard, rank: int, layout: Layout | None = None) -> Shard:
        """The Shard of `rank`: of a DTensor its local part, of a plain tensor the whole.

        `layout` may be given where it is known already.
        """
        if isinstance(value, Shard):
            return value
        if layout is None and not is_dtensor(value):
            whole = Region.of_shape(tuple(value.shape))
            return cls(value, (Piece(whole, whole.start),))
        layout = layout_of(value) if layout is None else layout
        return cls(local_tensor(value), layout.pieces(rank))

    @classmethod
    def all_of(cls, values: Mapping[str, torch.Tensor | Shard], rank: int) -> dict[str, Shard]:
        """The Shards of `rank` of many tensors, by key."""
        return {key: cls.of(value, rank) for key, value in values.items()}

    def holds(self, region: Region) -> bool:
        """Whether every element of `region` lies in the pieces."""
        if any(piece.region.contains(region) for piece in self.pieces):
            return True
        common = [piece.region.intersect(region) for piece in self.pieces]
        return sum(box.numel for box in common if box is not None) == region.numel

    def box(self, region: Region) -> Box:
        """The bytes of `region`, which must lie in the pieces."""
        for piece in self.pieces:
            if piece.region.contains(region):
                view = self._bits
                if piece.region != region or piece.local.shape != tuple(view.shape):
                    view = view[_place_of(piece, region).slices()]
                return Box(region, ((region, view),))
        views = []
        for piece in self.pieces:
            common = piece.region.intersect(region)
            if common is not None:
                views.append((common, self._bits[_place_of(piece, common).slices()]))
        return Box(region, tuple(views))


def _place_of(piece: Piece, region: Region) -> Region:
    offset = tuple(place - low for place, low in zip(piece.place, piece.region.start, strict=True))
    return region.translate(offset)


@dataclass(frozen=True, slots=True)
class Box:
    """The elements of one Region, as views of a local tensor: one, or several side by side."""

    region: Region
    views: tuple[tuple[Region, torch.Tensor], ...]

    def flat(self, device: str) -> torch.Tensor | None:
        """The bytes as they lie in memory, or None where they are not in order or elsewhere."""
        if len(self.views) != 1:
            return None
        view = self.views[0][1]
        if not view.is_contiguous() or view.is_conj() or view.is_neg():
            return None
        if view.device.type != torch.device(device).type:
            return None
        return view.reshape(-1).view(torch.uint8)

    def read_into(self, staging: torch.Tensor) -> None:
        """Copy the elements, in row-major order, into `staging` (flat uint8)."""
        for region, view in self.views:
            self._at(staging, view.dtype, region).copy_(view, non_blocking=False)

    def write_from(self, staging: torch.Tensor) -> None:
        """Copy the elements out of `staging` (flat uint8), where they lie in row-major order."""
        for region, view in self.views:
            view.copy_(self._at(staging, view.dtype, region))

    def copy_from(self, other: Box) -> None:
        """Copy the elements of another Box of the same Region."""
        for region, view in self.views:
            for source_region, source in other.views:
                common = region.intersect(source_region)
                if common is None:
                    continue
                target = view[common.relative_to(region).slices()]
                origin = source[common.relative_to(source_region).slices()]
                if not _is_same(target, origin):
                    target.copy_(origin)

    def _at(self, staging: torch.Tensor, dtype: torch.dtype, region: Region) -> torch.Tensor:
        whole = staging.view(dtype).view(self.region.shape)
        return whole[region.relative_to(self.region).slices()]


def _bits_of(data: torch.Tensor) -> torch.Tensor:
    """The same memory, as integers of the same size: some dtypes cannot be copied as they are."""
    dtype = _CARRIERS.get(data.element_size())
    if dtype is None or data.is_conj() or data.is_neg():
        return data
    return data.view(dtype)


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.data_ptr() == other.data_ptr()
        and one.stride() == other.stride()
        and one.device == other.device
    )
