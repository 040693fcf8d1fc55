"""Local parts: what the calling rank has of the two tensors, held against the plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reshard.face.duck_types import Regions, TensorLike
from reshard.face.regions import region_shape

if TYPE_CHECKING:
    import torch

_SIDES = {"src": "source", "dst": "destination"}


def local_tensor(tensor: object) -> torch.Tensor | None:
    """The caller's part of a tensor, as it is; None where there is no tensor or no part of it.

    ValueError where a tensor has neither `_local_tensor` nor `to_local`.
    """
    if tensor is None:
        return None
    local: Any
    if hasattr(tensor, "_local_tensor"):
        local = tensor._local_tensor
    elif hasattr(tensor, "to_local"):
        local = tensor.to_local()
    else:
        text = f"a {type(tensor).__name__} does not expose its local tensor"
        raise ValueError(f"{text}: expected an attribute _local_tensor or a method to_local")
    # After an asynchronous redistribute it is a tensor that is still on its way.
    arrive = getattr(local, "wait", None)
    found: torch.Tensor | None = local if arrive is None else arrive()
    return found


def tensor_metadata(
    src_tensor: TensorLike | None, dst_tensor: TensorLike | None
) -> tuple[tuple[int, ...], torch.device, torch.dtype]:
    """Global shape, device and dtype; ValueError where there is no tensor, or the two differ."""
    given = src_tensor if src_tensor is not None else dst_tensor
    if given is None:
        raise ValueError("this rank has neither a source nor a destination tensor; expected one")
    shape = global_shape(given)
    if src_tensor is not None and dst_tensor is not None:
        other = global_shape(dst_tensor)
        if shape != other:
            raise ValueError(f"the global shapes differ: source {shape}, destination {other}")
        if src_tensor.dtype != dst_tensor.dtype:
            text = f"source {src_tensor.dtype}, destination {dst_tensor.dtype}"
            raise ValueError(f"the dtypes differ: {text}")
    return shape, given.device, given.dtype


def global_shape(tensor: TensorLike) -> tuple[int, ...]:
    """The global shape as plain ints."""
    return tuple(int(n) for n in tensor.shape)


def validate_local_inputs(  # noqa: PLR0917 - the signature that users know
    rank: int,
    src_tensor: TensorLike | None,
    dst_tensor: TensorLike | None,
    src_regions: Regions,
    dst_regions: Regions,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """ValueError where the local tensors of `rank` are not those that the plan counts on."""
    sides = ("src", src_tensor, src_regions), ("dst", dst_tensor, dst_regions)
    for name, tensor, regions in sides:
        side = _SIDES[name]
        local = local_tensor(tensor)
        region = regions.get(rank)
        where = f"{name}_tensor of rank {rank}"
        if region is None:
            if local is not None:
                text = f"a local tensor of shape {tuple(local.shape)} on a non-{side} rank"
                raise ValueError(f"{where}: {text}; {name}_mesh has {sorted(regions)}")
            continue
        if local is None:
            text = f"rank {rank} did not receive a {side} tensor"
            raise ValueError(f"{text}, but is in {name}_mesh {sorted(regions)}")
        if tuple(local.shape) != region_shape(region):
            text = f"the planned shape is {region_shape(region)}, got {tuple(local.shape)}"
            raise ValueError(f"{where}: {text}")
        if local.dtype != dtype or not same_device(local.device, device):
            text = f"{local.dtype} on {local.device} does not match {dtype} on {device}"
            raise ValueError(f"{where}: {text}")


def same_device(one: torch.device, other: torch.device) -> bool:
    """Whether two devices are the same; one without an index is the same as any of its type."""
    indices = {one.index, other.index} - {None}
    return one.type == other.type and len(indices) < 2
