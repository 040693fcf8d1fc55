"""Layouts of real tensors: the one place that knows DTensor.

torch reads a strided placement in two ways that differ for uneven sizes (see
`distcore.v1.placement`), and its own offset helper follows only one of them. So what a DTensor
says of itself is checked against the local tensor that torch really made. One rank alone cannot
always tell the two readings apart. All ranks together can where two mesh axes cut a dim: then their
local shapes are never all equal. Where three axes cut one dim they may be; then the reading that
FSDP2 and `redistribute` produce is taken.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from math import prod
from operator import and_
from typing import TYPE_CHECKING, Final, TypeGuard, cast

import torch

from distcore.v1.channel import Channel
from distcore.v1.dtypes import ITEMSIZES
from distcore.v1.errors import PlanError, Problem
from distcore.v1.header import NBYTES, digest16
from distcore.v1.layout import Layout
from distcore.v1.placement import Placement, Reading
from distcore.v1.runtime.agree import agree, run_together
from distcore.v1.runtime.deadline import Deadline

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)


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


def is_dtensor(tensor: object) -> TypeGuard[DTensor]:
    """Whether it is a DTensor (without importing DTensor where nobody has)."""
    if type(tensor) in _PLAIN:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The caller's own part of a tensor, detached, sharing its memory."""
    if not is_dtensor(tensor):
        return tensor.detach()
    with torch.no_grad():
        local = tensor.to_local()
    # After an asynchronous redistribute this is a tensor that is still on its way.
    arrive = getattr(local, "wait", None)
    return (local if arrive is None else cast("torch.Tensor", arrive())).detach()


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
        return layouts_of({"tensor": tensor}, channel, ranks=ranks)["tensor"]
    found = readings_of(tensor, (0,) if ranks is None else tuple(ranks))
    fitting = [layout for layout in found if fits(layout, tensor)]
    if not fitting:
        raise PlanError(_misfit("tensor", found, tensor))
    return fitting[0]


def layouts_of(
    tensors: Mapping[str, torch.Tensor],
    channel: Channel,
    *,
    ranks: Iterable[int] | None = None,
    timeout_s: float | None = None,
) -> dict[str, Layout]:
    """The layouts of many tensors, proven by the local shapes of all ranks of the channel.

    Collective; two small exchanges whatever the number of tensors, and a third of a few bytes
    per tensor only where some placement can be read in two ways. Every rank gives the same keys.

    Raises PeerError on every rank where one has a tensor that fits no reading (its own PlanError
    where all have the same), DisagreementError where the ranks describe a tensor differently.
    """
    deadline = Deadline.after(timeout_s)
    members = tuple(channel.ranks if ranks is None else ranks)

    def describe() -> dict[str, tuple[Layout, ...]]:
        found = {key: readings_of(tensor, members) for key, tensor in tensors.items()}
        problems = [
            _misfit(key, readings, tensors[key])
            for key, readings in found.items()
            if not any(fits(layout, tensors[key]) for layout in readings)
        ]
        if problems:
            raise PlanError(problems)
        return found

    label = "describe the layouts of tensors"
    found = run_together(label, describe, channel, timeout_s=deadline.left_s())
    texts = {key: _text_of(readings[0]) for key, readings in found.items()}
    agree("the tensors' layouts", texts, channel, timeout_s=deadline.left_s())
    open_keys = [key for key in sorted(found) if len(found[key]) > 1]
    chosen = {key: readings[0] for key, readings in found.items()}
    if open_keys:
        masks = [mask_of(found[key], tensors[key]) for key in open_keys]
        common = common_readings(masks, channel, timeout_s=deadline.left_s())
        chosen |= settled({key: found[key] for key in open_keys}, common)
    return chosen


