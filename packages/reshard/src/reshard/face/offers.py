"""Offers: what each rank says of the two tensors before anything is planned.

A rank outside both meshes may have neither tensor and then learns shape and dtype from the
others. A strided placement can be read in two ways that differ where cuts are uneven; every rank
says which readings its own local tensors fit, and all take the first that fits everywhere.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

import torch

from distcore.v1 import DisagreementError, Layout, PlanError, Problem
from distcore.v1 import Mesh as Nested
from distcore.v1.runtime import Shard, dtype_name
from reshard.face.duck_types import Mesh, TensorLike
from reshard.face.local_parts import global_shape, local_tensor, same_device, tensor_metadata
from reshard.face.meshes import mesh_signature, shard_dim, validate_mesh

NAMES: Final = ("src_tensor", "dst_tensor")
READINGS: Final = ("order", "index")
MAX_NDIM: Final = 64
DIGEST_NBYTES: Final = 16
_ROW: Final = struct.Struct(f"<{DIGEST_NBYTES}s?32s2BB{MAX_NDIM}q")
_ALL: Final = 0b11
FAILED: Final = b"\xff" * _ROW.size
"""The row of a rank that could not read what it was given."""


@dataclass(frozen=True, slots=True)
class Side:
    """The mesh of one side and its placements in the notation of Layout.from_mesh."""

    name: str
    mesh: Nested
    ranks: tuple[int, ...]
    forms: tuple[str, ...]

    @classmethod
    def of(cls, name: str, mesh: Mesh, placements: Sequence[object]) -> Side:
        """Read a side; ValueError and NotImplementedError where it cannot be read."""
        sizes, ranks = mesh_signature(mesh)
        validate_mesh(sizes, ranks, placements, name.removesuffix("_tensor"))
        return cls(name, _nested(sizes, ranks), ranks, tuple(map(form_of, placements)))

    def layout(self, shape: tuple[int, ...], dtype: str, reading: str) -> Layout:
        """The layout of a tensor placed so; PlanError names the side."""
        try:
            return Layout.from_mesh(
                shape=shape,
                dtype=dtype,
                mesh=self.mesh,
                placements=self.forms,
                reading="index" if reading == "index" else "order",
            )
        except PlanError as error:
            problems = [Problem(f"{self.name} {p.where}", p.kind, p.text) for p in error.problems]
            raise PlanError(problems) from None

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for sides that are alike."""
        return self.ranks, str(self.mesh), self.forms

    @property
    def is_strided(self) -> bool:
        """Whether it can be read in two ways."""
        return any(form.startswith("_S") for form in self.forms)


@dataclass(frozen=True, slots=True)
class Offer:
    """What one rank has: its local tensors, and which readings they fit (a bit each, per side).

    `shape` and `dtype` are None where the rank has neither tensor.
    """

    shape: tuple[int, ...] | None
    dtype: str | None
    locals: tuple[torch.Tensor | None, torch.Tensor | None]
    fits: tuple[int, int]

    @classmethod
    def of(
        cls,
        rank: int,
        tensors: tuple[TensorLike | None, TensorLike | None],
        sides: tuple[Side, Side],
    ) -> Offer:
        """Read what `rank` has; PlanError lists all that is wrong with it."""
        shape, dtype = None, None
        if any(tensor is not None for tensor in tensors):
            shape, _, given = tensor_metadata(*tensors)
            dtype = dtype_name(given)
        found: list[torch.Tensor | None] = []
        fits: list[int] = []
        problems: list[Problem] = []
        for tensor, side in zip(tensors, sides, strict=True):
            try:
                local, mask = _read(rank, tensor, side)
            except PlanError as error:
                problems += error.problems
                continue
            found.append(local)
            fits.append(mask)
        if problems:
            raise PlanError(problems)
        return cls(shape, dtype, (found[0], found[1]), (fits[0], fits[1]))

    def encode(self, told: Mapping[str, str]) -> bytes:
        """The row by which the others learn of it, and whether `told` is equal; of one length."""
        text = json.dumps(told, sort_keys=True)
        digest = blake2b(text.encode(), digest_size=DIGEST_NBYTES).digest()
        dims = (*(self.shape or ()), *[0] * MAX_NDIM)[:MAX_NDIM]
        name = (self.dtype or "").encode()
        has, ndim = self.shape is not None, len(self.shape or ())
        return _ROW.pack(digest, has, name, *self.fits, ndim, *dims)


