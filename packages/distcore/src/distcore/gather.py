"""Gather: bytes of every rank on one rank, straight into place.

The sizes come with the header of the call, so no rank pads to the largest and the destination
holds what it returns and nothing else; senders send from where the bytes are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from distcore.probes import is_distributed_run
from distcore.turn import Turn, take_turn
from distcore.v1.channel import Channel
from distcore.v1.errors import PlanError, Problem
from distcore.v1.header import Call, Header, digest16

if TYPE_CHECKING:
    from distcore.world import Group

CHUNK_BYTES: Final = 256 << 20


def gather_bytes(
    data: bytes | bytearray | memoryview,
    dst: int,
    group: Group | Channel | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> list[bytearray] | None:
    """Gather every rank's bytes on global rank `dst`: a list by index there, None elsewhere.

    Collective, a labelled call: another call or another `dst` on some rank raises on all, and so
    does a `dst` outside the group (PlanError) or data that is no bytes. Sizes may differ and be
    zero. At most `chunk_bytes` of each rank are on their way at a time. On the CPU nothing is
    copied on the way: the destination's memory grows by what it returns. Without a group and
    outside a run of several ranks this is a run of one rank.

    Other errors are those of `all_reduce`.
    """
    if group is None and not is_distributed_run():
        return [bytearray(checked_bytes(data, dst, (0,), chunk_bytes))]
    with take_turn(Call.GATHER, "gather_bytes", group) as turn:
        return collect(turn, data, dst, chunk_bytes)


def collect(
    turn: Turn, data: bytes | bytearray | memoryview, dst: int, chunk_bytes: int
) -> list[bytearray] | None:
    """The body of every gather: one header, then the room for all, then chunk after chunk."""
    channel = turn.channel
    view = turn.attempt(lambda: checked_bytes(data, dst, channel.ranks, chunk_bytes))
    headers = turn.meet(
        f"gathers on rank {dst}, {chunk_bytes} bytes at a time",
        value=digest16(str(chunk_bytes)),
        source=dst,
        extra=len(view),
    )
    found = turn.attempt(lambda: _room(headers, view, channel) if channel.rank == dst else None)
    turn.meet("has room for all")
    if found is None:
        turn.aside(lambda: _send(turn, _tensor_over(view), dst, chunk_bytes))
    else:
        turn.aside(lambda: _receive(turn, found, chunk_bytes))
    return found


def checked_bytes(
    data: bytes | bytearray | memoryview, dst: int, ranks: Sequence[int], chunk_bytes: int
) -> memoryview:
    """The data as a flat view; PlanError with everything that is wrong with the arguments."""
    problems = []
    if dst not in ranks:
        text = f"expected a rank of the group, {list(ranks)}, got {dst!r}"
        problems.append(Problem("dst", "rank", text))
    if not isinstance(chunk_bytes, int) or chunk_bytes < 1:
        text = f"expected a positive number of bytes, got {chunk_bytes!r}"
        problems.append(Problem("chunk_bytes", "size", text))
    if not isinstance(data, bytes | bytearray | memoryview):
        text = f"expected bytes, got a {type(data).__name__}"
        problems.append(Problem("data", "type", text))
    elif isinstance(data, memoryview) and not data.c_contiguous:
        problems.append(Problem("data", "layout", "expected bytes without gaps"))
    if problems:
        raise PlanError(problems)
    return memoryview(data).cast("B")


def _room(headers: Sequence[Header], view: memoryview, channel: Channel) -> list[bytearray]:
    return [
        bytearray(view) if at == channel.index else bytearray(header.extra)
        for at, header in enumerate(headers)
    ]


def _send(turn: Turn, data: torch.Tensor, dst: int, chunk_bytes: int) -> None:
    for start in range(0, data.numel(), chunk_bytes):
        turn.move({dst: data[start : start + chunk_bytes].to(turn.channel.device)}, {})


def _receive(turn: Turn, found: list[bytearray], chunk_bytes: int) -> None:
    channel = turn.channel
    places = {
        rank: _tensor_over(memoryview(found[at]))
        for at, rank in enumerate(channel.ranks)
        if at != channel.index
    }
    largest = max((place.numel() for place in places.values()), default=0)
    for start in range(0, largest, chunk_bytes):
        windows = {
            rank: place[start : start + chunk_bytes]
            for rank, place in places.items()
            if start < place.numel()
        }
        if channel.device == "cpu":
            turn.move({}, windows)
            continue
        staged = {rank: torch.empty_like(w, device=channel.device) for rank, w in windows.items()}
        turn.move({}, staged)
        for rank, window in windows.items():
            window.copy_(staged[rank])


class _Window:
    """Memory that numpy takes for writable. torch warns of any other, and sends only read."""

    def __init__(self, view: memoryview) -> None:
        interface: dict[str, Any] = np.frombuffer(view, dtype=np.uint8).__array_interface__
        self._view = view  # keeps the memory alive for as long as the array is
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


def _tensor_over(view: memoryview) -> torch.Tensor:
    if not len(view):
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_numpy(np.asarray(_Window(view)))
