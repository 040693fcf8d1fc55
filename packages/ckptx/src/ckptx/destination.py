"""Destination: tensors to be filled or saved, their layouts, and what keeps them from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ckptx.errors import CheckpointPlanError
from distcore.v1 import Layout, Problem
from distcore.v1.runtime import Shard, is_dtensor, layout_of


def unfilled(tensors: Mapping[str, torch.Tensor]) -> list[Problem]:
    """What keeps memory from being written: it is not there, not dense, or used twice."""
    return [problem for key, tensor in tensors.items() for problem in _unfit(key, tensor)]


def unsaved(tensors: Mapping[str, torch.Tensor]) -> list[Problem]:
    """What keeps memory from being saved: it is not there, or not dense."""
    found = []
    for key, tensor in tensors.items():
        problem = _unplain(key, _local(tensor))
        found += [problem] if problem is not None else []
    return found


def shard_of(tensor: torch.Tensor, layout: Layout, rank: int, *, given: bool) -> Shard:
    """The local memory of a tensor with the regions that lie in it."""
    if given:
        return Shard(tensor.detach(), layout.pieces(rank))
    return Shard.of(tensor, rank, layout)


def layouts_here(
    tensors: Mapping[str, torch.Tensor],
    given: Mapping[str, Layout],
    rank: int,
    ranks: Sequence[int],
) -> dict[str, Layout]:
    """The layout of each tensor as this rank sees it: as `given`, or as the tensor itself says.

    A plain tensor without a given layout is held whole by all of `ranks`.
    """
    problems = [
        Problem(key, "unknown", "a layout is given, but the state dict has no such tensor")
        for key in given
        if key not in tensors
    ]
    found: dict[str, Layout] = {}
    for key, tensor in tensors.items():
        try:
            found[key] = given[key] if key in given else layout_of(tensor, ranks=ranks)
        except ValueError as error:
            nested = getattr(error, "problems", ())
            problems += [Problem(key, problem.kind, problem.text) for problem in nested]
            if not nested:
                problems.append(Problem(key, "layout", str(error)))
        else:
            if key in given:
                problems += _misfit(key, tensor, given[key], rank)
    if problems:
        raise CheckpointPlanError(problems)
    return found


def _unfit(key: str, tensor: torch.Tensor) -> list[Problem]:
    """What keeps the tensor's memory from being written."""
    local = _local(tensor)
    problem = _unplain(key, local)
    if problem is not None:
        return [problem]
    if any(step == 0 and size > 1 for step, size in zip(local.stride(), local.shape, strict=True)):
        text = f"its strides {local.stride()} let elements share memory; give it memory of its own"
        return [Problem(key, "memory", text)]
    return []


def _unplain(key: str, local: torch.Tensor) -> Problem | None:
    """What keeps the tensor's memory from being seen as bytes."""
    if type(local).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        text = f"a {type(local).__name__} has no plain memory; give its inner tensors by name"
        return Problem(key, "type", text)
    if local.layout != torch.strided:
        return Problem(key, "memory", f"its memory is {local.layout}, not strided")
    if local.is_meta:
        return Problem(key, "memory", "it is on the meta device; use to_empty(device=...) first")
    return None


def _local(tensor: torch.Tensor) -> torch.Tensor:
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def _misfit(key: str, tensor: torch.Tensor, layout: Layout, rank: int) -> list[Problem]:
    """How a tensor does not fit the layout that was given for it."""
    if is_dtensor(tensor):
        return [Problem(key, "layout", "a layout is given, but a DTensor has its own")]
    if rank not in layout.ranks:
        return []
    shape, dtype = layout.local_shape(rank), str(tensor.dtype).removeprefix("torch.")
    if (tuple(tensor.shape), dtype) == (shape, layout.dtype):
        return []
    text = (
        f"the given layout needs {layout.dtype} {shape} on rank {rank}, "
        f"the tensor is {dtype} {tuple(tensor.shape)}"
    )
    return [Problem(key, "layout", text)]
