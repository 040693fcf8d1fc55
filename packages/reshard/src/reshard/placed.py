"""Placed: what one rank has of one tensor, and the layout of the whole tensor.

Whatever a caller hands in (a DTensor, a plain tensor, a Placed, a reference that quacks like
one) becomes an Own here, and nothing behind this module looks at it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from distcore.v1 import Layout, PlanError, Problem
from distcore.v1.runtime import dtype_name, is_dtensor, layout_of

REDUCE_OPS: Final = ("sum", "avg", "max", "min", "product")


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """A rank's local tensor of a tensor whose layout is known: any Regions, anywhere in it.

    For what no DTensor can say: experts with owners, parts of fused tensors, interleaved rows.
    `data` may be None on a rank that is not in the layout, or on the meta device where only the
    layout is of interest.
    """

    data: torch.Tensor | None
    layout: Layout


@dataclass(frozen=True, slots=True, eq=False)
class Own:
    """What a rank brings of one tensor.

    `layout` is None for a plain tensor, which every rank that brings it holds whole. `partial`
    are the mesh axes along which the tensor is still to be reduced (repeated in the layout), and
    `op` says how. `data` is the local tensor, detached; on the meta device it has no values.
    """

    shape: tuple[int, ...]
    dtype: str
    layout: Layout | None
    data: torch.Tensor
    partial: tuple[int, ...] = ()
    op: str = ""


def own_of(value: object, rank: int) -> Own | None:
    """Read what a rank was given for one key; None where it takes no part in the tensor.

    PlanError where the value is no tensor, contradicts itself, or has a placement that is not
    known.
    """
    if isinstance(value, Placed):
        own = _of_layout(value.layout, value.data, rank)
    elif is_dtensor(value):
        own = _of_dtensor(value)
    elif isinstance(value, torch.Tensor):
        shape, dtype = tuple(value.shape), dtype_name(value.dtype)
        own = Own(shape, dtype, None, value.detach())
    else:
        own = _of_reference(value, rank)
    if own is not None and own.layout is not None:
        if rank not in own.layout.ranks:
            text = f"its mesh has the ranks {own.layout.ranks}, but here the group has rank {rank}"
            raise PlanError(Problem("mesh", "rank", text))
        _check_local(own, own.layout.local_shape(rank))
    return own


def with_reading(own: Own, layout: Layout, rank: int) -> Own:
    """The same with the layout that all ranks have settled on; PlanError where it does not fit."""
    _check_local(own, layout.local_shape(rank))
    return replace(own, layout=layout)


def _check_local(own: Own, expected: tuple[int, ...]) -> None:
    local = tuple(own.data.shape)
    if local != expected and not (own.data.numel() == 0 and 0 in expected):
        text = f"the local tensor has shape {local}, but {own.layout} gives it {expected}"
        raise PlanError(Problem("local", "shape", text))
    if dtype_name(own.data.dtype) != own.dtype:
        text = f"the local tensor is {own.data.dtype}, but the tensor {own.dtype}"
        raise PlanError(Problem("local", "dtype", text))


def _of_layout(layout: Layout, data: torch.Tensor | None, rank: int) -> Own | None:
    if rank not in layout.ranks:
        if data is not None and data.numel():
            text = f"holds data, but rank {rank} is not in the layout's {layout.ranks}"
            raise PlanError(Problem("layout", "rank", text))
        return None
    if data is None:
        text = f"rank {rank} is in the layout, but has no local tensor"
        raise PlanError(Problem("layout", "missing", text))
    return Own(layout.shape, layout.dtype, layout, data.detach())


def _of_dtensor(tensor: Any) -> Own | None:
    if tensor.device_mesh.get_coordinate() is None:
        return None
    axes, op = _partial_axes(tensor.placements)
    plain = _reduced(tensor, axes) if axes else tensor
    with torch.no_grad():
        local = tensor.to_local()
    # After an asynchronous redistribute this is a tensor that is still on its way.
    arrive = getattr(local, "wait", None)
    data = (local if arrive is None else arrive()).detach()
    return Own(tuple(tensor.shape), dtype_name(tensor.dtype), layout_of(plain), data, axes, op)


def _partial_axes(placements: Sequence[Any]) -> tuple[tuple[int, ...], str]:
    """The axes along which a tensor is still to be reduced, and by which operation."""
    axes = tuple(axis for axis, placement in enumerate(placements) if placement.is_partial())
    found = [placements[axis] for axis in axes]
    ops = sorted({str(placement.reduce_op) for placement in found})
    strange = [p for p in found if type(p).__name__ != "Partial" or p.reduce_op not in REDUCE_OPS]
    if strange or len(ops) > 1:
        text = f"{found} cannot be reduced here; expected one of {', '.join(REDUCE_OPS)} throughout"
        raise PlanError(Problem("placements", "partial", text))
    return axes, ops[0] if ops else ""


def _reduced(tensor: Any, axes: tuple[int, ...]) -> Any:
    """A DTensor of the same local tensor, repeated where `tensor` is partial: for its layout."""
    from torch.distributed.tensor import DTensor, Replicate  # noqa: TID251 - knows its own kind

    placements = [
        Replicate() if axis in axes else placement
        for axis, placement in enumerate(tensor.placements)
    ]
    made = DTensor.from_local(
        tensor.to_local().detach(),
        tensor.device_mesh,
        placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
    orders = [getattr(one._spec, "shard_order", None) for one in (tensor, made)]
    if orders[0] != orders[1]:
        text = f"a partial tensor that is cut in the order {orders[0]}: redistribute it first"
        raise PlanError(Problem("placements", "partial", text))
    return made


def _of_reference(value: object, rank: int) -> Own | None:
    """A reference has a global shape, a dtype, a mesh, placements and a local tensor."""
    mesh = _first(value, "device_mesh", "mesh")
    wanted = {
        "shape": getattr(value, "shape", None),
        "dtype": getattr(value, "dtype", None),
        "mesh": mesh,
        "placements": getattr(value, "placements", None),
    }
    missing = [name for name, found in wanted.items() if found is None]
    if missing:
        text = f"a {type(value).__name__} is no tensor, and has no {', '.join(missing)}"
        raise PlanError(Problem("value", "type", text))
    ranks = _first(mesh, "mesh", "_mesh")
    ranks = mesh if ranks is None else ranks
    table = ranks.tolist() if hasattr(ranks, "tolist") else ranks
    placements = list(wanted["placements"] or ())
    axes: tuple[int, ...] = ()
    op = ""
    if all(hasattr(placement, "is_partial") for placement in placements):
        axes, op = _partial_axes(placements)
    layout = Layout.from_mesh(
        shape=tuple(wanted["shape"] or ()),
        dtype=dtype_name(wanted["dtype"]) if isinstance(wanted["dtype"], torch.dtype) else "",
        mesh=table,
        placements=[
            "R" if axis in axes else _form_of(placement)
            for axis, placement in enumerate(placements)
        ],
    )
    local = getattr(value, "_local_tensor", None)
    if local is None and hasattr(value, "to_local") and rank in layout.ranks:
        local = value.to_local()
    own = _of_layout(layout, local, rank)
    return None if own is None else replace(own, partial=axes, op=op)


def _first(value: object, *names: str) -> Any:
    return next(
        (found for name in names if (found := getattr(value, name, None)) is not None), None
    )


def _form_of(placement: object) -> str:
    """A placement, given as text or as one of torch's, in the notation of Layout.from_mesh."""
    if isinstance(placement, str):
        return placement
    dim, factor = getattr(placement, "dim", None), getattr(placement, "split_factor", 1)
    if isinstance(dim, int):
        return f"S({dim})" if factor == 1 else f"_S({dim},{factor})"
    if type(placement).__name__ == "Replicate":
        return "R"
    raise PlanError(Problem("placements", "placement", f"{placement!r} is not known here"))
