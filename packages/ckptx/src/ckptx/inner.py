"""Inner tensors: the plain tensors that a tensor of some other class is made of.

A quantised tensor is a class of its own with codes and scales inside. It moves as those, bit for
bit, and is never converted. The object around them is not sent: the receiver has one of its own.
"""

from __future__ import annotations

import json
import re
from typing import Final, cast

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ckptx.errors import CheckpointPlanError
from distcore.v1 import Problem
from distcore.v1.runtime import dtype_name, is_dtensor

_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)
_ADDRESS: Final = re.compile(r" at 0x[0-9a-f]+")


def inner_tensors(tensor: torch.Tensor, name: str = "") -> dict[str, torch.Tensor]:
    """The plain tensors inside, sharing their memory, each under its path.

    A plain tensor is its own only one, under the name "". CheckpointPlanError for a DTensor, and
    for a class that neither has memory of its own nor tells what is inside (with
    `__tensor_flatten__`).
    """
    if type(tensor) in _PLAIN:
        return {name: tensor.detach()}
    if is_dtensor(tensor):
        text = "is a DTensor; a shard holds the local tensor (`to_local()`)"
        raise CheckpointPlanError(Problem("data", "type", text))
    if is_traceable_wrapper_subclass(tensor):
        found: dict[str, torch.Tensor] = {}
        for attribute in tensor.__tensor_flatten__()[0]:
            found |= inner_tensors(getattr(tensor, attribute), f"{name}.{attribute}")
        return found
    text = f"a {type(tensor).__name__} has no memory and no __tensor_flatten__"
    with torch._C.DisableTorchFunctionSubclass():
        try:
            plain = tensor.detach().as_subclass(torch.Tensor)
        except RuntimeError as error:  # torch 2.9 has no plain view of such a class
            raise CheckpointPlanError(Problem("data", "type", text)) from error
        if plain.numel() and not plain.is_meta and not plain.data_ptr():
            raise CheckpointPlanError(Problem("data", "type", text))
    return {name: plain}


def inner_form(tensor: torch.Tensor) -> str | None:
    """What two tensors of a class must have in common to be filled from each other.

    A JSON list: the class and its own description, then path, dtype and shape of every inner
    tensor. None for a tensor that is its own only one.
    """
    if type(tensor) in _PLAIN or not is_traceable_wrapper_subclass(tensor):
        return None
    inner = [
        [name, dtype_name(part.dtype), list(part.shape)]
        for name, part in inner_tensors(tensor).items()
    ]
    return json.dumps([_outline(tensor), inner])


def parts_of(form: str) -> list[tuple[str, str, tuple[int, ...]]]:
    """The inner tensors that a form tells of: path, dtype and shape of each."""
    return [(name, dtype, tuple(shape)) for name, dtype, shape in json.loads(form)[1]]


def empty_tensor(
    shape: tuple[int, ...], dtype: torch.dtype, device: str | torch.device | None
) -> torch.Tensor:
    """A new contiguous tensor. It is made as bytes: for some dtypes torch warns otherwise."""
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    return torch.empty(nbytes, dtype=torch.uint8, device=device).view(dtype).view(shape)


def is_float8tensor(tensor: torch.Tensor) -> bool:
    """Whether it is a quantised tensor of Transformer Engine, of which version ever.

    Told by the names of its classes, so that Transformer Engine need not be there.
    """
    return any(
        kind.__module__.split(".")[0] == "transformer_engine"
        and kind.__name__ in {"Float8Tensor", "QuantizedTensor"}
        for kind in type(tensor).__mro__
    )


def _outline(tensor: torch.Tensor) -> list[object]:
    """The class of a tensor, what it says of itself, and the same of the classes inside."""
    kind = type(tensor)
    attributes, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    nested = [getattr(tensor, attribute) for attribute in attributes]
    return [
        f"{kind.__module__}.{kind.__qualname__}",
        # Two objects that are alike may well lie at different addresses.
        _ADDRESS.sub("", repr(context)),
        [_outline(cast("torch.Tensor", p)) for p in nested if is_traceable_wrapper_subclass(p)],
    ]
