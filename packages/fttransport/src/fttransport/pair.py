"""Pair: two members of a process group, with a channel of their own.

One pair's failure leaves the others' channels as they are. Only `send` and `recv` of the group
are used, with positions as they are given, so that it may be any group that has the two.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final, cast

import torch
from torch import Tensor

from distcore.v1 import ChannelError, ChannelTimeout, Message, Pending
from distcore.v1.runtime import GroupChannel
from fttransport.errors import (
    BY_NAME,
    DeadlineExceeded,
    IntegrityError,
    SourceLost,
    TransportError,
)

FRAME_NBYTES: Final = 4096
_TEXT_LENGTH: Final = 3000
_OTHER: Final = 1


class Pair:
    """This rank and the one at position `peer` of `group`.

    `wait_s` bounds each wait; None leaves that to the group's own timeout. What the carrier
    raises comes out as DeadlineExceeded or SourceLost.
    """

    def __init__(self, group: Any, peer: int, *, device: str | None, wait_s: float | None) -> None:
        self.peer = peer
        self._wait_s = wait_s
        two = cast("Any", _TwoOf(group, peer))
        self._channel = GroupChannel(two, ranks=(0, _OTHER), device=device)

    @property
    def device(self) -> torch.device:
        """Where buffers must lie."""
        return torch.device(self._channel.device)

    def start_send(self, buffer: Tensor) -> Pending:
        """Start to send a flat uint8 tensor on the pair's device."""
        with _carried(self.peer):
            return self._channel.start([Message(_OTHER, (buffer,))], [], timeout_s=self._wait_s)

    def start_receive(self, buffer: Tensor) -> Pending:
        """Start to fill a flat uint8 tensor on the pair's device."""
        with _carried(self.peer):
            return self._channel.start([], [Message(_OTHER, (buffer,))], timeout_s=self._wait_s)

    def finish(self, pending: Pending) -> None:
        """Wait for what was started."""
        with _carried(self.peer):
            pending.wait()

    def send(self, buffer: Tensor) -> None:
        """Send a flat uint8 tensor of the CPU."""
        self.finish(self.start_send(buffer.to(self.device)))

    def receive(self, nbytes: int) -> Tensor:
        """A flat uint8 tensor of the CPU, received."""
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        self.finish(self.start_receive(buffer))
        return buffer.cpu()

    def tell(self, **fields: object) -> None:
        """Send a few values in a frame of a fixed length."""
        text = json.dumps(fields).encode().ljust(FRAME_NBYTES)
        if len(text) > FRAME_NBYTES:
            raise ValueError(f"a frame of {len(text)} bytes")
        self.send(torch.frombuffer(bytearray(text), dtype=torch.uint8))

    def tell_error(self, error: BaseException) -> None:
        """Tell the peer in a frame what failed here."""
        name = type(error).__name__ if isinstance(error, TransportError) else "TransportError"
        text = error.text if isinstance(error, TransportError) else repr(error)
        ascii_text = text.encode("ascii", "backslashreplace").decode()[:_TEXT_LENGTH]
        self.tell(error=name, text=ascii_text.replace('"', "'").replace("\\", "/"))

    def hear(self) -> dict[str, Any]:
        """Receive a frame; raises the peer's error where it told of one."""
        frame = self.receive(FRAME_NBYTES).numpy().tobytes()
        try:
            fields = json.loads(frame)
        except ValueError as error:
            text = f"rank {self.peer} sent something else than a frame"
            raise IntegrityError(text) from error
        if not isinstance(fields, dict):
            raise IntegrityError(f"rank {self.peer} sent no table")
        if "error" in fields:
            kind = BY_NAME.get(str(fields["error"]), TransportError)
            raise heard(kind(str(fields.get("text"))))
        return fields


def heard(error: TransportError) -> TransportError:
    """Mark an error as the peer's, to whom it need not be told."""
    error.failures.setdefault("peer", error.text)
    return error


class _carried:  # noqa: N801 - used as a statement
    """Turns a channel's errors into errors of a transfer."""

    def __init__(self, peer: int) -> None:
        self._peer = peer

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ChannelTimeout):
            raise DeadlineExceeded(f"timed out waiting for rank {self._peer}: {error}") from error
        if isinstance(error, ChannelError):
            raise SourceLost(f"rank {self._peer}: {error}") from error


class _TwoOf:
    """A group of two: this rank at position 0, the peer at position 1."""

    def __init__(self, group: Any, peer: int) -> None:
        self._group = group
        self._peer = peer

    @property
    def _device_types(self) -> Sequence[Any]:
        return getattr(self._group, "_device_types", None) or ()

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return the name of the group's backend, where it has one."""
        named = getattr(self._group, "getBackendName", None) or getattr(self._group, "name", None)
        return str(named()) if callable(named) else ""

    def rank(self) -> int:
        """Return this rank's position in the pair."""
        return 0

    def size(self) -> int:
        """Return the size of the pair."""
        return 2

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> Any:
        """Start to send to the peer."""
        return self._group.send(tensors, self._peer, tag)

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> Any:
        """Start to receive from the peer."""
        return self._group.recv(tensors, self._peer, tag)
