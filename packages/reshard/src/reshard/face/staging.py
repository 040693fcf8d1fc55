"""Staging: what a rank sends and receives as contiguous buffers, and the calls that carry them.

A view that lies in order is sent and received where it lies; any other has a buffer of its own
size. No buffer is larger than the local tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from types import TracebackType
from typing import Any, Final

import torch

from reshard.face import streams
from reshard.face.duck_types import Receive, Region, Regions, Send, TensorLike, Transfer
from reshard.face.local_parts import local_tensor
from reshard.face.regions import local_slices
from reshard.memory import is_same, shared

# What a communicator knows; tensors of any other dtype travel as bytes.
_CARRIED: Final = frozenset(
    {
        torch.int8, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16,
        torch.float32, torch.float64,
    }
)  # fmt: skip
_PLAIN: Final = torch.contiguous_format


def stage_rank_operations(  # noqa: PLR0917 - the signature that users know
    rank: int,
    src_tensor: TensorLike | None,
    dst_tensor: TensorLike | None,
    src_regions: Regions,
    dst_regions: Regions,
    transfers: Iterable[Transfer],
    device: torch.device,
    dtype: torch.dtype,
    stream: Any = None,
) -> tuple[list[Send], list[Receive], torch.Tensor | None]:
    """Copy what stays on `rank`, and return what it sends, what it receives, and its destination.

    In the order of `transfers`. A receive names the view that its buffer is copied to afterwards,
    or None where the buffer is that view.
    """
    destination = local_tensor(dst_tensor)
    sends, receives = stage(
        rank,
        (local_tensor(src_tensor), destination),
        (src_regions, dst_regions),
        transfers,
        stream,
    )
    return sends, receives, destination


def stage_striped_operations(  # noqa: PLR0917 - the signature that users know
    rank: int,
    src_tensor: TensorLike | None,
    destination_buffer: torch.Tensor | None,
    src_regions: Regions,
    dst_regions: Regions,
    transfers: Iterable[Transfer],
    device: torch.device,
    dtype: torch.dtype,
    stream: Any,
) -> tuple[list[Send], list[Receive]]:
    """The same into a buffer for the local tensor: what it receives lies in the rank's stripe."""
    locals_ = local_tensor(src_tensor), destination_buffer
    return stage(rank, locals_, (src_regions, dst_regions), transfers, stream)


def stage(
    rank: int,
    locals_: tuple[torch.Tensor | None, torch.Tensor | None],
    regions: tuple[Regions, Regions],
    transfers: Iterable[Transfer],
    stream: Any,
) -> tuple[list[Send], list[Receive]]:
    """Copy what stays on the rank; the buffers for all else, in the order of `transfers`."""
    source, destination = (None if one is None else one.detach() for one in locals_)
    if source is not None and destination is not None:
        stays = is_same(source, destination) and regions[0][rank] == regions[1][rank]
        if not stays and any(shared({"source": source}, {"destination": destination})):
            source = source.clone()  # else it would be written over before it is sent
    sends: list[Send] = []
    receives: list[Receive] = []
    for sender, receiver, overlap in transfers:
        out = into = None
        if sender == rank:
            out = _view(source, overlap, regions[0][rank], "source")
        if receiver == rank:
            into = _view(destination, overlap, regions[1][rank], "destination")
        if out is not None and into is not None:
            into.copy_(out)
        elif out is not None:
            sends.append((receiver, out.contiguous()))
            streams.keep_for(stream, sends[-1][1])
        elif into is not None:
            direct = into.is_contiguous()
            buffer = into if direct else torch.empty_like(into, memory_format=_PLAIN)
            receives.append((sender, buffer, None if direct else into))
            streams.keep_for(stream, buffer)
    return sends, receives


def exchange_exact_overlaps(
    communicator: Any, sends: Sequence[Send], receives: Sequence[Receive], stream: Any
) -> None:
    """Start all sends, then all receives, as one group; afterwards fill the views.

    The group is closed whatever happens in it.
    """
    if not sends and not receives:
        return
    handle = streams.handle_of(stream)
    with _Grouped(communicator):
        for peer, buffer in sends:
            communicator.send(as_carried(buffer), peer, stream=handle)
        for peer, buffer, _ in receives:
            communicator.recv(as_carried(buffer), peer, stream=handle)
    for _, buffer, view in receives:
        if view is not None:
            view.copy_(buffer)
            streams.keep_for(stream, view)


def broadcast_destination(
    subcommunicator: Any, dst_local: torch.Tensor | None, stream: Any
) -> None:
    """Bring the local tensor of the representative to all ranks of its replica group."""
    if subcommunicator is None or dst_local is None or not dst_local.numel():
        return
    local = dst_local.detach() if dst_local.requires_grad else dst_local
    buffer = local if local.is_contiguous() else local.contiguous()
    streams.keep_for(stream, buffer, local)
    carried = as_carried(buffer)
    handle = streams.handle_of(stream)
    subcommunicator.broadcast(carried, carried, root=0, stream=handle)
    if buffer is not local:
        local.copy_(buffer)


def destination_buffer(
    dst_local: torch.Tensor | None, device: torch.device, dtype: torch.dtype, stream: Any
) -> tuple[torch.Tensor | None, bool]:
    """A contiguous tensor for the local destination, and whether it is another one.

    Then it has to be copied back.
    """
    if dst_local is None or dst_local.is_contiguous():
        return dst_local, False
    buffer = torch.empty(dst_local.shape, dtype=dtype, device=device)
    streams.keep_for(stream, buffer, dst_local)
    return buffer, True


def allgather_destination(
    subcommunicator: Any,
    destination_buffer: torch.Tensor | None,
    destination_region: Region,
    stripe_region: Region,
    stream: Any,
) -> None:
    """Bring the stripes of a replica group together, in place, on each of its ranks."""
    if subcommunicator is None or destination_buffer is None or not destination_buffer.numel():
        return
    whole = destination_buffer.detach()
    stripe = whole[local_slices(stripe_region, destination_region)]
    streams.keep_for(stream, whole)
    handle = streams.handle_of(stream)
    subcommunicator.allgather(as_carried(stripe), as_carried(whole), stream=handle)


def as_carried(buffer: torch.Tensor) -> torch.Tensor:
    """The same memory in a dtype that communicators know."""
    if buffer.dtype in _CARRIED:
        return buffer
    return buffer.as_strided((buffer.numel(),), (1,)).view(torch.uint8)


class _Grouped(AbstractContextManager[None]):
    """Opens a group of calls on entering, and closes it whatever happens.

    The communicator opens it where it can, else the module that nccl4py's communicators come
    with. Where there is neither, its calls must not wait for the peer.
    """

    def __init__(self, communicator: Any) -> None:
        self._owner: Any = communicator
        if not hasattr(communicator, "group_start"):
            self._owner = _nccl_core()

    def __enter__(self) -> None:
        if self._owner is not None:
            self._owner.group_start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._owner is not None:
            self._owner.group_end()


def _nccl_core() -> Any:
    try:
        return import_module("nccl.core")
    except ModuleNotFoundError as error:
        if error.name not in ("nccl", "nccl.core"):
            raise
        return None


def _view(local: torch.Tensor | None, overlap: Region, region: Region, side: str) -> torch.Tensor:
    if local is None:
        raise ValueError(f"expected a local {side} tensor that holds {region}, got none")
    return local[local_slices(overlap, region)]
