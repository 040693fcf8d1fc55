"""Streams: where work on a device is enqueued. Nothing here touches CUDA for another device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def entered(device: torch.device, stream: Any) -> Iterator[Any]:
    """Enqueue what follows on `stream`; yields it, the current one where it is None."""
    if device.type != "cuda":
        yield stream
        return
    if stream is None:
        stream = torch.cuda.current_stream(device)
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield stream


def handle_of(stream: Any) -> Any:
    """What a communicator takes for a stream: its number where it has one."""
    return getattr(stream, "cuda_stream", stream)


def keep_for(stream: Any, *tensors: torch.Tensor) -> None:
    """Keep the memory of tensors until what is on `stream` by now is done.

    A communicator that goes past torch's dispatcher uses memory that torch knows nothing of.
    """
    for tensor in tensors:
        if tensor.is_cuda and stream is not None:
            tensor.record_stream(stream)


def settle(device: torch.device) -> None:
    """Return when all work on a CUDA device is done."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.synchronize(device)
