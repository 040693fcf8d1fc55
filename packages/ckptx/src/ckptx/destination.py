"""Destination: what one rank wants filled, as it stands in the caller's state dict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch

from ckptx.errors import CheckpointPlanError
from distcore.v1 import Layout, Problem
from distcore.v1.runtime import is_dtensor, layout_of

if TYPE_CHECKING:
    pass

StateDict: TypeAlias = Mapping[str, object]


def tensors_of(state_dict: StateDict) -> dict[str, torch.Tensor]:
    """The tensors of a state dict by key; the names of nested dicts are joined with '.'.

    CheckpointPlanError names everything that cannot be filled: a leaf that is no tensor, a key
    that is no string or that two leaves share, memory that is not there or is used twice.
    """
    found: dict[str, torch.Tensor] = {}
    problems: list[Problem] = []
    for key, leaf in _leaves(state_dict, ""):
        if key in found:
            problems.append(Problem(key, "duplicate", "two entries have this name"))
        elif isinstance(leaf, torch.Tensor):
            found[key] = leaf
            problems += _unfit(key, leaf)
        elif isinstance(leaf, Problem):
            problems.append(leaf)
        else:
            text = (
                f"a {type(leaf).__name__} cannot be filled; only tensors are stored in this format"
            )
            problems.append(Problem(key, "leaf", text))
    if problems:
        raise CheckpointPlanError(problems)
    return found


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


def _leaves(node: StateDict, prefix: str) -> Iterator[tuple[str, object]]:
    for name, value in node.items():
        key = f"{prefix}{name}"
        if not isinstance(name, str):
            yield key, Problem(key, "key", f"the name {name!r} is not a string")
        elif isinstance(value, Mapping):
            yield from _leaves(value, f"{key}.")
        else:
            yield key, value


def _unfit(key: str, tensor: torch.Tensor) -> list[Problem]:
    """What keeps the tensor's memory from being written."""
    local = _local(tensor)
    if type(local).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        text = f"a {type(local).__name__} has no plain memory; give its inner tensors by name"
        return [Problem(key, "type", text)]
    if local.layout != torch.strided:
        return [Problem(key, "memory", f"its memory is {local.layout}, not strided")]
    if local.is_meta:
        return [Problem(key, "memory", "it is on the meta device; use to_empty(device=...) first")]
    if any(step == 0 and size > 1 for step, size in zip(local.stride(), local.shape, strict=True)):
        text = f"its strides {local.stride()} let elements share memory; give it memory of its own"
        return [Problem(key, "memory", text)]
    return []


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
