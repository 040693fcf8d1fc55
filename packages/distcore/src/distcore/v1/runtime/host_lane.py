"""A lane carries the messages of one direction between two ranks of one host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from distcore.v1.runtime.host_link import Frame

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class Ticket:
    """One message on its way to or from `peer`; `done` when the caller may have its buffers."""

    peer: int
    done: bool = False


class Lane(Protocol):
    """One direction of one pair of ranks. Messages keep the order in which they are submitted."""

    def submit(self, buffers: Sequence[torch.Tensor]) -> Ticket:
        """Take a message on; a message without bytes is done at once, on both ends."""

    def handle(self, frame: Frame) -> None:
        """Take in what the other end says."""

    def step(self) -> None:
        """Move what can be moved now. Raises OSError where the other end cannot be reached."""

    def close(self) -> None:
        """Give memory back; idempotent."""
