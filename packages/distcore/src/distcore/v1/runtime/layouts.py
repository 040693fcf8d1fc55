"""Layouts of real tensors: the one place that knows DTensor.

torch reads a strided placement in two ways that differ for uneven sizes (see
`distcore.v1.placement`), and its own offset helper follows only one of them. So what a DTensor
says of itself is checked against the local tensor that torch really made. One rank alone cannot
always tell the two readings apart; all ranks together can, since their local shapes are never all
equal where the readings differ.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Final, cast

import torch

from distcore.v1.channel import Channel
from distcore.v1.dtypes import ITEMSIZES
from distcore.v1.errors import PlanError, Problem
from distcore.v1.header import NBYTES
from distcore.v1.layout import Layout
from distcore.v1.placement import Placement, Reading
from distcore.v1.runtime.agree import agree, run_together

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_READINGS: Final[tuple[Reading, Reading]] = ("order", "index")


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype as layouts and plans carry it, such as `"bfloat16"`."""
    name = str(dtype).removeprefix("torch.")
    if name not in ITEMSIZES:
        raise PlanError(Problem("dtype", "dtype", f"torch's dtype {name!r} is not known here"))
    return name


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a name; PlanError where this torch has none."""
    dtype = getattr(torch, name, None)
    if name not in ITEMSIZES or not isinstance(dtype, torch.dtype):
        raise PlanError(Problem("dtype", "dtype", f"this torch has no dtype {name!r}"))
    return dtype


def is_dtensor(tensor: object) -> bool:
    """Whether it is a DTensor (without importing DTensor where nobody has)."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The caller's own part of a tensor, detached, sharing its memory."""
    if not is_dtensor(tensor):
        return tensor.detach()
    with torch.no_grad():
        local = cast("DTensor", tensor).to_local()
    return local.detach()


def layout_of(
    tensor: torch.Tensor,
    channel: Channel | None = None,
    *,
    ranks: Iterable[int] | None = None,
) -> Layout:
    """The layout of a tensor as torch really made it.

    A plain tensor is held whole by each of `ranks` (default: the ranks of `channel`, or rank 0
    where there is none). A DTensor may have any mesh, uneven and empty shards, `_StridedShard`.

    With a channel this is collective over it, every rank calls it for the same tensor, and the
    layout is proven by the local shapes of all ranks. Without one only the caller's own local
    shape is checked, and where both readings of a strided placement fit it, the reading that
    FSDP2 and `redistribute` produce is taken.

    Raises PlanError where a placement is partial or the local tensor fits no reading.
    """
    if channel is not None:
        members = tuple(channel.ranks if ranks is None else ranks)
        return layouts_of({"tensor": tensor}, channel, ranks=members)["tensor"]
    found = _candidates(tensor, (0,) if ranks is None else tuple(ranks))
    fitting = [layout for layout in found if _fits(layout, tensor)]
    if not fitting:
        raise PlanError(_misfit("tensor", found, tensor))
    return fitting[0]


def layouts_of(
    tensors: Mapping[str, torch.Tensor],
    channel: Channel,
    *,
    ranks: Sequence[int] | None = None,
) -> dict[str, Layout]:
    """The layouts of many tensors, proven by the local shapes of all ranks of the channel.

    Collective; two small exchanges whatever the number of tensors, and a third of a few bytes
    per tensor only where some placement can be read in two ways. Every rank gives the same keys.
    """
    members = tuple(channel.ranks if ranks is None else ranks)

    def describe() -> dict[str, tuple[Layout, ...]]:
        found = {key: _candidates(tensor, members) for key, tensor in tensors.items()}
        problems = [
            _misfit(key, candidates, tensors[key])
            for key, candidates in found.items()
            if not any(_fits(layout, tensors[key]) for layout in candidates)
        ]
        if problems:
            raise PlanError(problems)
        return found

    found = run_together("describe the layouts of tensors", describe, channel)
    agree("the tensors' layouts", {key: repr(c) for key, c in found.items()}, channel)
    open_keys = [key for key in sorted(found) if len(found[key]) > 1]
    chosen = {key: candidates[0] for key, candidates in found.items()}
    if open_keys:
        fits = [[_fits(layout, tensors[key]) for layout in found[key]] for key in open_keys]
        chosen.update(_settle(open_keys, found, fits, channel))
    return chosen