def readings_of(tensor: torch.Tensor, ranks: tuple[int, ...] = (0,)) -> tuple[Layout, ...]:
    """Every layout that the tensor's own description allows: one, or two that differ."""
    dtype = dtype_name(tensor.dtype)
    if not is_dtensor(tensor):
        return (Layout.replicated(shape=tuple(tensor.shape), dtype=dtype, ranks=ranks),)
    mesh = tensor.device_mesh.mesh.tolist()
    sizes = tuple(tensor.device_mesh.mesh.shape)
    forms = _forms(tensor, sizes)
    shape = tuple(tensor.shape)

    def read(reading: Reading) -> Layout:
        return Layout.from_mesh(
            shape=shape, dtype=dtype, mesh=mesh, placements=forms, reading=reading
        )

    first = read("order")
    if _reads_alike(first):
        return (first,)
    second = read("index")
    if all(same_pieces(first, second, rank) for rank in first.ranks):
        return (first,)
    return (first, second)


def mask_of(readings: tuple[Layout, ...], tensor: torch.Tensor) -> int:
    """Which readings fit the caller's local tensor: bit i for the i-th."""
    return sum(fits(layout, tensor) << i for i, layout in enumerate(readings))


def common_readings(
    masks: Sequence[int], channel: Channel, *, timeout_s: float | None = None
) -> list[int]:
    """For each tensor the readings that fit on all ranks, as a mask. Collective."""
    row = bytes(masks).ljust(-(-len(masks) // NBYTES) * NBYTES, b"\0")
    rows = channel.all_gather(row, timeout_s=timeout_s)
    return [reduce(and_, column) for column in zip(*rows, strict=True)][: len(masks)]


def settled(found: Mapping[str, tuple[Layout, ...]], common: Sequence[int]) -> dict[str, Layout]:
    """For each key the first reading that all ranks have in common; PlanError where none is.

    A key without readings here counts among the errors alone, which are thus the same on all
    ranks.
    """
    text = "the local shapes of the ranks fit neither reading of its strided placement"
    chosen: dict[str, Layout] = {}
    problems = []
    for (key, readings), mask in zip(found.items(), common, strict=True):
        if not mask:
            problems.append(Problem(key, "layout", text))
        elif readings:
            chosen[key] = readings[0 if mask & 1 else 1]
    if problems:
        raise PlanError(problems)
    return chosen


def _text_of(layout: Layout) -> str:
    """What must be equal on all ranks; the ranks of a large mesh stand in it as a digest."""
    form = layout.form
    ranks = "" if form is None else digest16(str(form.ranks))[:4].hex()
    return f"{layout!r} {ranks}"


def _reads_alike(layout: Layout) -> bool:
    """Whether a glance tells that there is one reading: no cut is strided, or all are even."""
    form = layout.form
    if form is None or all(placement.split_factor == 1 for placement in form.placements):
        return True
    return all(
        n % prod(k for k, p in zip(form.sizes, form.placements, strict=True) if p.dim == dim) == 0
        for dim, n in enumerate(layout.shape)
    )


def same_pieces(first: Layout, second: Layout, rank: int) -> bool:
    """Whether two layouts give a rank the same elements at the same places."""
    one, other = (
        [piece for piece in layout.pieces(rank) if not piece.region.is_empty]
        for layout in (first, second)
    )
    return one == other


def _forms(tensor: DTensor, sizes: tuple[int, ...]) -> list[str]:
    """The placements of a DTensor in the notation of Layout.from_mesh."""
    forms = []
    for axis, placement in enumerate(tensor.placements):
        if placement.is_partial():
            text = f"axis {axis} is {placement}: sum it first (redistribute to Replicate or Shard)"
            raise PlanError(Problem("placements", "partial", text))
        # A strided placement was a kind of Shard before torch 2.10: look at what it carries.
        dim, factor = getattr(placement, "dim", None), getattr(placement, "split_factor", 1)
        if placement.is_replicate():
            forms.append("R")
        elif isinstance(dim, int) and isinstance(factor, int):
            forms.append(str(Placement(dim % max(1, tensor.ndim), factor)))
        else:
            text = f"axis {axis} is {placement}, which is not known here"
            raise PlanError(Problem("placements", "placement", text))
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


def fits(layout: Layout, tensor: torch.Tensor) -> bool:
    """Whether the caller's local tensor has the shape that the layout gives it."""
    if not is_dtensor(tensor):
        return True
    rank = _own_rank(tensor, layout)
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
