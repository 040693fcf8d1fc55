"""Shard: a rank's local tensor and where its Regions lie; Box: the bytes of one Region in it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import torch

from distcore.v1.errors import PlanError, Problem
from distcore.v1.layout import Layout, Piece
from distcore.v1.region import Region
from distcore.v1.runtime.layouts import is_dtensor, layout_of, local_tensor

_MANY: Final = 8
_CARRIERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Shard:
    """A local tensor, and the pieces of the global tensor that lie in it.

    The tensor is not copied: what is received is written into it, whatever its strides, also
    where it is a Parameter. PlanError where it has no memory of its own (sparse, quantized, on
    the meta device), and where pieces lie outside the tensor or overlap.
    """

    data: torch.Tensor
    pieces: tuple[Piece, ...]
    _is_whole: bool = field(init=False, repr=False, compare=False)
    _row: _Row | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        problems = _data_problems(self.data)
        if problems:
            raise PlanError(problems)
        data, pieces = self.data, tuple(self.pieces)
        shape = tuple(data.shape)
        is_whole = len(pieces) == 1 and _is_whole(pieces[0], shape)
        if not is_whole:
            _check_pieces(pieces, shape)
        object.__setattr__(self, "pieces", pieces)
        if data.requires_grad:
            object.__setattr__(self, "data", data.detach())
        object.__setattr__(self, "_is_whole", is_whole)
        row = _Row.of(pieces) if len(pieces) > _MANY and data.ndim else None
        object.__setattr__(self, "_row", row)

    @classmethod
    def of(cls, value: torch.Tensor | Shard, rank: int, layout: Layout | None = None) -> Shard:
        """The Shard of `rank`: of a DTensor its local part, of a plain tensor the whole.

        `layout` may be given where it is known already. Without it a DTensor's own description
        is read as `layout_of` does; where it can be read in two ways, `layouts_of` finds out.
        """
        if isinstance(value, Shard):
            return value
        if not isinstance(value, torch.Tensor):
            text = f"expected a Tensor, a DTensor or a Shard, got a {type(value).__name__}"
            raise PlanError(Problem("data", "type", text))
        if value.is_nested:  # it has no shape to ask for
            raise PlanError(_data_problems(value))
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
        return self.find(region) is not None

    def box(self, region: Region) -> Box:
        """The bytes of `region`; PlanError where not every element of it lies in the pieces."""
        box = self.find(region)
        if box is None:
            held = ", ".join(str(piece.region) for piece in self.pieces[:4]) or "nothing"
            raise PlanError(Problem("region", "region", f"expected {region}, but holds {held}"))
        return box

    def find(self, region: Region) -> Box | None:
        """The bytes of `region`, or None where not every element of it lies in the pieces."""
        if len(region.start) != self.data.ndim:
            return None
        pieces = self.pieces if self._row is None else self._row.near(region)
        for piece in pieces:
            if piece.region is region or piece.region == region:
                view = self.data if self._is_whole else self.data[piece.local.slices()]
                return Box(region, view)
            if piece.region.contains(region):
                return Box(region, self.data[_place_of(piece, region).slices()])
        views, numel = [], 0
        for piece in pieces:
            common = piece.region.intersect(region)
            if common is not None:
                views.append((common, self.data[_place_of(piece, common).slices()]))
                numel += common.numel
        return Box(region, None, tuple(views)) if numel == region.numel else None


@dataclass(frozen=True, slots=True)
class _Row:
    """Many pieces by where they start along the dim that tells them apart best."""

    dim: int
    starts: tuple[int, ...]
    longest: int
    pieces: tuple[Piece, ...]

    @classmethod
    def of(cls, pieces: tuple[Piece, ...]) -> _Row:
        """Put the pieces in a row; they have at least one dim."""
        dims = range(pieces[0].region.ndim)
        dim = max(dims, key=lambda d: len({piece.region.start[d] for piece in pieces}))
        row = tuple(sorted(pieces, key=lambda piece: piece.region.start[dim]))
        starts = tuple(piece.region.start[dim] for piece in row)
        return cls(dim, starts, max(piece.region.shape[dim] for piece in row), row)

    def near(self, region: Region) -> tuple[Piece, ...]:
        """The pieces that may have something in common with `region`, or be equal to it."""
        low, high = region.start[self.dim], region.stop[self.dim]
        first = bisect_left(self.starts, low - self.longest)
        return self.pieces[first : bisect_right(self.starts, high)]


Views: TypeAlias = tuple[tuple[Region, torch.Tensor], ...]


class Box:
    """The elements of one Region, as views of a local tensor: one, or several side by side."""

    # Plans have many parts, so a Box is made of as few objects as can be.
    __slots__ = ("_memory", "_several", "_view", "region")

    region: Region
    _view: torch.Tensor | None
    _several: Views
    _memory: torch.Tensor | None

    def __init__(self, region: Region, view: torch.Tensor | None, several: Views = ()) -> None:
        """Take the one view of the whole Region, or `several` where there is none."""
        self.region = region
        self._view = view
        self._several = several
        self._memory = None if view is None else _memory_of(view)

    @property
    def views(self) -> Views:
        """Views of the local tensor, and the Region that each of them holds."""
        return self._several if self._view is None else ((self.region, self._view),)

    @property
    def nbytes(self) -> int:
        """The bytes of all elements."""
        if self._memory is not None:
            return self._memory.numel()
        return sum(view.numel() * view.element_size() for _, view in self.views)

    def flat(self, device: str) -> torch.Tensor | None:
        """The bytes as they lie in memory, or None where they are not in order or elsewhere."""
        memory = self._memory
        if memory is None or (memory.is_cpu and device == "cpu"):
            return memory
        wanted = torch.device(device)
        same = memory.device.type == wanted.type and wanted.index in (None, memory.device.index)
        return memory if same else None

    def read_into(self, staging: torch.Tensor) -> None:
        """Copy the elements, in row-major order, into `staging` (flat uint8)."""
        for region, view in self.views:
            bits = _bits_of(view)
            self._at(staging, bits.dtype, region).copy_(bits)

    def write_from(self, staging: torch.Tensor) -> None:
        """Copy the elements out of `staging` (flat uint8), where they lie in row-major order."""
        for region, view in self.views:
            bits = _bits_of(view)
            bits.copy_(self._at(staging, bits.dtype, region))

    def copy_from(self, other: Box) -> None:
        """Copy the elements of another Box of the same Region and dtype."""
        if self._memory is not None and other._memory is not None:
            if self._memory.data_ptr() != other._memory.data_ptr():
                self._memory.copy_(other._memory)
            return
        for region, view in self.views:
            for source_region, source in other.views:
                if region == source_region:
                    if not _is_same(view, source):
                        _copy(view, source)
                    continue
                common = region.intersect(source_region)
                if common is None:
                    continue
                target = view[common.relative_to(region).slices()]
                origin = source[common.relative_to(source_region).slices()]
                if not _is_same(target, origin):
                    _copy(target, origin)

    def _at(self, staging: torch.Tensor, dtype: torch.dtype, region: Region) -> torch.Tensor:
        whole = staging.view(dtype).view(self.region.shape)
        if region is self.region:
            return whole
        return whole[region.relative_to(self.region).slices()]


def _place_of(piece: Piece, region: Region) -> Region:
    offset = tuple(place - low for place, low in zip(piece.place, piece.region.start, strict=True))
    return region.translate(offset)


def _is_whole(piece: Piece, shape: tuple[int, ...]) -> bool:
    """Whether a piece begins at the origin, globally and locally, and fills the tensor."""
    return piece.region.stop == shape and not any(piece.region.start) and not any(piece.place)


def _data_problems(data: torch.Tensor) -> list[Problem]:
    if not isinstance(data, torch.Tensor):
        return [Problem("data", "type", f"expected a Tensor, got a {type(data).__name__}")]
    if is_dtensor(data):
        return [Problem("data", "type", "give the DTensor itself, not a Shard of it")]
    # torch ends the process where the memory of a quantized tensor is viewed.
    if data.layout is not torch.strided or data.is_quantized or data.is_meta or data.is_nested:
        kind = "quantized" if data.is_quantized else "nested" if data.is_nested else data.layout
        text = f"expected a dense tensor with memory, got one that is {kind} on {data.device}"
        return [Problem("data", "layout", text)]
    return []


def _check_pieces(pieces: tuple[Piece, ...], shape: tuple[int, ...]) -> None:
    """PlanError where pieces lie outside the local `shape`, or overlap."""
    whole = Region.of_shape(shape)
    problems = [
        Problem("pieces", "bounds", f"{piece} lies outside the local shape {shape}")
        for piece in pieces
        if piece.region.ndim != whole.ndim or not whole.contains(piece.local)
    ]
    if problems:
        raise PlanError(problems)
    if len(pieces) > 1:
        around = tuple(map(max, zip(*(piece.region.stop for piece in pieces), strict=True)))
        Layout(shape=around, dtype="uint8", pieces={0: pieces})


def _bits_of(data: torch.Tensor) -> torch.Tensor:
    """The same memory, as integers of the same size: some dtypes cannot be copied as they are."""
    dtype = _CARRIERS.get(data.element_size())
    if dtype is None or data.is_conj() or data.is_neg():
        return data
    return data.view(dtype)


def _memory_of(view: torch.Tensor) -> torch.Tensor | None:
    """The bytes of a view, flat, where they lie in row-major order."""
    if not view.is_contiguous() or view.is_conj() or view.is_neg():
        return None
    if view.ndim != 1 or view.stride() != (1,):
        # One element lies in order whatever its strides, but bytes are viewed at stride 1 only.
        view = view.as_strided((view.numel(),), (1,))
    return view.view(torch.uint8)


def _copy(target: torch.Tensor, origin: torch.Tensor) -> None:
    """Copy elements of one dtype; only where both are plain memory may they go as integers."""
    if not (target.is_conj() or target.is_neg() or origin.is_conj() or origin.is_neg()):
        target, origin = _bits_of(target), _bits_of(origin)
    target.copy_(origin)


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.data_ptr() == other.data_ptr()
        and one.stride() == other.stride()
        and one.device == other.device
        and one.is_conj() == other.is_conj()
        and one.is_neg() == other.is_neg()
    )