def _settle(
    keys: list[str],
    found: Mapping[str, tuple[Layout, ...]],
    fits: list[list[bool]],
    channel: Channel,
) -> dict[str, Layout]:
    """For each key the first reading that fits the local shapes of all ranks."""
    row = bytes(sum(fit << i for i, fit in enumerate(reading)) for reading in fits)
    rows = channel.all_gather(row.ljust(-(-len(row) // NBYTES) * NBYTES, b"\0"))
    chosen, problems = {}, []
    for at, key in enumerate(keys):
        common = 0b11
        for peer in rows:
            common &= peer[at]
        if not common:
            text = "the local shapes of the ranks fit neither reading of its strided placement"
            problems.append(Problem(key, "layout", text))
        else:
            chosen[key] = found[key][0 if common & 1 else 1]
    if problems:
        raise PlanError(problems)
    return chosen


def _candidates(tensor: torch.Tensor, ranks: tuple[int, ...]) -> tuple[Layout, ...]:
    """Every layout that the tensor's own description allows: one, or two that differ."""
    dtype = dtype_name(tensor.dtype)
    if not is_dtensor(tensor):
        return (Layout.replicated(shape=tuple(tensor.shape), dtype=dtype, ranks=ranks),)
    placed = cast("DTensor", tensor)
    mesh = placed.device_mesh.mesh.tolist()
    sizes = tuple(placed.device_mesh.mesh.shape)
    forms = _forms(placed, sizes)
    first, second = (
        Layout.from_mesh(
            shape=tuple(placed.shape), dtype=dtype, mesh=mesh, placements=forms, reading=reading
        )
        for reading in _READINGS
    )
    if not any(form.startswith("_S") for form in forms) or _same_pieces(first, second):
        return (first,)
    return (first, second)


def _same_pieces(first: Layout, second: Layout) -> bool:
    return all(first.pieces(rank) == second.pieces(rank) for rank in first.ranks)


def _forms(tensor: DTensor, sizes: tuple[int, ...]) -> list[str]:
    """The placements of a DTensor in the notation of Layout.from_mesh."""
    forms = []
    for axis, placement in enumerate(tensor.placements):
        if placement.is_partial():
            text = f"axis {axis} is {placement}: sum it first (redistribute to Replicate or Shard)"
            raise PlanError(Problem("placements", "partial", text))
        dim = getattr(placement, "dim", None)
        # A strided placement was a kind of Shard before torch 2.10: look at what it carries.
        factor = getattr(placement, "split_factor", None)
        if dim is None:
            forms.append("R")
        else:
            forms.append(str(Placement(int(dim), int(factor or 1))))
    return _ordered(forms, getattr(tensor._spec, "shard_order", None), sizes)


def _ordered(forms: list[str], order: object, sizes: tuple[int, ...]) -> list[str]:
    """Write an explicit order of cuts, where torch gives one, as split factors."""
    if not isinstance(order, tuple) or any(form.startswith("_S") for form in forms):
        return forms
    for entry in order:
        axes = list(entry.mesh_dims)
        for axis in axes:
            earlier = [a for a in axes[: axes.index(axis)] if a > axis]
            forms[axis] = str(Placement(int(entry.tensor_dim), prod(sizes[a] for a in earlier)))
    return forms


def _fits(layout: Layout, tensor: torch.Tensor) -> bool:
    """Whether the caller's local tensor has the shape that the layout gives it."""
    if not is_dtensor(tensor):
        return True
    rank = _own_rank(cast("DTensor", tensor), layout)
    local = tuple(local_tensor(tensor).shape)
    if rank is None:
        return prod(local) == 0
    expected = layout.local_shape(rank)
    return local == expected or prod(local) == prod(expected) == 0


def _own_rank(tensor: DTensor, layout: Layout) -> int | None:
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None or layout.form is None:
        return None
    position = 0
    for size, digit in zip(layout.form.sizes, coordinate, strict=True):
        position = position * size + digit
    return layout.form.ranks[position]


def _misfit(key: str, found: tuple[Layout, ...], tensor: torch.Tensor) -> Problem:
    local = tuple(local_tensor(tensor).shape)
    rank = _own_rank(cast("DTensor", tensor), found[0])
    expected = " or ".join(str(c.local_shape(rank)) for c in found) if rank is not None else "(0,)"
    return Problem(key, "layout", f"rank {rank} holds {local}, but {found[0]} gives it {expected}")