@dataclass(frozen=True, slots=True)
class Terms:
    """What all ranks have together: one tensor, and how its placements are to be read."""

    shape: tuple[int, ...]
    dtype: str
    readings: tuple[str, str]


def terms_of(rows: Sequence[bytes], ranks: Sequence[int]) -> Terms:
    """Put the rows of all ranks together.

    A pure function of the rows, so that all ranks find the same, or raise the same: PlanError
    where no rank has a tensor, or no reading fits all, DisagreementError where they differ.
    """
    told: dict[int, tuple[str, tuple[int, ...]]] = {}
    fits = [_ALL, _ALL]
    for rank, row in zip(ranks, rows, strict=True):
        _, has, name, src_fits, dst_fits, ndim, *dims = _ROW.unpack(row)
        fits = [fits[0] & src_fits, fits[1] & dst_fits]
        if has:
            told[rank] = name.rstrip(b"\0").decode(), tuple(dims[:ndim])
    if not told:
        raise PlanError(Problem("src_tensor", "missing", "no rank has a tensor"))
    if len(set(told.values())) > 1:
        values = {rank: f"{dtype} {list(shape)}" for rank, (dtype, shape) in told.items()}
        raise DisagreementError("dtype and global shape of src_tensor and dst_tensor", values)
    readings = []
    for name, mask in zip(NAMES, fits, strict=True):
        if not mask:
            text = "no one reading of its strided placements fits the local shapes of all ranks"
            raise PlanError(Problem(name, "reading", text))
        readings.append(READINGS[0] if mask & 1 else READINGS[1])
    dtype, shape = next(iter(told.values()))
    return Terms(shape, dtype, (readings[0], readings[1]))


def digest_in(row: bytes) -> bytes:
    """The digest of what a rank told with its offer."""
    return row[:DIGEST_NBYTES]


def form_of(placement: object) -> str:
    """A placement in the notation of Layout.from_mesh; NotImplementedError for any other."""
    factor = getattr(placement, "split_factor", None)
    if factor is not None:
        return f"_S({getattr(placement, 'dim', None)},{factor})"
    dim = shard_dim(placement)
    return "R" if dim is None else f"S({dim})"


def _read(rank: int, tensor: TensorLike | None, side: Side) -> tuple[torch.Tensor | None, int]:
    """The local tensor of one side, detached, and the readings that it fits."""
    local = local_tensor(tensor)
    where = f"{side.name} of rank {rank}"
    if rank not in side.ranks:
        # A DTensor of a rank outside its mesh has a local tensor without elements.
        if local is not None and local.numel():
            text = f"a local tensor of shape {tuple(local.shape)} outside the mesh {side.mesh}"
            raise PlanError(Problem(where, "rank", text))
        return None, _ALL
    if tensor is None or local is None:
        raise PlanError(Problem(where, "missing", f"none was given, but it is in {side.mesh}"))
    problems = []
    if local.dtype != tensor.dtype:
        text = f"the local tensor is {local.dtype}, the tensor {tensor.dtype}"
        problems.append(Problem(where, "dtype", text))
    if not same_device(local.device, torch.device(tensor.device)):
        text = f"the local tensor is on {local.device}, the tensor on {tensor.device}"
        problems.append(Problem(where, "device", text))
    if problems:
        raise PlanError(problems)
    shape, dtype = global_shape(tensor), dtype_name(tensor.dtype)
    expected = [
        side.layout(shape, dtype, reading).local_shape(rank)
        for reading in (READINGS if side.is_strided else READINGS[:1])
    ]
    mask = sum(1 << at for at, one in enumerate(expected) if _fits(local, one))
    if not mask:
        planned = " or ".join(str(one) for one in dict.fromkeys(expected))
        text = f"the planned shape is {planned}, got {tuple(local.shape)}"
        raise PlanError(Problem(where, "shape", text))
    Shard(local, ())  # refuses what has no memory of its own
    return local.detach(), mask if side.is_strided else _ALL


def _nested(sizes: Sequence[int], ranks: Sequence[int]) -> Nested:
    """Row-major ranks as lists in lists; a list for every axis, and a rank where there is none."""
    if not sizes:
        return ranks[0]
    level: list[Nested] = list(ranks)
    for size in reversed(sizes[1:]):
        level = [level[at : at + size] for at in range(0, len(level), size)]
    return level


def _fits(local: torch.Tensor, expected: tuple[int, ...]) -> bool:
    """Whether it has the shape, or both have no elements."""
    return tuple(local.shape) == expected or (local.numel() == 0 and 0 in expected)
